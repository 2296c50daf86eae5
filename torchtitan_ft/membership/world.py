"""Who takes part in a generation, and which global rank each process has in it. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """One generation as seen by one process; ``ft_index`` and ``local_rank`` alone differ."""

    generation: int
    domains: tuple[str, ...]
    """Names of the live domains, in their order along the ft axis."""
    ft_index: int
    """Place of this process's domain in ``domains``."""
    local_rank: int
    """Rank of this process inside its domain (torchrun's RANK)."""
    ranks_per_domain: int
    outer: int
    """
    Slices of a domain that lie outside the ft axis: pipeline stages times inner replicas. The
    global mesh is (pp, dp_replicate, ft, dp_shard, cp, tp), so that the ft axis runs inside them.
    """
    store_address: str
    """host:port of the TCPStore of this generation; its process may die."""
    reports: tuple[Any, ...]
    """
    What each domain said of itself when it joined, by ft index: a JSON value per rank of it. Empty
    for a domain that was no member of the last generation.
    """
    ids: tuple[str, ...] = ()
    """Of the domains' leading processes, by ft index."""
    addresses: tuple[str, ...] = ()
    """Where they answer whether they are alive, by ft index."""
    newcomers: tuple[str, ...] = ()
    """Domains that were no members of the last generation; none in a run's first."""
    giving_up: bool = False
    """Fewer than ``min_domains`` are left and none will come: only to bring the state to safety."""

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.domains) * self.ranks_per_domain

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return global_rank(
            self.ft_index, self.local_rank, len(self.domains), self.ranks_per_domain, self.outer
        )

    @property
    def domain(self) -> str:
        """Name of this process's domain."""
        return self.domains[self.ft_index]

    @property
    def speaks(self) -> bool:
        """Whether this process writes down what happened between the generations: one does, of those
        that were there."""
        first = next((i for i, d in enumerate(self.domains) if d not in self.newcomers), 0)
        return self.ft_index == first and self.local_rank == 0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types, for the wire."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any], *, local_rank: int) -> World:
        """The same world for another rank of the domain."""
        return World(
            **{
                **data,
                **{n: tuple(data[n]) for n in ("domains", "reports", "ids", "addresses")},
                "newcomers": tuple(data["newcomers"]),
                "local_rank": local_rank,
            }
        )


def global_rank(
    ft_index: int, local_rank: int, domains: int, ranks_per_domain: int, outer: int
) -> int:
    """Global rank of local rank ``local_rank`` of domain ``ft_index``.

    Raises:
        ValueError: if ``outer`` does not divide ``ranks_per_domain``.
    """
    if ranks_per_domain % outer:
        raise ValueError(
            f"a domain of {ranks_per_domain} ranks cannot hold {outer} pipeline stages x replicas"
        )
    inner = ranks_per_domain // outer
    outer_index, inner_index = divmod(local_rank, inner)
    return (outer_index * domains + ft_index) * inner + inner_index
