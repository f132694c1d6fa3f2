"""Random models, cut at random places: outputs and gradients of the unmodified model, whatever is sent or made again."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from slapo_core import TraceError
from slapo_pipeline.partition import PartitionedModule

from .stage_comparison import assert_same, assert_same_as_model, expected_of

WIDTH, ROWS = 4, 3


def _without_gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([x, y, x])[:ROWS] * 2


def _changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = x * 1.0
    view = made[:, 1:]
    view.mul_(0.5)
    made[0] = 0.25
    return made + y.view_as(made)


OPERATIONS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x.double().mul(y).float(),
    lambda x, y: torch.cat([x, y, x]).chunk(3)[1],
    lambda x, y: torch.where(x > y, x, 0.5 * y),
    lambda x, y: x[None].expand(5, ROWS, WIDTH).reshape(5 * ROWS, WIDTH)[:ROWS] + y,
    lambda x, y: x.t().contiguous().t() - y.detach(),
    lambda x, y: torch.stack([x, y]).transpose(0, 1).mean(1),
    lambda x, y: F.dropout(x, 0.5) + y,
    lambda x, y: x.bfloat16().float().sigmoid() * y,
    lambda x, y: x.detach() * (y > 0),
    _without_gradients,
    _changed,
]


class Random(nn.Module):
    """Layers, and between them operations on what was made before.

    Args:
        steps: Per step the operation, or None for a layer, and the places of its two operands among the values so far.
        results: Places of the values that it gives beside a loss, if any.
    """

    def __init__(self, steps: list[tuple[int | None, int, int]], results: Collection[int] = ()) -> None:
        super().__init__()
        self.steps, self.results = steps, results
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for operation, *_ in steps if operation is None)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        values, layers = [x], iter(self.layers)
        for operation, first, second in self.steps:
            one, other = values[-1 - first % len(values)], values[-1 - second % len(values)]
            values.append(next(layers)(one) if operation is None else OPERATIONS[operation](one, other))
        loss = sum((value.tanh().mean() for value in values[-4:]), values[-1].new_zeros(()))
        return (loss, *(values[place % len(values)] for place in self.results)) if self.results else loss


STEP = st.tuples(st.none() | st.integers(0, len(OPERATIONS) - 1), st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=20, deadline=None)
@example([(0, 0, 0), (7, 0, 2), (None, 1, 0), (None, 0, 0)], {1}, []).via("a cast whose gradient would be rounded twice")
@example([(None, 0, 0)] * 4, {0, 1, 2, 3}, [1, 2]).via("results of early stages that later ones pass on")
@given(
    st.lists(STEP, min_size=4, max_size=14),
    st.sets(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 14), max_size=3),
)
def test_cuts_anywhere(steps: list[tuple[int | None, int, int]], cuts: set[int], results: list[int]) -> None:
    layer: tuple[None, int, int] = (None, 0, 0)
    model = Random([layer, *steps[: len(steps) // 2], layer, *steps[len(steps) // 2 :], layer], results)
    inputs = {"x": torch.randn(ROWS, WIDTH)}
    expected = expected_of(model, inputs)
    paths = [f"layers.{index}" for index in sorted(cuts) if index < len(model.layers) - 1] or ["layers.0"]
    try:
        program = assert_same_as_model(model, inputs, *paths, tolerance=1e-5, expected=expected)
    except TraceError as err:
        assert "share memory that stage" in str(err)  # noqa: PT017  said at times, and right
        return
    torch.manual_seed(1)
    assert_same(PartitionedModule(program, "stage_{}".format)(**inputs), expected.outputs, "as one module", 1e-5)
