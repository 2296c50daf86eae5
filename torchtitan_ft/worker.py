"""The entry point of one worker process; see train.py."""

from __future__ import annotations

import json
import os
import sys

from . import runtime
from .config import ConfigError, format_config, load_config


def main(argv: list[str] | None = None) -> None:
    """Run the job of ``--config FILE``, with ``--section.key value`` overriding the file.

    ``--print-config`` shows every setting and where it comes from; ``--describe`` prints, as one
    line of JSON, what a launcher must know. Exits with 2 on a bad configuration, 1 on a failed run.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every quorum at info
    arguments = list(sys.argv[1:] if argv is None else argv)
    describe = _take_flag(arguments, "--describe")
    print_config = _take_flag(arguments, "--print-config")
    runtime.activate()
    try:
        path = _take_value(arguments, "--config")
        from .trainer import adapt_config, check_supported

        loaded = load_config(path, arguments, adapt=adapt_config)
        from .launch.chaos import parse

        try:
            parse(loaded.config.fault_tolerance.chaos)
            check_supported(loaded.config)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        print(f"torchtitan-ft: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = loaded.config
    if print_config:
        print(format_config(loaded))
        return
    if describe:
        ft = config.fault_tolerance
        print(
            json.dumps(
                {
                    "dump_folder": config.dump_folder,
                    "steps": config.training.steps,
                    "failure_timeout_seconds": ft.bounds.failure,
                    "late_seconds": ft.bounds.late,
                }
            )
        )
        return
    _run(config)


def _run(config: object) -> None:
    from torchtitan.observability import structured_logger as sl
    from torchtitan.tools.logging import init_logger, logger

    from .membership import MembershipError
    from .supervisor import StateLost, Supervisor
    from .trainer import FaultTolerantTrainer

    assert isinstance(config, FaultTolerantTrainer.Config)
    init_logger()
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    try:
        Supervisor(config).run()
    except (StateLost, MembershipError) as error:
        logger.error(str(error))
        raise SystemExit(1) from None


def _take_flag(arguments: list[str], flag: str) -> bool:
    if flag in arguments:
        arguments.remove(flag)
        return True
    return False


def _take_value(arguments: list[str], flag: str) -> str:
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            value = arguments[i + 1]
            del arguments[i : i + 2]
            return value
        if argument.startswith(f"{flag}="):
            del arguments[i]
            return argument.split("=", 1)[1]
    raise ConfigError(f"{flag} FILE is required")


if __name__ == "__main__":
    main()
