"""Handwritten modules sharded by ``shard`` or by a given plan: the plan is correct, or an error names the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import SlapoError, build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import SPLIT
from tests.slapo_sharding.handwritten_branches import BRANCHES
from tests.slapo_sharding.planning.local_sizes.test_handwritten import net, tokens

pytestmark = pytest.mark.multiproc

ROWS = {
    "c_proj",
    "wo",
    "fc",
    "output",
    "out_proj",
    "proj",
    "o",
    "out",
    "to_out",
    "down",
    "w3",
    "w_out",
    "o_proj",
    "attn_out",
    "ff_out",
    "fc2",
}


ONE_LAYER = {"ParameterHeads", "TextConvolutions"}
"""Lists of branches without layers, before a list that a plan may split."""


def layers(kind: str) -> tuple[list[str], list[str]]:
    """Return the paths of the column-parallel and of the row-parallel layers of a module."""
    part = net(kind).blocks[0].part
    paths = [path for path, module in part.named_modules() if isinstance(module, nn.Linear) and path != "pair"]
    rows = [path for path in paths if path.rpartition(".")[2] in ROWS]
    return [path for path in paths if path not in rows], rows


def with_plan(sch: Any, columns: list[str], rows: list[str]) -> None:
    plans = ({f"blocks.*.part.{path}": style for path in paths} for paths, style in ((columns, "colwise"), (rows, "rowwise")))
    sch.tensor_parallel({path: style for plan in plans for path, style in plan.items()})


def by_shard(sch: Any, columns: list[str], rows: list[str]) -> None:
    for block in range(2):
        for path in columns:
            layer = sch[f"blocks.{block}.part.{path}"]
            names = ["weight"] if layer.mod.bias is None else ["weight", "bias"]
            layer.shard(names, axis=0, blocks=1).sync("bwd_post", "all_reduce")
        for path in rows:
            sch[f"blocks.{block}.part.{path}"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def messages_by_kind(rank: int, kinds: list[str], way: Any) -> dict[str, str]:
    """Return the error messages by kind; kinds without one have the outputs and gradients of the unmodified module."""
    found = {}
    for kind in kinds:
        expected, model = net(kind), net(kind)
        sch = create_schedule(model, example_inputs=(tokens(2, 8),))
        try:
            way(sch, *layers(kind))
            build(sch)
            model(tokens(2, 8))
        except SlapoError as err:
            found[kind] = str(err)
            continue
        for each in (expected, model):
            each(tokens(2, 8)).square().mean().backward()
        for name, gradient in sch.full_state("grad").items():
            torch.testing.assert_close(gradient, expected.get_parameter(name).grad, atol=1e-5, rtol=1e-3)
    return found


NAMED = re.compile(
    r"^\w+ 'blocks\.0\.part[\w.]*'(: it fails| uses '[\w.]+' in \w+)? at \S+handwritten\w*\.py:\d+[:,] .*; check=False turns"
)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_shards_by_hand_are_refused_with_a_remedy(every: int) -> None:
    kinds = [kind for kind in SPLIT if kind not in ONE_LAYER][::every]
    first, second = run_distributed(messages_by_kind, 2, kinds, by_shard, timeout=100)
    assert first == second
    assert [message for message in first.values() if not NAMED.search(message)] == []
    assert len(first) > 35 // every


ONE_KEY = {"OneKey", "OneKeyEach", "OneKeyEinsum", "OneKeyRepeated"}
LISTS = {kind.__name__ for kind in BRANCHES} - ONE_LAYER
OTHERWISE = {"Einops", "BiasOfPairs", "BatchedExperts", "SelectiveScan", "WeightRead", "Distances", *ONE_KEY, *LISTS}
"""Kinds whose plan here splits a layer along a wrong dimension, splits one that must be whole, or leaves one out."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_given_plan_is_correct_or_refused_with_a_remedy(every: int) -> None:
    kinds = [kind for kind in SPLIT if any(layers(kind)) and kind not in ONE_LAYER][::every]
    first, second = run_distributed(messages_by_kind, 2, kinds, with_plan, timeout=160)
    assert first == second
    assert first.keys() == OTHERWISE & set(kinds)
    assert first
    assert [message for message in first.values() if not NAMED.search(message)] == []


def unpacks(rank: int) -> None:
    sch = create_schedule(net("SplitByWidth"))
    with_plan(sch, *layers("SplitByWidth"))
    build(sch)
    sch.mod(tokens(2, 8))


def test_an_error_of_python_names_the_layer_and_a_remedy() -> None:
    expected = (
        r"SplitByWidth 'blocks.0.part': it fails at \S+handwritten_projections.py:\d+, ValueError: not enough values to unpack "
        r"\(expected 3, got 2\), where each rank has a part of the output of 'blocks.0.part.c_attn'; tensor_parallel\(\) "
        r"without plan= divides sizes that code takes from whole values; or gather the output there"
    )
    with pytest.raises(Exception, match=expected):
        run_distributed(unpacks, 2)


def wrong_call(rank: int) -> None:
    sch = create_schedule(net("SplitByWidth"))
    with_plan(sch, *layers("SplitByWidth"))
    build(sch)

    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = sch.mod

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            if given.dim() > 1:
                raise ValueError("give one row")
            return self.model(given)

    with pytest.raises(ValueError, match="^give one row$"):
        Refusing()(tokens(2, 8))


def test_an_error_before_the_first_layer_is_unchanged() -> None:
    run_distributed(wrong_call, 2)
