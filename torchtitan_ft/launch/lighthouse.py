"""The lighthouse of a launcher, without the seconds that importing torch takes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any


def _extension() -> ModuleType:
    """torchft's Rust part alone: ``import torchft.coordination`` imports all of torch (3 s)."""
    if "torchft" in sys.modules:
        from torchft import _torchft

        return _torchft
    package = importlib.util.find_spec("torchft")
    if package is None or package.submodule_search_locations is None:
        raise ImportError("torchft is not installed")
    spec = importlib.machinery.PathFinder.find_spec(
        "_torchft", list(package.submodule_search_locations)
    )
    if spec is None or spec.loader is None:
        raise ImportError("torchft has no extension module _torchft")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lighthouse:
    """A lighthouse on the loopback interface: its HTTP page would let anyone end a domain.

    Args:
        heartbeat_timeout_ms: a domain silent for this long is dead.
        join_timeout_ms: how long to wait for a live but late domain.
    """

    def __init__(self, *, heartbeat_timeout_ms: int, join_timeout_ms: int) -> None:
        os.environ.setdefault("RUST_LOG", "warn")  # torchft logs every quorum at info
        self._server: Any = _extension().LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=join_timeout_ms,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        # It reports the host's name, which need not lead to the loopback interface.
        self.address = f"http://127.0.0.1:{self._server.address().rsplit(':', 1)[1]}"

    def close(self) -> None:
        self._server.shutdown()
