"""Stands in for ``torchtitan_ft.worker`` where only the supervision of processes is tested.

``FAKE`` in the environment says how it behaves: per domain one word, the last one for all others.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from torchtitan_ft.events import EventLog
from torchtitan_ft.launch.chaos import Fault, parse
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
    note(folder / f"arguments-{domain}", " ".join(sys.argv[1:]))
    if word == "chaos":
        # Meets its faults, waits for the others to have met theirs, and ends as told.
        for fault in parse(value("--fault_tolerance.chaos")):
            if fault.domain == str(domain):
                meet(fault, log, folder)
        (folder / f"met-{domain}").touch()
        wait_until(lambda: all((folder / f"met-{d}").exists() for d in range(len(words))))
        word = "quiet" if domain else "finish"
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
        note(folder / f"namespace-{domain}", namespace())
        (folder / f"hanging-{domain}").touch()
        time.sleep(600)


def meet(fault: Fault, log: EventLog, folder: Path) -> None:
    """A fault as a worker has it: written down, then what it can do to itself."""
    if fault.action == "partition":
        wait_until((folder / "server").exists)
        host, port = (folder / "server").read_text().split()
        assert reaches(host, int(port))
    log.write(
        "chaos",
        generation=1,
        step=fault.step,
        action=fault.action,
        phase=fault.phase,
        seconds=fault.seconds,
        factor=fault.factor,
    )
    began = time.monotonic()
    if fault.action == "restart":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        note(folder / "stopped", str(time.monotonic() - began))
    elif fault.action == "kill_lighthouse":
        url = urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
        wait_until(lambda: not reaches(url.hostname, url.port))
        wait_until(lambda: reaches(url.hostname, url.port))
        note(folder / "lighthouse", str(time.monotonic() - began))
    elif fault.action == "partition":
        note(folder / f"namespace-{fault.domain}", namespace())
        wait_until(lambda: not reaches(host, int(port)))
        wait_until(lambda: reaches(host, int(port)))
        note(folder / "cut", str(time.monotonic() - began))
    elif fault.action == "slow":  # stands for one who can be called
        url = urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
        with socket.create_connection((str(url.hostname), url.port or 0)) as probe:
            host = probe.getsockname()[0]
        server = socket.create_server((host, 0))
        part = folder / "server.part"
        part.write_text(f"{host} {server.getsockname()[1]}")
        part.rename(folder / "server")
        wait_until((folder / "cut").exists)


def reaches(host: str | None, port: int | None) -> bool:
    try:
        socket.create_connection((str(host), port or 0), timeout=0.3).close()
    except OSError:
        return False
    return True


def namespace() -> str:
    command = ["ip", "netns", "identify", str(os.getpid())]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def note(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


if __name__ == "__main__":
    main()
