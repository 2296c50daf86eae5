from .domain import Membership, MembershipError
from .world import World, global_rank

__all__ = ["Membership", "MembershipError", "World", "global_rank"]
