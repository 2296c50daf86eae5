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
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from . import patches, runtime
from .config import FaultToleranceConfig
from .data.loader import ElasticDataLoader
from .data.order import BatchPlan
from .events import EventLog
from .initialization import set_initializers
from .launch.chaos import Fault
from .membership import World, global_rank
from .membership.lighthouse import connect
from .mesh import FaultTolerantParallelDims, data_parallel_degree
from .recovery.boxes import Box
from .recovery.exchange import exchange, gather_json, publish
from .recovery.protocol import Decision, HeldState
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
from .redundancy.placement import copies_for, holders_of, owners_held_by
from .redundancy.shadow import Mirror, Shadow, check_optimizers


class FaultTolerantTrainer(Trainer):
    """torchtitan's Trainer for one generation.

    Args:
        config: the job, as written for any world size.
        world: the generation.
        decision: what its members do with the state they have.
        spare_ports: see :class:`runtime.GlooSockets`.
        events: where the facts go.
        faults: faults to inject into this process.
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
        events: EventLog,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.world = world
        self.decision = decision
        self.events = events
        self._faults = faults
        self._store: dist.Store | None = None
        self.phase, self.entered = "build", time.time()
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
        self.committed = 0
        self.prepared = 0
        self.record: StepRecord | None = None
        self._source: Salvage | None = None
        self._restored = False
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._step_began = 0.0
        self.optimizers.register_step_pre_hook(self._before_update)
        self.optimizers.register_step_post_hook(self._after_update)
        self._mark_phases()

    # Building.

    def _fit(self, config: Any) -> Any:
        """The job fitted to this world: what torchtitan checks against the world size, and a model
        config of our own, since building changes it in place."""
        assert isinstance(config.dataloader, ElasticDataLoader.Config)
        model = copy.deepcopy(config.model_spec.model)
        restoring = self.decision.action != "start"
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
        )

    def init_distributed(self) -> ParallelDims:
        """The process group of this generation, and the meshes with the ft axis."""
        world, config = self.world, self.config
        bound = self.fault_tolerance.rebuild_timeout_seconds
        self._store = connect(world.store_address, bound)
        # torchtitan's own init does this too: the spmd meshes live in a thread-local stack.
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cuda:nccl,cpu:gloo",
            store=dist.PrefixStore(f"generation/{world.generation}", self._store),
            rank=world.rank,
            world_size=world.ranks,
            timeout=timedelta(seconds=bound),
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

    def restore(self, salvage: Salvage | None) -> None:
        """Put the state in place, and the shadows beside it. Collective.

        The state comes from the memory of the live ranks (``salvage`` is this rank's part, None for
        a newcomer), or, where nobody has any, from a checkpoint or the seed.
        """
        decision = self.decision
        if decision.action == "start":
            self.checkpointer.load(step=self.config.checkpoint.load_step)
            self.committed = self.step
        else:
            self.committed = decision.step
        # train() loads once more; by then the state is in place.
        self.checkpointer.load = _loaded  # type: ignore[method-assign]

        if decision.action == "start":
            have = [self.shard()] if self.copies else []
        else:
            have = list(salvage.shards.values()) if salvage else []
        haves = gather_json(publish(have), self.device)
        with_optimizer = any(n.startswith("optimizer.") for h in haves for n in h)
        if with_optimizer:
            create_optimizer_state(self.optimizers.optimizers)
        own = self.shard()
        owns = gather_json(publish([own]), self.device)
        self._make_shadows(owns, with_optimizer)
        restoring = decision.action != "start"
        need = ([own] if restoring else []) + [s.shard() for s in self.shadows]
        needs = [_needed(owns, r, self.world, self.copies, restoring) for r in range(len(owns))]
        exchange(have, need, haves, needs, self.device)

        self._continue_from(self.committed)
        self.record = salvage.record if salvage else None
        self._count_bytes()
        self._source = salvage
        self._restored = True

    def _make_shadows(self, owns: Sequence[Any], with_optimizer: bool) -> None:
        index, domains = self.world.ft_index, len(self.world.domains)
        owners = owners_held_by(index, domains, self.copies)
        for owner in owners:
            published = owns[self._rank_of(owner)]
            boxes = {n: Box(tuple(b[0][0]), tuple(b[0][1])) for n, b in published.items()}
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
        self.step = self.committed = self.prepared = step
        assert isinstance(self.dataloader, ElasticDataLoader)
        self.dataloader.step = step
        if self.decision.action != "start":
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
        """The state in this rank's memory, when the generation has broken.

        Until a generation has committed a step, the state it was restored from is kept too: some
        other rank may have failed to restore its part.
        """
        source = [self._source] if self._source else []
        return [*source, self._own_salvage()] if self._restored else source

    def _own_salvage(self) -> Salvage:
        held = HeldState(
            generation=self.world.generation,
            domains=self.world.domains,
            copies=self.copies,
            committed=self.committed,
            prepared=self.prepared,
        )
        salvage = Salvage(held, self._shards(), self.record, None)

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
        return {self.world.ft_index: self.shard()} | {s.owner: s.shard() for s in self.shadows}

    # One step.

    def train_step(self, data_iterator: Any) -> None:
        """torchtitan's step; see the module's docstring for what its hooks add."""
        self._step_began = time.perf_counter()
        self._loss.zero_()
        self._enter("before_step")
        super().train_step(data_iterator)
        self.ntokens_seen = self._tokens_share(self.step)
        self._enter("after_step")

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
        self.prepared = self.step
        self._enter("vote", before_kill=self._start_vote)
        if self.copies:
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
        total = torch.stack(
            [
                self._loss.cpu() * sums_loss,
                torch.tensor(float(len(offsets) * reads), dtype=torch.float64),
                offsets.sum() * reads,
                (offsets * offsets).sum() * reads,
            ]
        ).to(self.device)
        dist.all_reduce(total)
        loss, *seen = total.tolist()
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
        self.committed = self.step
        self._source = None
        if self.world.rank == 0:
            assert self.record is not None
            write_committed(self.events, self.record, self.world.generation)
        self._enter("after_commit")

    # Phases and faults.

    def _mark_phases(self) -> None:
        """Notice when forward and backward pass the middle of the model."""
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

    def _enter(self, phase: str, before_kill: Callable[[], object] = lambda: None) -> None:
        self.phase, self.entered = phase, time.time()
        for fault in self._faults:
            if fault.step == self.step and fault.phase == phase:
                self.events.write(
                    "chaos",
                    generation=self.world.generation,
                    step=self.step,
                    action=fault.action,
                    phase=phase,
                )
                before_kill()
                os.kill(os.getpid(), signal.SIGKILL)


def _loaded(step: int = -1) -> bool:
    return False


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


def _needed(
    owns: Sequence[Any], rank: int, world: World, copies: int, restoring: bool
) -> dict[str, Any]:
    """What ``rank`` must get, in the order it stores it: its own shard, then its shadows'."""
    local_rank, ft_index = _place(rank, world)
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


def _place(rank: int, world: World) -> tuple[int, int]:
    """(local rank, ft index) of a global rank."""
    inner = world.ranks_per_domain // world.outer
    outer_index, rest = divmod(rank, inner * len(world.domains))
    ft_index, inner_index = divmod(rest, inner)
    return outer_index * inner + inner_index, ft_index
