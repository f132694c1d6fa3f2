"""Cuts are placed as well as the best of all placements tried one by one, by costs that are those of a real forward."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slapo_pipeline.balance.optimal_cuts import CutChoice, SharedAmounts, best_cuts, cuts_by_cost

from ..stage_comparison import cut
from ..test_transformers import SIZES, T5, TEXT, _model
from .test_pipeline import ResNet, X, mlp, refused, table


def _all(cost, crossing: list[int], stages: int) -> list[CutChoice]:
    """Every placement, by trying."""
    size = len(crossing) + 1
    found = []
    for cuts in itertools.combinations(range(1, size), stages - 1):
        ends = [0, *cuts, size]
        costs = [cost(stage, *pair) for stage, pair in enumerate(itertools.pairwise(ends))]
        found.append(CutChoice(max(costs), sum(crossing[cut - 1] for cut in cuts), sum(c * c for c in costs), cuts))
    return sorted(found)


@st.composite
def rows(draw: st.DrawFn):
    """Amounts of a row of units, some of them shared, kept once per micro-batch in flight or once."""
    size = draw(st.integers(1, 8))
    uses = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 4), st.integers(0, 9)), max_size=24))
    things = {thing: amount for _, thing, amount in uses}
    own = [(unit, ("own", unit), draw(st.integers(0, 9))) for unit in range(size)]
    shared = [(unit, thing, things[thing]) for unit, thing, _ in uses]
    once, kept = (sorted(part, key=lambda use: use[0]) for part in (own, shared))
    crossing = draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))
    return once, kept, crossing, draw(st.integers(1, size))


@settings(max_examples=300, deadline=None)
@given(rows())
def test_the_best_of_all(row) -> None:
    once, kept, crossing, stages = row
    fixed, flying = SharedAmounts(len(crossing) + 1, once), SharedAmounts(len(crossing) + 1, kept)

    def cost(stage: int, begin: int, end: int) -> int:
        return fixed.of(begin, end) + (stages - stage) * flying.of(begin, end)

    every = _all(cost, crossing, stages)
    best = best_cuts(cost, crossing, stages)
    assert best is not None
    assert best[:3] == every[0][:3]
    assert best in every
    some = list(itertools.islice(cuts_by_cost(cost, crossing, stages), 12))
    assert [found[:3] for found in some] == [found[:3] for found in every[:12]]
    assert len({found.cuts for found in some}) == len(some)


@settings(max_examples=200, deadline=None)
@given(rows(), st.data())
def test_amounts_count_a_thing_once(row, data: st.DataObject) -> None:
    _, kept, crossing, _ = row
    size = len(crossing) + 1
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin, size))
    assert SharedAmounts(size, kept).of(begin, end) == sum(
        {thing: a for unit, thing, a in kept if begin <= unit < end}.values()
    )


def _plain(costs: list[int]):
    return lambda stage, begin, end: sum(costs[begin:end])


def test_fewer_bytes_decide_between_equal_costs() -> None:
    best = best_cuts(_plain([4, 0, 0, 4]), [3, 1, 2], 2)
    assert best is not None
    assert best.cuts == (2,)


def test_evenness_decides_between_equal_costs_and_bytes() -> None:
    best = best_cuts(_plain([9, 1, 1, 1, 1]), [1, 1, 1, 1], 3)
    assert best is not None
    assert best.cuts == (1, 3)


def test_some_cuts_cannot_be_used() -> None:
    best = best_cuts(_plain([1, 1, 1, 1]), [1, 1, 1], 2, without=[2])
    assert best is not None
    assert best.cuts in [(1,), (3,)]


@pytest.mark.parametrize(("stages", "without"), [(4, [1]), (5, [])])
def test_too_few_places(stages: int, without: list[int]) -> None:
    assert best_cuts(_plain([1, 1, 1, 1]), [1, 1, 1], stages, without) is None


def test_a_thousand_layers() -> None:
    costs = [50, *[10] * 1000, 50]
    best = best_cuts(_plain_sums(costs), [1] * 1001, 64)
    assert best is not None
    assert best.largest == 160


def _plain_sums(costs: list[int]):
    sums = [0, *itertools.accumulate(costs)]
    return lambda stage, begin, end: sums[end] - sums[begin]


# ---- costs


def _saved(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Bytes that a real forward saves for its backward, each storage once, without the model's own tensors."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(**inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _families() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    llama = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 1, "use_cache": False}
    return {
        "llama": (_model("LlamaForCausalLM", **llama), TEXT),
        "eager": (_model("LlamaForCausalLM", **llama, attn_implementation="eager"), TEXT),
        "t5": (_model("T5ForConditionalGeneration", **{**T5, "num_layers": 3}, use_cache=False), TEXT),
        "resnet": (ResNet(), {"x": torch.randn(2, 3, 32, 32)}),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "eager", "t5", "resnet"])
def test_memory_is_that_of_a_real_forward(family: str) -> None:
    model, inputs = _families()[family]
    next(model.parameters()).requires_grad_(False)
    (whole,) = table(cut(model, inputs).pipeline(1, balance="memory")).stages
    states = sum(parameter.nbytes * (4 if parameter.requires_grad else 1) for parameter in model.parameters())
    assert whole.cost == states + _saved(model, inputs)


@pytest.mark.parametrize("microbatches", [None, 1, 2, 8])
def test_memory_of_the_micro_batches_in_flight(microbatches: int | None) -> None:
    inputs = {"input": torch.randn(64, 8)}
    stages = table(cut(mlp(8, 8, 8, 8), inputs).pipeline(4, balance="memory", microbatches=microbatches)).stages
    states, saved = 4 * (8 * 8 + 8) * 4, 64 * 8 * 4
    flying = [min(4 - stage, microbatches or 4) for stage in range(4)]
    assert [stage.cost for stage in stages] == [states + number * saved for number in flying]


def test_flops_are_those_of_a_real_forward() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = _families()["eager"]
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    stages = table(cut(model, inputs).pipeline(3, balance="flops")).stages
    assert sum(stage.cost for stage in stages) == counter.get_total_flops()
    fused, _ = _families()["llama"]
    assert table(cut(fused, inputs).pipeline(3, balance="flops")).stages == stages


def test_weights_on_meta_cost_the_same() -> None:
    families = _families()
    for model, inputs in (families["eager"], families["resnet"]):
        for balance in ("flops", "memory"):
            real = table(cut(model.to("cpu"), inputs).pipeline(2, balance=balance))
            meta = copy.deepcopy(model).to("meta")
            if hasattr(meta, "tie_weights"):
                meta.tie_weights()
            assert table(cut(meta, inputs).pipeline(2, balance=balance)) == real
            assert all(parameter.is_meta for parameter in meta.parameters())


class Dear(nn.Module):
    """Has side effects that would show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        self.calls += 1
        return torch.dropout(self.linear(x), 0.5, self.training)


@pytest.mark.parametrize("balance", ["parameters", "flops", "memory"])
def test_nothing_is_left_in_the_model(balance: str) -> None:
    model, before = nn.Sequential(Dear(), Dear(), Dear()), torch.get_rng_state()
    tensors = [*model.parameters(), *model.buffers()]
    cut(model, X).pipeline(3, balance=balance)
    assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert [int(module.calls) for module in model] == [0, 0, 0]
    assert all(not module.seen.any() for module in model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not module._forward_hooks for module in model.modules())


class Asks(nn.Module):
    """Looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool((x > 0).any()) else x


def test_a_model_that_does_not_run_on_fake_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Asks()), nn.Linear(8, 8))
    assert len(table(cut(model, X).pipeline(2)).stages) == 2
    refused(
        model,
        X,
        "does not run on fake tensors, so its FLOPs and memory are not known: .*use balance='parameters'",
        2,
        balance="flops",
    )
