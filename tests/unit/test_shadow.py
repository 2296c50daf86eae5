from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtitan_ft.recovery.state import (
    Salvage,
    StepRecord,
    box_of,
    create_optimizer_state,
    optimizer_state_bytes,
    optimizer_tensors,
)
from torchtitan_ft.redundancy.shadow import FlatGradients, Shadow, check_optimizers


def owner(implementation: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = {"a": nn.Parameter(torch.randn(7, 5)), "b": nn.Parameter(torch.randn(3))}
    settings = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    groups = [
        {
            "params": [params["a"]],
            "param_names": ["a"],
            "lr": 1e-2,
            "weight_decay": 0.1,
            **settings,
        },
        {
            "params": [params["b"]],
            "param_names": ["b"],
            "lr": 1e-3,
            "weight_decay": 0.0,
            **settings,
        },
    ]
    return params, torch.optim.AdamW(groups)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_shadow_follows_bit_for_bit(implementation: str) -> None:
    params, optimizer = owner(implementation)
    boxes = {f"model.{n}": box_of(p) for n, p in params.items()}
    shadow = Shadow(0, boxes, [optimizer], params)
    with torch.no_grad():
        for name, p in params.items():
            shadow.params[name].copy_(p)
    for step in range(20):
        for p in params.values():
            p.grad = torch.randn_like(p)
        for view, p in zip(shadow.gradients.views, params.values(), strict=True):
            view.copy_(p.grad)
        for group in optimizer.param_groups:  # a schedule
            group["lr"] = group["lr"] * 0.9
        optimizer.step()
        shadow.step()
        mine = shadow.shard()
        for name, p in params.items():
            assert torch.equal(mine.tensors[f"model.{name}"], p), step
        for name, (_, value) in optimizer_tensors([optimizer]).items():
            assert torch.equal(mine.tensors[name], value), (step, name)


def test_what_shadows_cannot_follow_is_refused_by_name() -> None:
    _, optimizer = owner("fused")
    check_optimizers([optimizer], "fused")
    with pytest.raises(ValueError, match="fused_opt_states_bf16"):
        check_optimizers([optimizer], "fused_opt_states_bf16")
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(4, 4))])
    with pytest.raises(ValueError, match=r"Muon.*overlap = 0\.0"):
        check_optimizers([muon], "fused")


def test_one_message_needs_one_dtype() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        FlatGradients([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)])


def test_created_state_has_the_names_and_sizes_of_real_state() -> None:
    _, fresh = owner("fused")
    expected = optimizer_state_bytes([fresh])
    assert not fresh.state
    create_optimizer_state([fresh])
    params, used = owner("fused")
    for p in params.values():
        p.grad = torch.ones_like(p)
    used.step()
    made, real = optimizer_tensors([fresh]), optimizer_tensors([used])
    assert {n: (t.shape, t.dtype) for n, (_, t) in made.items()} == {
        n: (t.shape, t.dtype) for n, (_, t) in real.items()
    }
    assert expected == sum(t.numel() * t.element_size() for _, t in real.values())


def salvage(calls: list[int], prepared: int) -> Salvage:
    record = StepRecord(prepared, 1.0, 1.0, [], 0.0)
    return Salvage(1, {}, record, lambda: calls.append(prepared))


def test_settling_applies_the_prepared_step_once() -> None:
    calls: list[int] = []
    held = salvage(calls, prepared=8)
    held.settle(8, roll_forward=True)
    held.settle(8, roll_forward=False)
    assert calls == [8]
    assert held.record is not None


def test_settling_on_the_committed_step_abandons_what_was_prepared() -> None:
    calls: list[int] = []
    held = salvage(calls, prepared=8)
    held.settle(7, roll_forward=False)
    assert calls == []
    assert held.record is None, "a step that was not applied must never be written down"
