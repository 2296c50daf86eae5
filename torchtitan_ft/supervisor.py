"""The loop over generations, in every worker process.

Join, build, restore, train; when a peer is lost, salvage, cut the dead generation's connections,
and join again. Everything that can fail by a peer's death lies inside the loop, so a death during a
recovery is the next recovery.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from . import runtime
from .config import FaultToleranceConfig
from .config.bounds import StepBound
from .events import EventLog, last_committed, rotate
from .faults import Injector
from .launch.chaos import matching, parse
from .membership import Membership, MembershipError, World
from .membership.domain import connect
from .membership.lobby import Lobby
from .membership.watch import Loss, Progress, Watch
from .mesh import outer_degree
from .recovery.protocol import Decision, Ledger, decide, read_reports
from .recovery.state import Salvage
from .summary import write_summary
from .trainer import Boundary, FaultTolerantTrainer, NoCheckpoint, Process, write_committed

_SAME_FAILURE_LIMIT = 3


class StateLost(RuntimeError):
    """More domains died than there were copies, and what they held is gone."""


@dataclass
class _Ended:
    """How the last generation ended, as seen by one of its members."""

    world: World
    step: int
    noticed: float
    """When this rank was out of it (unix seconds)."""
    phase: str = ""
    """That broke; empty if the generation ended at a step boundary."""
    began: float = 0.0
    """When the lost domain was last known to live (unix seconds), or, where no loss was seen, when the
    phase that broke was entered."""
    left: tuple[str, ...] = ()
    """Domains that said goodbye."""


@dataclass
class _Times:
    """Of a new generation, in unix seconds."""

    joined: float
    built: float = 0.0


@dataclass
class _Guard:
    """What looks after a generation while it lives."""

    sockets: runtime.GlooSockets
    watch: Watch
    lobby: Lobby | None

    def waiting(self) -> tuple[str, ...]:
        """Domains that wait to be admitted, as far as this rank knows."""
        return self.lobby.waiting if self.lobby else ()


class Supervisor:
    """Runs a job in this process, through as many generations as it takes. Construct it in the main
    thread.

    Args:
        config: the job.

    Raises:
        ValueError: if the settings do not fit together.
    """

    def __init__(self, config: FaultTolerantTrainer.Config) -> None:
        self._config = config
        ft: FaultToleranceConfig = config.fault_tolerance
        self._drain = runtime.Drain(ft.drain_timeout_seconds)
        self._membership = Membership(
            ft, outer=outer_degree(config.parallelism), leaving=lambda: self._drain.asked
        )
        rank = self._membership.local_rank
        self._events = EventLog(
            Path(config.dump_folder) / "ft" / "events.jsonl", domain=ft.domain, rank=rank
        )
        self._process = Process(
            events=self._events,
            ledger=Ledger(),
            progress=Progress(),
            step_bound=StepBound(
                ft.bounds,
                fixed=ft.step_timeout_seconds,
                first=config.comm.init_timeout_seconds,
            ),
            faults=Injector(matching(parse(ft.chaos), ft.domain, rank), self._events),
            leaving=lambda: self._drain.asked,
        )
        self._held: list[Salvage] = []
        self._last_failure: tuple[tuple[str, ...], int] | None = None
        self._repeats = 0

    def run(self) -> None:
        """Train until the job's steps are committed, or until this domain has left.

        Raises:
            StateLost: if shards are gone for good.
            MembershipError: if no generation could be formed in time.
            Exception: whatever the user's own code raised.
        """
        logger.info(self._config.fault_tolerance.bounds.describe())
        # What is imported by now stays. Left out of collections, the one between two generations
        # takes 20 ms instead of 500.
        gc.freeze()
        ended: _Ended | None = None
        while True:
            if ended is not None and self._membership.domain in ended.left:
                self._say_goodbye()
                break
            world = self._membership.join([asdict(s) for s in self._process.ledger.held])
            assert world is not None
            self._drain.busy(True)
            ended = self._live(world, ended)
            if ended is None:
                break
        self._membership.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _live(self, world: World, ended: _Ended | None) -> _Ended | None:
        """One generation; None when the run is complete."""
        times = _Times(joined=time.time())
        decision = decide(read_reports(world.domains, world.reports))
        trainer: FaultTolerantTrainer | None = None
        with self._guarded(world) as guard:
            try:
                self._settle(decision)
                steps = self._config.training.steps
                if self._held and decision.action != "lost" and decision.step >= steps:
                    self._report(world, decision, None, ended, times)
                    self._finish(world, guard)
                    return None
                trainer = self._config.build(
                    world=world, decision=decision, process=self._process, waiting=guard.waiting
                )
                times.built = time.time()
                trainer.restore(self._held)
                self._report(world, decision, trainer, ended, times)
                ended, self._held = None, []
                if world.giving_up:
                    self._give_up(world, trainer)
                trainer.train()
                trainer.close()
                self._finish(world, guard)
                return None
            except Boundary as boundary:
                assert trainer is not None
                return self._at_boundary(world, guard, trainer, boundary)
            except NoCheckpoint:
                raise self._state_lost(decision) from None
            except Exception as error:
                return self._broken(world, guard, trainer, decision, ended, error)

    @contextmanager
    def _guarded(self, world: World) -> Iterator[_Guard]:
        """Watch over a generation, from its first connection on."""
        membership, bounds = self._membership, self._config.fault_tolerance.bounds
        sockets = runtime.GlooSockets(
            spare=membership.spare_ports(), store=int(world.store_address.rsplit(":", 1)[1])
        )

        def on_loss(loss: Loss) -> None:
            logger.warning(f"Generation {world.generation}: {loss.reason}")
            if loss.dead and loss.domain is not None:
                membership.expel(world, loss.domain)

        watch = Watch(
            {
                domain: address
                for domain, address in zip(world.domains, world.addresses, strict=True)
                if domain != world.domain or world.local_rank
            },
            silence=bounds.failure,
            patience=bounds.late,
            progress=self._process.progress,
            on_loss=on_loss,
            cut=sockets.shut_down,
            on_stuck=membership.mute,
        )
        looks = world.rank == 0 and not world.giving_up
        lobby = Lobby(lambda: membership.newcomers(world)) if looks else None
        watch.start()
        if lobby is not None:
            lobby.start()
        try:
            yield _Guard(sockets, watch, lobby)
        finally:
            if lobby is not None:
                lobby.stop()
            watch.stop()
            self._process.progress.mark(None)

    # How a generation ends.

    def _at_boundary(
        self, world: World, guard: _Guard, trainer: FaultTolerantTrainer, boundary: Boundary
    ) -> _Ended | None:
        """Nobody is lost, and the last step is complete."""
        noticed = time.time()
        left = tuple(world.domains[i] for i in boundary.leaving)
        try:
            if len(left) == len(world.domains):
                # There is nobody to hand anything over to.
                if self._config.checkpoint.enable:
                    trainer.save_now()
                logger.info(f"All domains leave after step {trainer.step}")
                trainer.close()
                return None
            trainer.hand_over(boundary.leaving)
        except Exception as error:
            decision = Decision("rerun", step=trainer.step)
            return self._broken(world, guard, trainer, decision, None, error)
        self._held = trainer.salvage()
        trainer.close()
        return _Ended(world, trainer.step, noticed, left=left)

    def _broken(
        self,
        world: World,
        guard: _Guard,
        trainer: FaultTolerantTrainer | None,
        decision: Decision,
        ended: _Ended | None,
        error: Exception,
    ) -> _Ended:
        """A peer is lost; raises ``error`` if it is not that."""
        noticed, loss = time.time(), guard.watch.loss
        # First of all: whoever waits for us must learn that we are out.
        guard.sockets.shut_down()
        if loss is None and not runtime.is_communication_failure(error):
            raise error
        committed = max(self._process.ledger.committed, decision.step)
        if self._broke_again(world.domains, committed):
            raise error
        phase = trainer.phase if trainer else "build"
        logger.warning(
            f"Generation {world.generation} is broken in phase {phase}: "
            f"{str(error).splitlines()[0]}"
        )
        if trainer is not None:
            self._held = trainer.salvage() or self._held
            trainer.close()
        if ended is not None and ended.phase:
            return ended  # the recovery from that one goes on
        began = loss.last_alive if loss else trainer.entered if trainer else noticed
        step = trainer.step if trainer else committed
        return _Ended(
            world, step, noticed, phase=phase, began=began, left=ended.left if ended else ()
        )

    def _say_goodbye(self) -> None:
        """The state is handed over. Ask once more, so that the others need not wait for silence."""
        self._drain.busy(False)
        self._membership.join([], leaving=True)
        logger.info(f"Domain {self._membership.domain} has left")

    def _give_up(self, world: World, trainer: FaultTolerantTrainer) -> None:
        """Too few domains are left, and nobody comes: bring the state to safety.

        Raises:
            MembershipError: always.
        """
        trainer.save_now()
        ft = self._config.fault_tolerance
        raise MembershipError(
            f"fewer than min_domains = {ft.min_domains} domains live, and no other came within "
            f"{ft.min_domains_timeout_seconds:g} s. The state of step {trainer.step} is saved as a "
            "checkpoint; start the job again with checkpoint.enable to go on from it"
        )

    def _settle(self, decision: Decision) -> None:
        """Act on the decision: bring the held state to the agreed step, and let the dead go."""
        if decision.action == "lost" and not self._config.checkpoint.enable:
            raise self._state_lost(decision)
        apply = self._process.ledger.settle(decision)
        kept = {h.generation for h in self._process.ledger.held}
        self._held = [s for s in self._held if s.generation in kept]
        if decision.action != "lost":
            for salvage in self._held:
                salvage.settle(decision.step, roll_forward=apply)
        if dist.is_initialized():
            dist.destroy_process_group()
        runtime.clear_dead_mesh_caches()
        gc.collect()  # torchtitan switches the collector off

    @staticmethod
    def _state_lost(decision: Decision) -> StateLost:
        return StateLost(
            f"domains {', '.join(decision.lost)} died and nobody holds a copy of their shards. "
            "Raise fault_tolerance.overlap to survive that many failures at once, or enable "
            "[checkpoint] to have something to go back to."
        )

    def _broke_again(self, domains: tuple[str, ...], committed: int) -> bool:
        """Whether the same domains have failed at the same step too often: nobody has died, so it
        is not a death that they could recover from."""
        same = self._last_failure == (domains, committed)
        self._repeats = self._repeats + 1 if same else 1
        self._last_failure = (domains, committed)
        return self._repeats >= _SAME_FAILURE_LIMIT

    # What is written down; one process does.

    def _report(
        self,
        world: World,
        decision: Decision,
        trainer: FaultTolerantTrainer | None,
        ended: _Ended | None,
        times: _Times,
    ) -> None:
        if not world.speaks:
            return
        now = time.time()
        first = decision.action == "start"
        if first and world.generation == 1:
            rotate(self._events.path)
        step = trainer.step if trainer else decision.step

        def write(event: str, **fields: Any) -> None:
            self._events.write(event, generation=world.generation, step=step, **fields)

        record = next((s.record for s in self._held if s.record), None)
        if record and record.step == step and last_committed(self._events.path) != step:
            # The process whose part it was died between the commit and its event.
            write_committed(self._events, record, world.generation)
        if ended is not None:
            gone = [
                d for d in ended.world.domains if d not in world.domains or d in world.newcomers
            ]
            lost = [d for d in gone if d not in ended.left]
            if ended.phase or lost:
                self._events.write(
                    "peer_lost",
                    generation=ended.world.generation,
                    step=ended.step,
                    domains=lost,
                    phase=ended.phase or "boundary",
                )
            if ended.left:
                write("domain_left", domains=list(ended.left))
        if trainer is not None:
            write(
                "generation_formed",
                domains=list(world.domains),
                copies=trainer.copies,
                bytes_state=trainer.bytes_state,
                bytes_redundant=trainer.bytes_redundant,
                global_batch=trainer.plan.global_batch,
                seq_len=self._config.training.seq_len,
            )
        if world.newcomers:
            stall = now - (ended.noticed if ended else times.joined)
            write("domain_joined", domains=list(world.newcomers), seconds_stall=stall)
        if ended is not None and ended.phase:
            built = times.built or now
            lost_steps = decision.step - step if decision.action == "lost" else 0
            write(
                "recovered",
                seconds_detect=ended.noticed - ended.began,
                seconds_quorum=times.joined - ended.noticed,
                seconds_build=built - times.joined,
                seconds_restore=now - built,
                seconds_total=now - ended.began,
                action="checkpoint" if decision.action == "lost" else decision.action,
                steps_lost=lost_steps,
            )

    def _finish(self, world: World, guard: _Guard) -> None:
        """Leave together: nobody goes before the summary is written, and its writer goes last.

        Raises:
            ConnectionError, torch.distributed.DistError: if the writer died first; then the others do
                it again.
        """
        guard.watch.stop()  # from here on, who closes its connections is done
        bound = timedelta(seconds=self._config.fault_tolerance.bounds.rebuild)
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
