"""The loop over generations, in every worker process.

Join, build, restore, train; when a peer is lost, salvage, cut the dead generation's connections,
and join again. Everything that can fail by a peer's death lies inside the loop, so a death during a
recovery is the next recovery.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from . import runtime
from .config import FaultToleranceConfig
from .events import EventLog, last_committed, rotate
from .launch.chaos import Fault, matching, parse
from .membership import Membership, World
from .membership.lighthouse import connect
from .mesh import outer_degree
from .recovery.protocol import Decision, decide, read_reports
from .recovery.state import Salvage
from .summary import write_summary
from .trainer import FaultTolerantTrainer, write_committed

_SAME_FAILURE_LIMIT = 3


class StateLost(RuntimeError):
    """More domains died than there were copies, and what they held is gone."""


@dataclass
class _Failure:
    """A generation that ended too early, and when what happened after it."""

    world: World
    phase: str
    step: int
    began: float
    """When the phase that broke was entered (unix seconds): no earlier can the death be felt."""
    noticed: float
    """When this rank was out of the broken operation (unix seconds)."""


@dataclass
class _Recovery:
    """When what happened on the way to a whole generation (unix seconds)."""

    failure: _Failure | None
    decision: Decision
    joined: float
    built: float = 0.0

    def fields(self) -> dict[str, Any]:
        """Of the ``recovered`` event. Detection counts from the start of the broken phase, which
        is no later than the death: it bounds the time, and includes work that was going on."""
        assert self.failure is not None
        now, failure = time.time(), self.failure
        built = self.built or now
        return {
            "seconds_detect": failure.noticed - failure.began,
            "seconds_quorum": self.joined - failure.noticed,
            "seconds_build": built - self.joined,
            "seconds_restore": now - built,
            "seconds_total": now - failure.began,
            "action": self.decision.action,
            "steps_lost": 0,
        }


class Supervisor:
    """Runs a job in this process, through as many generations as it takes.

    Args:
        config: the job.

    Raises:
        ValueError: if the settings do not fit together.
    """

    def __init__(self, config: FaultTolerantTrainer.Config) -> None:
        self._config = config
        ft: FaultToleranceConfig = config.fault_tolerance
        self._membership = Membership(ft, outer=outer_degree(config.parallelism))
        rank = self._membership.local_rank
        self._events = EventLog(
            Path(config.dump_folder) / "ft" / "events.jsonl", domain=ft.domain, rank=rank
        )
        self._faults: tuple[Fault, ...] = matching(parse(ft.chaos), ft.domain, rank)
        self._held: list[Salvage] = []
        self._last_failure: tuple[tuple[str, ...], int] | None = None
        self._repeats = 0

    def run(self) -> None:
        """Train until the job's steps are committed.

        Raises:
            StateLost: if shards are gone for good.
            MembershipError: if no generation could be formed in time.
            Exception: whatever the user's own code raised.
        """
        failure: _Failure | None = None
        # What is imported by now stays. Left out of collections, the one between two generations
        # takes 20 ms instead of 500.
        gc.freeze()
        while True:
            world = self._membership.join([asdict(s.state) for s in self._held])
            decision = decide(read_reports(world.domains, world.reports))
            recovery = _Recovery(failure, decision, joined=time.time())
            sockets = runtime.GlooSockets(spare=self._membership.spare_ports(world))
            trainer: FaultTolerantTrainer | None = None
            try:
                salvage = self._settle(decision)
                if salvage and salvage.state.committed >= self._config.training.steps:
                    self._report(world, None, salvage, recovery)
                else:
                    trainer = self._config.build(
                        world=world, decision=decision, events=self._events, faults=self._faults
                    )
                    recovery.built = time.time()
                    trainer.restore(salvage)
                    self._report(world, trainer, salvage, recovery)
                    failure = None
                    trainer.train()
                    trainer.close()
                self._finish(world)
                break
            except Exception as error:
                noticed = time.time()
                # First of all: whoever waits for us must learn that we are out.
                sockets.shut_down()
                if not runtime.is_communication_failure(error):
                    raise
                committed = trainer.committed if trainer else decision.step
                if self._broke_again(world.domains, committed):
                    raise
                phase = trainer.phase if trainer else "build"
                logger.warning(
                    f"Generation {world.generation} is broken in phase {phase}: "
                    f"{str(error).splitlines()[0]}"
                )
                if trainer is not None:
                    self._held = trainer.salvage()
                    trainer.close()
                if failure is None:
                    began = trainer.entered if trainer else noticed
                    step = trainer.step if trainer else 0
                    failure = _Failure(world, phase, step, began, noticed)
        self._membership.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _settle(self, decision: Decision) -> Salvage | None:
        """Act on the decision: bring the held state to the agreed step, and let the dead go."""
        if decision.action == "lost":
            raise StateLost(
                f"domains {', '.join(decision.lost)} died and nobody holds a copy of their shards. "
                "Raise fault_tolerance.overlap to survive that many failures at once, or enable "
                "[checkpoint] to have something to restart from."
            )
        chosen = None
        for salvage in self._held:
            if salvage.state.generation == decision.generation:
                salvage.settle(decision.step)
                chosen = salvage
        self._held = [chosen] if chosen else []
        if dist.is_initialized():
            dist.destroy_process_group()
        runtime.clear_dead_mesh_caches()
        gc.collect()  # torchtitan switches the collector off
        return chosen

    def _broke_again(self, domains: tuple[str, ...], committed: int) -> bool:
        """Whether the same domains have failed at the same step too often: nobody has died, so it
        is not a death that they could recover from."""
        same = self._last_failure == (domains, committed)
        self._repeats = self._repeats + 1 if same else 1
        self._last_failure = (domains, committed)
        return self._repeats >= _SAME_FAILURE_LIMIT

    # What is written down; one process does, the first of the generation.

    def _report(
        self,
        world: World,
        trainer: FaultTolerantTrainer | None,
        salvage: Salvage | None,
        recovery: _Recovery,
    ) -> None:
        if world.rank != 0:
            return
        write = self._events.write
        if world.generation == 1 and recovery.decision.action == "start":
            rotate(self._events.path)
        committed = trainer.committed if trainer else recovery.decision.step
        record = salvage.record if salvage else None
        if record and record.step == committed != last_committed(self._events.path):
            # The process whose part it was died between the commit and its event.
            write_committed(self._events, record, world.generation)
        failure = recovery.failure
        if failure is not None:
            write(
                "peer_lost",
                generation=failure.world.generation,
                step=failure.step,
                domains=[d for d in failure.world.domains if d not in world.domains],
                phase=failure.phase,
            )
        if trainer is not None:
            write(
                "generation_formed",
                generation=world.generation,
                step=committed,
                domains=list(world.domains),
                copies=trainer.copies,
                bytes_state=trainer.bytes_state,
                bytes_redundant=trainer.bytes_redundant,
                global_batch=trainer.plan.global_batch,
                seq_len=self._config.training.seq_len,
            )
        if failure is not None:
            write("recovered", generation=world.generation, step=committed, **recovery.fields())

    def _finish(self, world: World) -> None:
        """Leave together: nobody goes before the summary is written, and its writer goes last.

        Raises:
            torch.distributed.DistError: if the writer died first; then the others do it again.
        """
        bound = timedelta(seconds=self._config.fault_tolerance.rebuild_timeout_seconds)
        store = dist.PrefixStore(
            f"finish/{world.generation}", connect(world.store_address, bound.total_seconds())
        )
        if world.rank:
            store.wait(["written"], bound)
            store.set(f"gone/{world.rank}", "1")
            return
        self._events.write(
            "finished", generation=world.generation, step=self._config.training.steps
        )
        write_summary(self._events.path.parent)
        store.set("written", "1")
        try:
            store.wait([f"gone/{r}" for r in range(1, world.ranks)], timedelta(seconds=5))
        except dist.DistError:
            logger.info("Some rank did not say goodbye; the run is complete all the same.")
