from .fault_tolerance import FaultToleranceConfig

__all__ = ["FaultToleranceConfig"]
