"""One generation of training: torchtitan's Trainer on the live world, with a step that can be lost.

What a step does beyond torchtitan's, all of it between clipping and the optimizer (hooks on the
optimizers' container; the step itself is torchtitan's own):

1. mirror: this rank's clipped gradient goes to the holders of its shard;
2. loss and samples of the step are summed over all ranks; the rank is now *prepared*;
3. vote: one small all-reduce; when it returns, every rank is prepared, and the step *commits*;
4. the optimizer runs on the own shard, then on the shadows.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from . import patches, runtime
from .config import FaultToleranceConfig
from .config.bounds import StepBound
from .data.loader import ElasticDataLoader
from .data.order import BatchPlan
from .events import EventLog
from .faults import Injector
from .initialization import set_initializers
from .membership import World, global_rank
from .membership.domain import connect
from .membership.watch import Progress
from .mesh import FaultTolerantParallelDims, data_parallel_degree
from .recovery.boxes import Box
from .recovery.exchange import Published, exchange, gather_json, publish
from .recovery.protocol import Decision, Ledger
from .recovery.state import (
    Salvage,
    Shard,
    StepRecord,
    box_of,
    create_optimizer_state,
    local,
    optimizer_state_bytes,
    optimizer_tensors,
)
from .redundancy.placement import copies_for, holders_of, lost_owners, owners_held_by
from .redundancy.shadow import Mirror, Shadow, check_optimizers
from .stragglers import Stragglers


@dataclass(frozen=True)
class Process:
    """What outlives the generations of a process, and each of them uses."""

    events: EventLog
    ledger: Ledger
    progress: Progress
    step_bound: StepBound
    faults: Injector
    leaving: Callable[[], bool] = lambda: False
    """Whether this process has been asked to leave."""


class Boundary(Exception):
    """A generation ends between two steps: others wait to be admitted, or some leave."""

    def __init__(self, leaving: tuple[int, ...], *, admit: bool) -> None:
        super().__init__(f"admit: {admit}, leaving: {leaving}")
        self.leaving = leaving
        """Of the domains that leave, the index along the ft axis."""
        self.admit = admit
        """Whether newcomers wait."""


class FaultTolerantTrainer(Trainer):
    """torchtitan's Trainer for one generation.

    Args:
        config: the job, as written for any world size.
        world: the generation.
        decision: what its members do with the state they have.
        process: what this generation shares with the others.
        waiting: names the domains that wait to be admitted, as far as this rank knows.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
        """Redundancy and membership."""

    def __init__(
        self,
        config: Config,
        *,
        world: World,
        decision: Decision,
        process: Process,
        waiting: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.world = world
        self.decision = decision
        self.process = process
        self.ledger = process.ledger
        self._waiting = waiting
        self._boundary: Boundary | None = None
        self._fresh = True
        self._store: dist.Store | None = None
        self.step = decision.step
        self._slow_bound = config.comm.init_timeout_seconds
        self._enter("build")
        self.seed = config.debug.seed or 0
        self.plan = batch_plan(config, world)
        super().__init__(self._fit(config))
        runtime.use_sum_reduction(self.model_parts)

        # The sharded parameters, before FSDP swaps them for unsharded ones in the first forward.
        self._params: dict[str, nn.Parameter] = {
            fqn: param for part in self.model_parts for fqn, param in part.named_parameters()
        }
        self._buffers = _persistent_buffers(self.model_parts)
        self.copies = copies_for(config.fault_tolerance.overlap, len(world.domains))
        if self.copies:
            check_optimizers(self.optimizers.optimizers, config.optimizer.implementation)
        self.shadows: list[Shadow] = []
        self._mirror: Mirror | None = None
        self.record: StepRecord | None = None
        self._sources: tuple[Salvage, ...] = ()
        self._restored = False
        self._handed_over: dict[int, Shard] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._step_began = 0.0
        self._computed = 0.0
        self._stragglers = Stragglers(world.domains)
        self.optimizers.register_step_pre_hook(self._before_update)
        self.optimizers.register_step_post_hook(self._after_update)
        self._mark_phases()

    # Building.

    def _fit(self, config: Any) -> Any:
        """The job fitted to this world: what torchtitan checks against the world size, and a model
        config of our own, since building changes it in place."""
        assert isinstance(config.dataloader, ElasticDataLoader.Config)
        model = copy.deepcopy(config.model_spec.model)
        restoring = not self.from_checkpoint
        set_initializers(model, seed=self.seed, restoring=restoring)
        plan = self.plan
        return replace(
            config,
            model_spec=replace(config.model_spec, model=model),
            training=replace(
                config.training,
                local_batch_size=plan.local_batch,
                global_batch_size=plan.local_batch * plan.accumulation_steps * plan.degree,
            ),
            dataloader=replace(config.dataloader, seed=self.seed, global_batch=plan.global_batch),
            debug=replace(config.debug, seed=self.seed),
            # The watch bounds every wait, from measured steps: what c10d waits must not be less.
            comm=replace(config.comm, train_timeout_seconds=config.comm.init_timeout_seconds),
            checkpoint=_for_emergency(config.checkpoint)
            if self.world.giving_up
            else config.checkpoint,
        )

    @property
    def from_checkpoint(self) -> bool:
        """Whether the state comes from a checkpoint or the seed, not from the memory of peers."""
        return self.decision.action in ("start", "lost")

    def init_distributed(self) -> ParallelDims:
        """The process group of this generation, and the meshes with the ft axis."""
        world, config = self.world, self.config
        bound = self.fault_tolerance.bounds.rebuild
        self._store = connect(world.store_address, bound)
        # torchtitan's own init does this too: the spmd meshes live in a thread-local stack.
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cuda:nccl,cpu:gloo",
            store=dist.PrefixStore(f"generation/{world.generation}", self._store),
            rank=world.rank,
            world_size=world.ranks,
            timeout=timedelta(seconds=max(bound, config.comm.init_timeout_seconds)),
        )
        return FaultTolerantParallelDims.from_world(config.parallelism, world)

    @property
    def fault_tolerance(self) -> FaultToleranceConfig:
        """The ``[fault_tolerance]`` table."""
        assert isinstance(self.config, FaultTolerantTrainer.Config)
        return self.config.fault_tolerance

    def _rank_of(self, ft_index: int) -> int:
        """Global rank of the process at this place of another domain."""
        w = self.world
        return global_rank(ft_index, w.local_rank, len(w.domains), w.ranks_per_domain, w.outer)

    # State.

    def shard(self) -> Shard:
        """The live state this rank owns."""
        whole: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in self._params.items()}
        whole |= {f"buffer.{n}": b for n, b in self._buffers.items()}
        whole |= {n: t for n, (_, t) in optimizer_tensors(self.optimizers.optimizers).items()}
        return Shard(
            {n: local(t) for n, t in whole.items()}, {n: box_of(t) for n, t in whole.items()}
        )

    def restore(self, held: Sequence[Salvage]) -> None:
        """Put the state in place, and the shadows beside it. Collective.

        The state comes from the memory of the live ranks, or, where nobody has any, from a checkpoint
        or the seed.

        Args:
            held: what this rank has; none on a newcomer.

        Raises:
            NoCheckpoint: if state was lost and there is none.
        """
        self._sources = tuple(held)
        salvage = next((s for s in held if s.generation == self.decision.generation), None)
        self._enter("join" if self.world.domain in self.world.newcomers else "restore")
        if self.from_checkpoint:
            self._load_checkpoint()
        else:
            self.step = self.decision.step
        step = self.step
        # train() loads once more; by then the state is in place.
        self.checkpointer.load = _loaded  # type: ignore[method-assign]
        self._mark_saving()

        if self.from_checkpoint:
            have = [self.shard()] if self.copies else []
        else:
            have = list(salvage.shards.values()) if salvage else []
        haves = gather_json(publish(have), self.device)
        with_optimizer = any(n.startswith("optimizer.") for h in haves for n in h)
        if with_optimizer and not self.from_checkpoint:  # there it is loaded already
            create_optimizer_state(self.optimizers.optimizers)
        own = self.shard()
        owns = gather_json(publish([own]), self.device)
        self._make_shadows(owns, with_optimizer)
        self._enter("recovery")
        restoring = not self.from_checkpoint
        need = ([own] if restoring else []) + [s.shard() for s in self.shadows]
        needs = [_needed(owns, r, self.world, self.copies, restoring) for r in range(len(owns))]
        exchange(have, need, haves, needs, self.device)

        self._continue_from(step)
        self.record = salvage.record if salvage and restoring else None
        self._count_bytes()
        self._restored = True
        self.ledger.restored(self.world.generation, self.world.domains, self.copies, step)

    def _load_checkpoint(self) -> None:
        """The newest complete checkpoint, as the first rank sees it; at the start else the seed.

        Raises:
            NoCheckpoint: if state was lost and there is none.
        """
        config = self.config.checkpoint
        step = config.load_step
        if self.decision.action == "lost":
            finder: Any = self.checkpointer
            seen = finder._find_load_step() if config.enable and self.world.rank == 0 else -1
            step = gather_json(seen, self.device)[0]
            if step < 0:
                raise NoCheckpoint
        self.checkpointer.load(step=step)

    def _make_shadows(self, owns: Sequence[Any], with_optimizer: bool) -> None:
        index, domains = self.world.ft_index, len(self.world.domains)
        owners = owners_held_by(index, domains, self.copies)
        for owner in owners:
            boxes = _boxes(owns[self._rank_of(owner)])
            shadow = Shadow(owner, boxes, self.optimizers.optimizers, self._params)
            if with_optimizer:
                create_optimizer_state(shadow.optimizers)
            self.shadows.append(shadow)
        if self.copies:
            self._mirror = Mirror(
                self._params,
                self.shadows,
                send_to=[self._rank_of(d) for d in holders_of(index, domains, self.copies)],
                receive_from=[self._rank_of(d) for d in owners],
            )

    def _continue_from(self, step: int) -> None:
        """Set everything that is a function of the step alone."""
        self.step = step
        assert isinstance(self.dataloader, ElasticDataLoader)
        self.dataloader.step = step
        if not self.from_checkpoint:
            self.lr_schedulers.load_state_dict({"last_epoch": step})
            for scheduler in self.lr_schedulers:
                for group, lr in zip(
                    scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True
                ):
                    group["lr"] = lr
        self.ntokens_seen = self._tokens_share(step)

    def _tokens_share(self, step: int) -> int:
        """This rank's part of the tokens of ``step`` steps: padding left out, the sum exact."""
        total = step * self.plan.global_batch * self.config.training.seq_len
        degree = self.plan.degree
        index = self.parallel_dims.get_mesh("batch").get_local_rank() if degree > 1 else 0
        return total // degree + (index < total % degree)

    def _count_bytes(self) -> None:
        """Bytes of state and of redundancy, per domain, as they are from the first step on."""
        state = self.shard().model_bytes + optimizer_state_bytes(self.optimizers.optimizers)
        redundant = sum(
            s.shard().model_bytes + optimizer_state_bytes(s.optimizers) for s in self.shadows
        )
        sizes = gather_json([self.world.ft_index, state, redundant], self.device)
        self.bytes_state = dict.fromkeys(self.world.domains, 0)
        self.bytes_redundant = dict.fromkeys(self.world.domains, 0)
        for ft_index, rank_state, rank_redundant in sizes:
            self.bytes_state[self.world.domains[ft_index]] += rank_state
            self.bytes_redundant[self.world.domains[ft_index]] += rank_redundant

    def salvage(self) -> list[Salvage]:
        """The state in this rank's memory, when the generation has ended.

        Until a generation has committed a step, the state it was restored from is kept too: some
        other rank may have failed to restore its part.
        """
        return [*self._sources, self._own_salvage()] if self._restored else list(self._sources)

    def _own_salvage(self) -> Salvage:
        salvage = Salvage(self.world.generation, self._shards(), self.record, None)

        def apply() -> None:
            # The optimizers themselves: the container's hooks would vote again.
            for optimizer in self.optimizers.optimizers:
                optimizer.step()
            for shadow in self.shadows:
                shadow.step()
            salvage.shards = self._shards()  # the first step of all creates optimizer state

        salvage.apply = apply
        return salvage

    def _shards(self) -> dict[int, Shard]:
        held = {s.owner: s.shard() for s in self.shadows}
        return {self.world.ft_index: self.shard(), **held, **self._handed_over}

    # One step.

    def train_step(self, data_iterator: Any) -> None:
        """torchtitan's step; see the module's docstring for what its hooks add."""
        self._step_began = time.perf_counter()
        self._loss.zero_()
        self._computed = 0.0
        first = self._fresh
        self._enter("before_step")
        super().train_step(data_iterator)
        self.ntokens_seen = self._tokens_share(self.step)
        self._enter("after_step")
        if not first:  # which may compile, and derives the sharding of every operator
            self.process.step_bound.measured(time.perf_counter() - self._step_began)

    def should_continue_training(self) -> bool:
        """torchtitan's question before each step.

        Raises:
            Boundary: if the generation is to end here; the step before is complete.
        """
        if not super().should_continue_training():
            return False
        if self._boundary is not None:
            boundary, self._boundary = self._boundary, None
            raise boundary
        return True

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """torchtitan's, with the loss remembered for the event of the step."""
        loss = super().forward_backward_step(**kwargs)
        if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
            self._loss += local(loss).double()
        return loss

    @torch.no_grad()
    def _before_update(self, *_: Any) -> None:
        self._enter("mirror")
        messages = self._mirror.start() if self._mirror is not None else []
        self.record = self._sum_up()
        for message in messages:
            message.wait()
        self.ledger.prepare(self.step)
        self._enter("vote", before=self._start_vote)
        if len(self.world.domains) > 1:  # also without copies: a link may break though nobody dies
            self._start_vote().wait()
            self._check_vote()
        self._enter("optimizer")

    def _sum_up(self) -> StepRecord:
        """Loss, norm and samples of the step, over all ranks.

        Raises:
            RuntimeError: on every rank alike, if loss or gradient is not finite, or if the samples
                read are not those of the step. The step is not applied.
        """
        assert isinstance(self.dataloader, ElasticDataLoader)
        batch, first = self.plan.global_batch, (self.step - 1) * self.plan.global_batch
        offsets = torch.tensor(self.dataloader.consumed, dtype=torch.float64) - first
        reads, sums_loss = self._roles()
        domains, index = len(self.world.domains), self.world.ft_index
        sums = torch.zeros(5 + 2 * domains, dtype=torch.float64)
        sums[0] = self._loss.cpu() * sums_loss
        sums[1] = len(offsets) * reads
        sums[2] = offsets.sum() * reads
        sums[3] = (offsets * offsets).sum() * reads
        sums[4] = len(self._waiting())
        sums[5 + index] = self.process.leaving()
        sums[5 + domains + index] = self._computed / self.world.ranks_per_domain
        total = sums.to(self.device)
        dist.all_reduce(total)
        loss, *rest = total.tolist()
        seen, waiting, asked = rest[:3], rest[3], rest[4 : 4 + domains]
        leaving = tuple(i for i, ranks in enumerate(asked) if ranks)
        if waiting or leaving:
            self._boundary = Boundary(leaving, admit=bool(waiting))
        expected = [batch, batch * (batch - 1) // 2, (batch - 1) * batch * (2 * batch - 1) // 6]
        if seen != expected:
            raise RuntimeError(
                f"the ranks read other samples than those of step {self.step}: "
                f"count, sum and squares are {seen}, expected {expected}"
            )
        grad_norm = float(patches.last_grad_norm())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RuntimeError(
                f"not finite at step {self.step}: loss {loss}, gradient norm {grad_norm}; "
                "the step was not applied"
            )
        samples = list(range(first, first + batch))
        seconds = time.perf_counter() - self._step_began
        if self.world.rank == 0:
            self._stragglers.measured(rest[4 + domains :], seconds)
        return StepRecord(self.step, loss, grad_norm, samples, seconds)

    def _roles(self) -> tuple[bool, bool]:
        """Whether this rank is the one to count its samples, and its loss: of the ranks that read
        the same samples, the first; of those that compute the same loss, the first."""
        dims = self.parallel_dims
        tp = self.world.rank % dims.tp
        cp = self.world.rank // dims.tp % dims.cp
        pp = self.world.rank // (self.world.ranks // dims.pp)
        return tp == cp == pp == 0, tp == 0

    def _start_vote(self) -> dist.Work:
        self._ballot = torch.tensor([self.step, -self.step], device=self.device)
        work = dist.all_reduce(self._ballot, op=dist.ReduceOp.MIN, async_op=True)
        assert work is not None
        return work

    def _check_vote(self) -> None:
        if self.device.type != "cpu":
            # An aborted NCCL collective returns, and what is queued behind it runs on garbage.
            torch.accelerator.synchronize()
        low, high = self._ballot.tolist()
        if (low, -high) != (self.step, self.step):
            raise RuntimeError(f"ranks disagree on the step: {low} to {-high}, here {self.step}")

    @torch.no_grad()
    def _after_update(self, *_: Any) -> None:
        for shadow in self.shadows:
            shadow.step()
        self.ledger.commit(self.step)
        self._sources = ()
        self._fresh = False
        if self.world.rank == 0:
            assert self.record is not None
            write_committed(self.process.events, self.record, self.world.generation)
            if (slow := self._stragglers.report()) is not None:
                self.process.events.write(
                    "straggler",
                    generation=self.world.generation,
                    step=self.step,
                    slow_domain=slow.domain,
                    ratio=slow.ratio,
                    share=slow.share,
                )
                logger.warning(
                    f"Domain {slow.domain} is slow: its layers take {slow.ratio:.1f} times as long "
                    f"as the others', {slow.share:.0%} of the step"
                )
        self._enter("after_commit")

    # Leaving.

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """Bring the shards of domains that leave to others, where no copy of them stays. Collective;
        the generation is whole, and between two steps."""
        world, domains = self.world, len(self.world.domains)
        staying = [i for i in range(domains) if i not in leaving]
        orphans = lost_owners(staying, domains, self.copies)
        if not orphans:
            return
        heirs = {owner: staying[n % len(staying)] for n, owner in enumerate(orphans)}
        mine = self.shard()
        owns = gather_json(publish([mine]), self.device)
        needs: list[Published] = [{} for _ in owns]
        inherited: dict[int, Shard] = {}
        for rank in range(world.ranks):
            local_rank, ft_index = place_of(rank, world)
            for owner in (o for o, heir in heirs.items() if heir == ft_index):
                published = owns[
                    global_rank(owner, local_rank, domains, world.ranks_per_domain, world.outer)
                ]
                for name, boxes in published.items():
                    needs[rank].setdefault(name, []).extend(boxes)
                if rank == world.rank:
                    inherited[owner] = _room_for(published, mine)
        haves = [owns[r] if place_of(r, world)[1] in orphans else {} for r in range(world.ranks)]
        have = [mine] if world.ft_index in orphans else []
        exchange(have, list(inherited.values()), haves, needs, self.device)
        self._handed_over = inherited
        for owner in inherited:
            self.ledger.take_over(owner)

    def save_now(self) -> None:
        """Write a whole checkpoint of the present step, whatever the interval is. Collective."""
        saver: Any = self.checkpointer
        saver.last_save_model_only = False
        saver.save(self.step, last_step=True)
        saver.maybe_wait_for_saving()

    # Phases and faults.

    def _mark_phases(self) -> None:
        """Notice when forward and backward pass the middle of the model, and what the layers take."""
        part = self.model_parts[0]
        layers = (
            list(part.get_submodule("layers").children()) if hasattr(part, "layers") else [part]
        )
        middle = layers[len(layers) // 2]

        def entering(*_: Any) -> None:
            if self.phase != "backward":  # activation checkpointing runs forward again
                self._enter("forward")

        def leaving(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(lambda _gradient: self._enter("backward"))

        middle.register_forward_pre_hook(entering)
        middle.register_forward_hook(leaving)
        if self.device.type == "cpu":  # elsewhere the layers run on after the call
            self._time_layers(layers)

    def _mark_saving(self) -> None:
        saver: Any = self.checkpointer
        save = saver.save

        def marked(step: int, last_step: bool = False) -> bool:
            if saver.enable and saver._should_save(step, last_step):
                self._enter("checkpoint")
            saved: bool = save(step, last_step=last_step)
            return saved

        saver.save = marked

    def _time_layers(self, layers: Sequence[nn.Module]) -> None:
        """A layer's forward pass waits for nobody: FSDP has gathered its weights before."""
        began = 0.0

        def entering(*_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def leaving(*_: Any) -> None:
            seconds = time.perf_counter() - began
            self._computed += seconds + self.process.faults.slow_down(seconds)

        for layer in layers:
            layer.register_forward_pre_hook(entering)
            layer.register_forward_hook(leaving)

    def _enter(self, phase: str, before: Callable[[], object] = lambda: None) -> None:
        """The main thread has come to ``phase``; ``before`` is called before a fault there."""
        self.phase, self.entered = phase, time.time()
        bound: float | None = None
        if len(self.world.domains) > 1:
            bound = self.process.step_bound.of(first=self._fresh)
            if phase in ("build", "restore", "recovery", "join", "checkpoint", "after_step"):
                bound = max(self._slow_bound, bound)
        self.process.progress.mark(bound)
        self.process.faults.at(phase, self.step, self.world, before)


class NoCheckpoint(Exception):
    """State was lost, and there is no checkpoint to go back to."""


def _loaded(step: int = -1) -> bool:
    return False


def _for_emergency(config: Any) -> Any:
    """Checkpoints that are written at once and hold everything, whether the job wants any or not."""
    return replace(
        config,
        enable=True,
        async_mode="disabled",
        last_save_model_only=False,
        last_save_in_hf=False,
        enable_first_step_checkpoint=False,
    )


def write_committed(events: EventLog, record: StepRecord, generation: int) -> None:
    """The one event that says a step is part of the run."""
    events.write(
        "step_committed",
        generation=generation,
        step=record.step,
        loss=record.loss,
        grad_norm=record.grad_norm,
        samples=record.samples,
        seconds=record.seconds,
    )


def batch_plan(config: FaultTolerantTrainer.Config, world: World) -> BatchPlan:
    """How the global batch, which no death changes, is split over the live world."""
    parallelism, training = config.parallelism, config.training
    batch = training.global_batch_size
    if batch < 0:
        batch = training.local_batch_size * data_parallel_degree(
            parallelism, world.ranks_per_domain, config.fault_tolerance.domains
        )
    degree = data_parallel_degree(parallelism, world.ranks_per_domain, len(world.domains))
    return BatchPlan(global_batch=batch, degree=degree, local_batch_limit=training.local_batch_size)


def adapt_config(config: Trainer.Config) -> FaultTolerantTrainer.Config:
    """A torchtitan job as a fault-tolerant one: same fields, our loader, ``fault_tolerance``."""
    config = runtime.adapt_config(config)
    values: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
    values["dataloader"] = ElasticDataLoader.Config(
        dataset=config.dataloader.dataset, dataset_path=config.dataloader.dataset_path
    )
    return FaultTolerantTrainer.Config(**values)


def check_supported(config: FaultTolerantTrainer.Config) -> None:
    """Refuse what torchtitan can and this plugin cannot yet, rather than train it wrongly.

    Raises:
        ValueError: naming the setting.
    """
    for axis in ("tensor", "pipeline", "context", "expert"):
        name = f"{axis}_parallel_degree"
        if getattr(config.parallelism, name) > 1:
            raise ValueError(
                f"parallelism.{name} > 1 is not supported yet: a domain's ranks share by FSDP only"
            )
    if config.parallelism.data_parallel_replicate_degree > 1:
        raise ValueError(
            "parallelism.data_parallel_replicate_degree > 1 is not supported: "
            "redundancy is fault_tolerance.overlap"
        )


def _persistent_buffers(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    found = {}
    for part in parts:
        for prefix, module in part.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _boxes(published: Published) -> dict[str, Box]:
    """Of a single shard."""
    return {n: Box(tuple(b[0][0]), tuple(b[0][1])) for n, b in published.items()}


def _room_for(published: Published, like: Shard) -> Shard:
    """Memory for another rank's shard, with the types of ``like``."""
    boxes = _boxes(published)
    return Shard({n: like.tensors[n].new_empty(box.size) for n, box in boxes.items()}, boxes)


def _needed(
    owns: Sequence[Any], rank: int, world: World, copies: int, restoring: bool
) -> dict[str, Any]:
    """What ``rank`` must get, in the order it stores it: its own shard, then its shadows'."""
    local_rank, ft_index = place_of(rank, world)
    sources = [rank] if restoring else []
    for owner in owners_held_by(ft_index, len(world.domains), copies):
        sources.append(
            global_rank(owner, local_rank, len(world.domains), world.ranks_per_domain, world.outer)
        )
    needed: dict[str, Any] = {}
    for source in sources:
        for name, boxes in owns[source].items():
            if source != rank and name.startswith("buffer."):
                continue  # the same everywhere; shadows do not keep them
            needed.setdefault(name, []).extend(boxes)
    return needed


def place_of(rank: int, world: World) -> tuple[int, int]:
    """(local rank, ft index) of a global rank."""
    inner = world.ranks_per_domain // world.outer
    outer_index, rest = divmod(rank, inner * len(world.domains))
    ft_index, inner_index = divmod(rest, inner)
    return outer_index * inner + inner_index, ft_index
