"""Stands in for ``torchtitan_ft.worker`` where only the supervision of processes is tested.

``FAKE`` in the environment says how it behaves: per domain one word, the last one for all others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_ft.events import EventLog
from torchtitan_ft.summary import write_summary


def value(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def main() -> None:
    folder = Path(os.environ["FAKE_FOLDER"])
    words = os.environ.get("FAKE", "finish").split(",")
    if "--describe" in sys.argv:
        if words[0] == "bad":
            print("some warning", file=sys.stderr)
            print("torchtitan-ft: trainnig: no such section", file=sys.stderr)
            sys.exit(2)
        print("chatter of an import")
        print(json.dumps({"dump_folder": str(folder), "steps": 2}))
        return
    domain = int(value("--fault_tolerance.domain"))
    word = words[min(domain, len(words) - 1)]
    print(f"[titan] root - INFO - here is domain {domain}", flush=True)
    print(f"[titan] root - WARNING - domain {domain} warns", flush=True)
    log = EventLog(folder / "ft" / "events.jsonl", str(domain), 0)
    if word == "finish":
        time.sleep(0.5)
        log.write(
            "generation_formed",
            generation=1,
            step=0,
            domains=["0", "1"],
            copies=1,
            bytes_state={},
            bytes_redundant={},
            seq_len=8,
            global_batch=1,
        )
        log.write("step_committed", generation=1, step=1, loss=2.5, samples=[0], seconds=0.1)
        log.write("finished", generation=1, step=1)
        write_summary(folder / "ft")
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "raise":
        raise ValueError("the moon is full")
    elif word == "flood":
        for number in range(200_000):
            print(f"line {number} " + "x" * 80)
    elif word == "quiet":  # leaves well, but with nothing done
        return
    elif word == "hang":
        # Deaf to SIGTERM, with a child of its own in another session that is deaf as well.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
            ],
            start_new_session=True,
        )
        (folder / f"hanging-{domain}").touch()
        time.sleep(600)


if __name__ == "__main__":
    main()
