from .abort import GlooSockets, is_communication_failure
from .cpu import activate, adapt_config, use_sum_reduction
from .drain import Drain
from .reset import clear_dead_mesh_caches

__all__ = [
    "Drain",
    "GlooSockets",
    "activate",
    "adapt_config",
    "clear_dead_mesh_caches",
    "is_communication_failure",
    "use_sum_reduction",
]
