"""One domain of a 4-domain run that, after its steps, compares its shadows with their owners.

Started by test_shadows.py; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys

from torchtitan_ft import runtime

runtime.activate()

import torch
import torch.distributed as dist

from torchtitan_ft.config import load_config
from torchtitan_ft.config.bounds import StepBound
from torchtitan_ft.events import EventLog
from torchtitan_ft.faults import Injector
from torchtitan_ft.membership import Membership
from torchtitan_ft.membership.watch import Progress
from torchtitan_ft.recovery.protocol import Decision, Ledger
from torchtitan_ft.trainer import FaultTolerantTrainer, Process, adapt_config


def main() -> None:
    config = load_config(sys.argv[1], sys.argv[2:], adapt=adapt_config).config
    assert isinstance(config, FaultTolerantTrainer.Config)
    membership = Membership(config.fault_tolerance)
    world = membership.join([])
    events = EventLog(f"{config.dump_folder}/ft/events.jsonl", domain=world.domain, rank=0)
    assert world is not None
    process = Process(
        events=events,
        ledger=Ledger(),
        progress=Progress(),
        step_bound=StepBound(config.fault_tolerance.bounds, fixed=0.0, first=300.0),
        faults=Injector((), events),
    )
    trainer = config.build(world=world, decision=Decision("start"), process=process)
    trainer.restore([])
    trainer.train()
    own = trainer.shard().tensors
    differing, compared = [], 0
    for shadow in trainer.shadows:
        mine = shadow.shard().tensors
        for name in sorted(own):
            # The owner's tensor travels one hop backwards: owner -> holder.
            k = (world.ft_index - shadow.owner) % world.ranks
            receive = torch.empty_like(mine[name])
            operations = [
                dist.P2POp(dist.irecv, receive, shadow.owner),
                dist.P2POp(dist.isend, own[name], (world.ft_index + k) % world.ranks),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            compared += 1
            same = torch.equal(
                receive.reshape(-1).view(torch.uint8), mine[name].reshape(-1).view(torch.uint8)
            )
            if not same:
                differing.append(name)
    ft = trainer.parallel_dims.get_mesh("ft")
    print(
        json.dumps(
            {
                "compared": compared,
                "differing": differing,
                "names": sorted({n.split(".")[0] for n in own}),
                "step": trainer.step,
                "copies": trainer.copies,
                "ft": [ft.size(), ft.get_local_rank(), ft.get_group().size()],
                "weights": float(sum(t.double().sum() for n, t in own.items() if "model." in n)),
            }
        ),
        flush=True,
    )
    dist.barrier()
    membership.leave()


if __name__ == "__main__":
    main()
