"""The rows that the first step's checks run backward: what rows inject is found, at the cost of few of them."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule, get_logger
from slapo_training.batches.rows import BatchRows
from slapo_training.first_step.row_subsets import Rows, dissimilar_quarters, join_rows
from tests.first_step_cases import Towers, WithLoss
from tests.slapo.gradient_injection import WAYS, Attach, Net, batches

SGD = partial(torch.optim.SGD, lr=0.1)
PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def checked(model: nn.Module, rows: dict[str, torch.Tensor], microbatches: int = 2, **options: Any) -> Any:
    """Return an engine whose checks were made."""
    engine = build(create_schedule(model, plugins=PLUGINS), "torch", optimizer=SGD, microbatches=microbatches, **options)
    engine.train_batch(**rows)
    return engine


def alike(rows: int) -> dict[str, torch.Tensor]:
    """Return rows with equal labels: which of them the checks look at is known."""
    found = batches(rows)[0]
    return {**found, "labels": torch.ones_like(found["labels"])}


class ByRows(Net):
    """Injects for rows that begin with a large number, by a function that runs for all or for a batch with such rows alone."""

    def __init__(self, always: bool) -> None:
        super().__init__("attached", ())
        self.always = always

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, chosen = super().forward(x, labels), (x[:, 0, 0] > 50).float()
        if not self.always and not chosen.any():
            return loss
        penalty = (self.first(x).square().mean((1, 2)) * chosen).mean()
        found: torch.Tensor = Attach.apply(loss, penalty)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("rows", [8, 6, 4, 2])
def test_what_one_row_injects_is_found(always: bool, rows: int) -> None:
    for row in (None, *range(rows // 2)):
        given = alike(rows)
        if row is not None:
            given["x"][row, 0, 0] = 100.0
        assert checked(ByRows(always), given)._first.injects == (row is not None), row


class MaskedPenalty(nn.Module):
    """Injects the gradient of a mean over what a mask marks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net("attached", ())

    def forward(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> Any:
        return Attach.apply(self.net(x, labels), (self.net.first(x).square().mean(-1) * mask).sum() / mask.sum())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("masked", [None, [1], [2, 3], [0, 1], [6, 7], [4]])
def test_injected_gradients_of_masked_means_are_named(masked: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(get_logger(), "handlers", [Lines(lines)])
    rows = {**alike(8), "mask": torch.ones(8, 6)}
    if masked is not None:
        rows["mask"][masked, 1:] = 0
    assert checked(MaskedPenalty(), rows)._first.injects
    assert ["are not the mean of those for their parts" in each for each in lines] == [True] * bool(masked)


class OfFourRows(Net):
    """Takes rows by fours."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 4, *x.shape[1:]).flatten(0, 1), labels)


@pytest.mark.parametrize("way", [*WAYS])
def test_a_model_that_does_not_run_half_a_micro_batch_is_looked_at(way: str) -> None:
    assert checked(OfFourRows(way), batches(8)[0])._first.injects
    assert not checked(OfFourRows(way, ()), batches(8)[0])._first.injects
    with pytest.raises(BuildError, match="injects gradients"):
        checked(OfFourRows(way), batches(8)[0], precision="fp16")


def rows_run(model: nn.Module, rows: dict[str, torch.Tensor], **options: Any) -> float:
    """Return the cost of the checks, in forwards and backwards of one micro-batch."""
    count, modules = Counter[str](), [each for each in model.modules() if isinstance(each, nn.Linear)]

    def behind(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        count["forward"] += len(output)
        if output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: count.update(backward=len(gradient))
            )

    modules[0].register_forward_hook(behind)
    checked(model, rows, **options)
    number = len(rows["x"])
    own = {name: value - number for name, value in count.items()}  # without the step
    return (own["forward"] + 2 * own["backward"]) / (3 * number / 2)


@pytest.mark.parametrize(
    ("middle", "cost"), [(nn.ReLU(), 1.0), (nn.Dropout(0.1), 1.5), (nn.BatchNorm1d(12), 5 / 3), (None, 1.5)], ids=str
)
def test_checks_cost_at_most_two_steps_of_a_micro_batch(middle: nn.Module | None, cost: float) -> None:
    rows = alike(16)
    if middle is None:
        model: nn.Module = Net("attached")
    else:
        rows["x"] = rows["x"][:, 0]
        model = WithLoss(Towers(middle), lambda out, labels: F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten()))
    assert rows_run(model, rows) == pytest.approx(cost)


class Graph:
    """Lives as long as a graph."""


class Kept(torch.autograd.Function):
    """Identity whose graph can be referred to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graphs: list[Any]) -> torch.Tensor:
        ctx.graph = Graph()
        graphs.append(weakref.ref(ctx.graph))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: Any


class Listing(nn.Module):
    """Counts graphs of former runs when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        ALIVE.append(sum(each() is not None for each in GRAPHS))
        hidden = Kept.apply(self.head(x), GRAPHS)  # type: ignore[no-untyped-call]
        return Output(F.cross_entropy(hidden.flatten(0, 1), labels.flatten()), {"rows": [hidden]})


GRAPHS: list[Any] = []
ALIVE: list[int] = []


def test_a_check_keeps_no_graph_of_a_former_run() -> None:
    checked(Listing(), batches(8)[0])
    assert len(ALIVE) > 4
    assert set(ALIVE[:-1]) == {0}


def rows_of(marks: list[int]) -> Rows:
    """Rows with a number each, and as many marks as is said."""
    return Rows(
        {"x": -1 - torch.arange(len(marks)).float(), "mask": torch.arange(6) < torch.tensor(marks)[:, None]}, None, BatchRows()
    )


def test_quarters_are_the_first_half_unless_others_differ_more() -> None:
    alike = [rows_of([6] * 4), rows_of([6] * 4)]
    quarters, is_half = dissimilar_quarters(alike, -100)
    assert is_half
    assert join_rows(quarters).batch["x"].tolist() == [-1, -2, -3, -4]
    for sizes in ((4, 4), (4, 3), (2, 1), (5, 4)):
        halves = [rows_of([6] * sizes[0]), rows_of([2] * sizes[1])]
        quarters, is_half = dissimilar_quarters(halves, -100)
        assert not is_half
        assert sum(each.number for each in quarters) == sizes[0]
        assert quarters[1].batch["mask"].sum(1).tolist() == [2] * quarters[1].number
    assert dissimilar_quarters(halves[:1], -100)[1]
