"""Every test process looks like a worker on this machine: the runtime comes before torchtitan."""

from torchtitan_ft import runtime

runtime.activate()
