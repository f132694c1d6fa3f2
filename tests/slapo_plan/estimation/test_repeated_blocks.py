"""Blocks that are left out are put back: the estimate of a deep model is the one without any left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Schedule, create_schedule, init_empty_weights
from slapo_plan import estimate, fake_ranks
from slapo_plan.measurement import repeated_blocks
from slapo_plan.measurement.repeated_blocks import LONGEST_PATTERN, block_runs, largest_run
from tests.zoo.families import FAMILIES, Family


class Block(nn.Module):
    """A residual block whose width decides its memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Blocks of these widths; work outside of them runs between each two."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(map(Block, widths))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x * 0.5)
        return x.float().square().mean()


PATTERNS = {
    "equal": (32,) * 9,
    "alternating": (32, 64) * 6,
    "with another behind": (64, *(32, 32, 48) * 5, 32, 32),
}


def lengths(model: nn.Module) -> list[tuple[int, int]]:
    """Return the lengths of the runs and of their patterns."""
    return [(len(run.names), run.length) for run in block_runs(model, longest=LONGEST_PATTERN)]


def test_patterns_are_found() -> None:
    assert lengths(Net(*PATTERNS["equal"])) == [(9, 1)]
    assert lengths(Net(*PATTERNS["alternating"])) == [(12, 2)]
    assert lengths(Net(*PATTERNS["with another behind"])) == [(1, 1), (15, 3), (2, 1)]
    assert lengths(Net(1, 2, 3, 4)) == [(1, 1)] * 4
    assert lengths(Net(1, 1, 1, 1, *(2, 3) * 2)) == [(4, 1), (1, 1), (1, 1), (1, 1), (1, 1)]


def test_three_patterns_are_kept_and_those_that_a_block_looks_ahead_to() -> None:
    model = Net(*(32, 64) * 8)
    (run,) = block_runs(model, longest=2)
    assert run.kept == ("0", "1", "2", "3", "14", "15")
    assert (run.num_dropped, run.measured_blocks) == (5, tuple(model.layers[2:4]))
    (run,) = block_runs(model, ahead=1, longest=2)
    assert run.kept == ("0", "1", "2", "3", "4", "5", "14", "15")
    assert (run.num_dropped, run.measured_blocks) == (4, tuple(model.layers[4:6]))
    assert [*pairwise(run.first)] == [(model.layers[0], model.layers[1])]


def schedule(name: str, mesh: Any, checkpoint: bool) -> tuple[Schedule, dict[str, torch.Tensor]]:
    """Return the schedule of a deep model on a mesh, with its blocks recomputed or not, and a batch."""
    with init_empty_weights():
        model = Net(*PATTERNS[name]) if name in PATTERNS else deep(FAMILIES[name])
    ids = torch.zeros(2, 12, dtype=torch.long)
    batch = {"ids": ids} if name in PATTERNS else {"input_ids": ids, "labels": ids}
    sch = create_schedule(model, mesh=mesh, example_inputs={key: ids for key in batch if key != "labels"})
    if mesh["tp"].size() > 1:
        sch.tensor_parallel()
    for block in sch.select("layers.*" if name in PATTERNS else "model.layers.*") if checkpoint else ():
        block.checkpoint()
    if mesh["pp"].size() > 1:
        sch.pipeline(mesh["pp"].size())
    return sch, batch


def deep(family: Family) -> nn.Module:
    model = family.model(depth=12)
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


CASES: list[tuple[str, dict[str, int], bool, dict[str, Any]]] = [
    ("alternating", {}, True, {"precision": "bf16"}),
    ("with another behind", {}, False, {}),
    ("with another behind", {}, True, {"precision": "bf16", "microbatches": 2}),
    ("equal", {"pp": 2}, True, {"precision": "bf16", "microbatches": 2}),
    ("alternating", {"dp": 4}, True, {"precision": "bf16", "data_parallel": "fsdp"}),
    ("llama", {"tp": 2}, True, {"precision": "bf16"}),
    ("gemma2", {"tp": 2}, True, {"precision": "bf16"}),
    ("gemma2", {"tp": 2, "pp": 2}, False, {"microbatches": 2}),
    ("gpt_oss", {"tp": 2}, True, {"precision": "bf16"}),
]
FAST = (0, 3)


@pytest.mark.parametrize(
    ("name", "layout", "checkpoint", "options"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (index not in FAST), id=f"{case[0]}-{index}")
        for index, case in enumerate(CASES)
    ],
)
def test_the_estimate_is_the_one_without_blocks_left_out(
    name: str, layout: dict[str, int], checkpoint: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_ranks(**layout) as mesh:
        sch, batch = schedule(name, mesh, checkpoint)
        found = estimate(sch, batch, hardware="h100", **options)
        monkeypatch.setattr(repeated_blocks, "KEPT", 1000)
        whole = estimate(sch, batch, hardware="h100", **options)
    assert not found.problems
    if name in PATTERNS:
        assert [each.memory for each in found.ranks] == [each.memory for each in whole.ranks]
    assert whole.peak <= found.peak <= 1.005 * whole.peak  # the first block of a model may free less than the others
    assert found.collectives == whole.collectives
    assert (found.flops, found.model_flops) == (whole.flops, whole.model_flops)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)


class Numbered(Net):
    """Net that takes the output of one block by its number, as models of images and text do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states[8].square().mean()


def test_a_model_that_counts_its_blocks_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"ids": torch.zeros(2, 12, dtype=torch.long)}
    sch = create_schedule(Numbered(*(32,) * 9), example_inputs=batch)
    found = estimate(sch, batch)
    monkeypatch.setattr(repeated_blocks, "KEPT", 1000)
    assert found == estimate(sch, batch)


class Parts(Net):
    """Net that runs what its blocks hold, as those of a dict do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.down(layer.up(layer.norm(x)).relu())
        return x.square().mean()


class Dicts(Net):
    """Net whose blocks are dicts of modules."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.layers = nn.ModuleList(nn.ModuleDict(each.named_children()) for each in self.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())
        return x.square().mean()


class Forwards(Net):
    """Net that calls the forward of its blocks, around their hooks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer.forward(x)
        return x.square().mean()


class EverySecond(Net):
    """Net that runs every second block."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers[::2]:
            x = layer(x)
        return x.square().mean()


class Twice(Net):
    """Net that runs all its blocks twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


class FirstHalf(Net):
    """Net that runs the first half of its blocks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers[: len(self.layers) // 2]:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("target", ["torch", "megatron"])
@pytest.mark.parametrize("kind", [Parts, Dicts, Forwards, EverySecond, Twice, FirstHalf, Numbered])
def test_blocks_that_are_not_called_one_after_the_other_all_run(
    kind: type[Net], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = {"ids": torch.zeros(2, 12, dtype=torch.long)}
    sch = create_schedule(kind(*(32,) * 9), example_inputs=batch)
    found = estimate(sch, batch, target=target)
    monkeypatch.setattr(repeated_blocks, "KEPT", 1000)
    whole = estimate(sch, batch, target=target)
    assert not whole.problems
    assert [each.memory for each in found.ranks] == [each.memory for each in whole.ranks]
    assert found.flops == whole.flops


class NumberedAndDeep(Net):
    """Numbered blocks, and behind them others with more parameters; the former are measured whole, the latter are not."""

    def __init__(self) -> None:
        super().__init__(*(32,) * 9)
        self.text = nn.ModuleList(Block(64) for _ in range(9))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        x = states[8]
        for layer in self.text:
            x = layer(x)
        return x.square().mean()


def test_blocks_beside_counted_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = {"ids": torch.zeros(2, 12, dtype=torch.long)}, NumberedAndDeep()
    (run,) = largest_run(block_runs(model))
    assert run.holder is model.text
    sch = create_schedule(model, example_inputs=batch)
    found = estimate(sch, batch)
    monkeypatch.setattr(repeated_blocks, "KEPT", 1000)
    whole = estimate(sch, batch)
    assert [each.memory for each in found.ranks] == [each.memory for each in whole.ranks]
    assert found.flops == whole.flops
