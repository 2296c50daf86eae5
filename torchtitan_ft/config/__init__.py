from .errors import ConfigError
from .fault_tolerance import FaultToleranceConfig
from .loader import LoadedConfig, load_config
from .show import format_config

__all__ = [
    "ConfigError",
    "FaultToleranceConfig",
    "LoadedConfig",
    "format_config",
    "load_config",
]
