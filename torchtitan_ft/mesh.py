"""torchtitan's parallel dims with the fault-tolerance axis.

A domain of G ranks is laid out as torchtitan lays out a job of G ranks: (pp, dp_replicate,
dp_shard, cp, tp). The ft axis of N domains lies between dp_replicate and dp_shard, and is folded
into dp_shard: to the model, ``dp_shard`` is N times the domain's own degree, so that FSDP spans the
live domains and every name in torchtitan's mesh keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims

from .membership import World


def domain_shard_degree(parallelism: ParallelismConfig, ranks_per_domain: int) -> int:
    """dp_shard inside one domain.

    Raises:
        ValueError: if the degrees do not make up ``ranks_per_domain``.
    """
    others = (
        outer_degree(parallelism)
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
    )
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, ranks_per_domain // others)
    if shard * others != ranks_per_domain:
        raise ValueError(
            f"the parallel degrees describe one fault domain: {shard * others} ranks by [parallelism], "
            f"but a domain has {ranks_per_domain}"
        )
    return shard


def outer_degree(parallelism: ParallelismConfig) -> int:
    """Slices of a domain outside the ft axis."""
    return parallelism.pipeline_parallel_degree * parallelism.data_parallel_replicate_degree


def data_parallel_degree(
    parallelism: ParallelismConfig, ranks_per_domain: int, domains: int
) -> int:
    """Ranks that read different samples when ``domains`` domains live."""
    shard = domain_shard_degree(parallelism, ranks_per_domain)
    return domains * shard * parallelism.data_parallel_replicate_degree


@dataclass
class FaultTolerantParallelDims(ParallelDims):
    """ParallelDims of the live world; ``get_mesh("ft")`` is the ft axis."""

    ft: int = 1

    @classmethod
    def from_world(cls, parallelism: ParallelismConfig, world: World) -> FaultTolerantParallelDims:
        """The dims of ``world``; ``parallelism`` describes one domain."""
        shard = domain_shard_degree(parallelism, world.ranks_per_domain)
        whole = replace(parallelism, data_parallel_shard_degree=shard * len(world.domains))
        dims = cls.from_config(whole, world.ranks)
        assert isinstance(dims, FaultTolerantParallelDims)
        dims.ft = len(world.domains)
        return dims

    def _mesh_exist(self, name: str, degree: int) -> bool:
        # A lone survivor still has an ft axis, of size 1: asking for it must not raise.
        return name == "ft" or super()._mesh_exist(name, degree)

    def build_mesh(self) -> DeviceMesh:
        """torchtitan's meshes, and the ft axis beside them."""
        world_mesh = super().build_mesh()
        shard = self.dp_shard // self.ft
        layout = world_mesh._unflatten(
            0,
            (self.pp, self.dp_replicate, self.ft, shard * self.cp * self.tp),
            ("ft_pp", "ft_replicate", "ft", "ft_inner"),
            backend_override={"ft_pp": "fake", "ft_replicate": "fake", "ft_inner": "fake"},
        )
        self._single_axis_meshes["ft"] = layout["ft"]
        return world_mesh
