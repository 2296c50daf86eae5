"""What outlives a generation inside torch, and must not."""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def clear_dead_mesh_caches() -> None:
    """Forget DTensor's sharding decisions, Python and C++ side.

    They hold DeviceMesh objects of the dead generation: FSDP meets them and refuses (torch 2.14).
    Private name; ``tests/unit/test_runtime.py`` breaks when it goes.
    """
    _clear_sharding_prop_cache()
