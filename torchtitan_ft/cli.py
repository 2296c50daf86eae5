"""The console script ``torchtitan-ft``. Imports no torch: a launcher starts at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand, and exit with its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides: tuple[str, ...] = ()
    if "--" in arguments:
        at = arguments.index("--")
        arguments, overrides = arguments[:at], tuple(arguments[at + 1 :])
    run: Callable[[tuple[str, ...]], int] = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="torchtitan-ft",
        description="Fault-tolerant pretraining with torchtitan.",
        args=arguments,
    )
    raise SystemExit(run(overrides))


def _launch(
    config: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    domains: int = 1,
    nproc_per_domain: int = 1,
    chaos: str = "",
    live: bool = True,
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> Callable[[tuple[str, ...]], int]:
    """Run all fault domains of a job on this machine.

    What follows ``--`` overrides the file: ``-- --training.steps 20``.

    Args:
        config: the job, as TOML.
        domains: fault domains; each is one torchrun.
        nproc_per_domain: ranks in each domain.
        chaos: faults to inject: ``ACTION:domain=D,step=S,phase=P[,rank=R]``, ``;`` between them;
            actions kill, term, restart (after=SECONDS), stop, hang, partition (for=SECONDS), slow
            (factor=F), kill_lighthouse (after=SECONDS, or 1); phases before_step, forward, backward,
            mirror, vote, optimizer, after_commit, checkpoint, and recovery, build, join, where the
            first at or after the step is meant. ``random:seed=N,mtbf_steps=F,actions=A+B`` draws
            some, and shows them.
        live: show a table of the domains, if the output is a terminal.
        print_config: show every setting and where it comes from; start nothing.
    """

    def run(overrides: tuple[str, ...]) -> int:
        from .launch.launcher import Job, LaunchError, launch

        job = Job(
            config=config,
            domains=domains,
            nproc_per_domain=nproc_per_domain,
            chaos=chaos,
            live=live,
            overrides=overrides,
        )
        if not print_config:
            return launch(job)
        try:
            job.check()
        except LaunchError as error:
            print(f"torchtitan-ft: {error}", file=sys.stderr)
            return error.code
        from . import worker

        worker.main(["--print-config", *job.arguments("0")])
        return 0

    return run


_COMMANDS: dict[str, Callable[..., Callable[[tuple[str, ...]], int]]] = {"launch": _launch}
"""Subcommands: functions of their options that return what to do with what follows ``--``."""


if __name__ == "__main__":
    main()
