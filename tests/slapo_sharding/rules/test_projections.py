"""Projections without a rule are split if the probe finds how, and otherwise stay replicated by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from slapo_core import create_schedule, get_logger, shard_spec
from slapo_testing import run_distributed


class Wrapped(nn.Module):
    """Reads the weight of the inner layer, and counts its calls."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base, self.calls = nn.Linear(inputs, outputs), 0
        self.down, self.up = nn.Parameter(torch.randn(inputs, 4)), nn.Parameter(torch.randn(4, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.linear(x, self.base.weight + (self.down @ self.up).T, self.base.bias)


class Int8(nn.Module):
    """Weights in int8, with a scale for each row."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("weight", torch.randint(-127, 127, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(outputs) / 64)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = F.linear(x, self.weight.to(x.dtype)) * self.scales + self.bias
        return out


class OverInt8(nn.Module):
    """A frozen int8 base with trained layers beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = Int8(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Packed(nn.Module):
    """Packed storage in one row of bytes, which cannot be split along both dimensions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("packed", torch.randint(0, 255, (inputs * outputs, 1), dtype=torch.uint8))
        self.scale = nn.Parameter(torch.tensor(0.0001))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.packed.to(x.dtype).view(self.out_features, self.in_features) * self.scale)


class Clipped(nn.Linear):
    """Clips its output, so that clipped partial values do not add up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-60000, 60000)


class Low(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(4, inputs)), nn.Parameter(torch.randn(outputs, 4))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.up @ self.down).view(weight.shape)


def low(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    parametrize.register_parametrization(layer, "weight", Low(inputs, outputs))
    return layer


def dora(inputs: int, outputs: int) -> nn.Module:
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    config = LoraConfig(r=4, use_dora=True, init_lora_weights=False)
    return Linear(nn.Linear(inputs, outputs), "default", r=4, lora_alpha=8, config=config)


BOTH: dict[str, Callable[[int, int], nn.Module]] = {
    "wrapped": Wrapped,
    "over int8": OverInt8,
    "parametrized": low,
}
COLUMNS: dict[str, Callable[[int, int], nn.Module]] = {"packed": Packed, "clipped": Clipped, "dora": dora}
ALL = {**BOTH, **COLUMNS}


class Block(nn.Module):
    """An MLP of such projections; with ``outer`` its second layer is a Linear."""

    def __init__(self, make: Callable[[int, int], nn.Module], outer: bool) -> None:
        super().__init__()
        self.fc, self.proj = make(8, 16), nn.Linear(16, 8) if outer else make(16, 8)
        self.fc2, self.proj2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(F.gelu(self.fc(x)))
        out: torch.Tensor = x + self.proj2(F.gelu(self.fc2(x)))
        return out


def made(kind: str, outer: bool) -> Block:
    torch.manual_seed(0)
    return Block(ALL[kind], outer)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_all_kinds(rank: int) -> dict[str, tuple[float, set[str], str]]:
    """Train each kind for three steps; return differences of weights, split names and warnings."""
    found = {}
    for kind in ALL:
        log, outer = _Messages(), kind in COLUMNS
        get_logger().addHandler(log)
        model, whole = made(kind, outer), made(kind, outer)
        schedule = create_schedule(model, example_inputs=(torch.randn(4, 8),))
        schedule.tensor_parallel()
        get_logger().removeHandler(log)
        steps = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.001) for each in (model, whole)]
        for rows in (4, 2, 6):
            x = torch.randn(rows, 3, 8)
            for each, step in zip((model, whole), steps, strict=True):
                step.zero_grad()
                each(x).square().mean().backward()
                step.step()
        full: dict[str, Any] = schedule.full_state()
        apart = max(float((full[name] - each.detach()).abs().max()) for name, each in whole.named_parameters())
        held = [*model.named_parameters(), *model.named_buffers()]
        found[kind] = apart, {name for name, each in held if shard_spec(each) is not None}, " ".join(log.messages)
    return found


@pytest.mark.multiproc
@pytest.mark.timeout(200)
def test_projections_are_split_with_all_their_tensors_or_stay_whole_by_name() -> None:
    for found in run_distributed(train_all_kinds, 2, timeout=150):
        for kind, (apart, split, _) in found.items():
            assert apart < 3e-5, kind
            assert {"fc2.weight", "proj2.weight"} <= split, kind
            for layer in ("fc.", "proj."):
                assert any(name.startswith(layer) for name in split) == (kind != "packed"), (kind, split)
        assert {"fc.base.weight", "fc.base.scales", "fc.up.weight"} <= found["over int8"][1]
        assert "fc stays whole on every rank: a shard of the output of the Packed" in found["packed"][2]
