from .abort import GlooSockets, is_communication_failure
from .cpu import activate, adapt_config
from .reset import clear_dead_mesh_caches

__all__ = [
    "GlooSockets",
    "activate",
    "adapt_config",
    "clear_dead_mesh_caches",
    "is_communication_failure",
]
