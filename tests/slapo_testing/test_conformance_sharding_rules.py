"""The conformance kit on sharding rules: right ones pass, and each planted fault is caught."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from slapo_testing.conformance import ConformanceError, Refused, check_sharding_rule, sharding_rule_checks

from . import sharded_layers as layers

pytestmark = pytest.mark.multiproc


def failures(kind: type[nn.Module], **options: Any) -> dict[str, str]:
    """Return the message of each check that fails, by the name of the check."""
    found = {}
    for check in sharding_rule_checks(kind.__name__, [layers.example(kind, **options)]):
        try:
            check()
        except ConformanceError as error:
            found[check.name] = str(error)
    return found


@pytest.mark.parametrize(
    "kind", [layers.RightGated, layers.RightRow, layers.RightPositions, layers.RightGain], ids=lambda each: each.__name__
)
def test_a_right_rule_passes(kind: type[nn.Module]) -> None:
    check_sharding_rule(kind.__name__, [layers.example(kind)])


@pytest.mark.parametrize(
    ("kind", "check", "message"),
    [
        (
            layers.MixedBlocks,
            "split 'both' along 0, 2 ranks",
            r"in evaluation: output: 36 of 36 elements differ; larg",
        ),
        (layers.WholeShift, "split 'both' along 0, 2 ranks", r"tensor a \(6\) must match the size of tensor b \(12\)"),
        (layers.HiddenSum, "split 'both' along 0, 2 ranks", r"gradient of input\[0\]: 24 of 24 elements differ"),
        (layers.BiasOnEachRank, "split 'table' along 0, 2 ranks", r"output: 18 of 18 elements differ"),
        (layers.DetachedRow, "uneven 'table' along 0, 2 ranks", r"gradient of 'table': 42 of 42 elements differ; largest abs"),
        (layers.PartialGain, "split 'scale' along 0, 2 ranks", r"gradient of 'gain': 1 of 1 elements differ; largest absolute"),
        (layers.ReadsValues, "meta 'scale' along 0, 2 ranks", r"sharding rule 'ReadsValues' .* failed"),
        (layers.Unsplit, "registered", "shard finds no rule for the layer of Unsplit"),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_a_wrong_rule_is_caught(kind: type[nn.Module], check: str, message: str) -> None:
    found = failures(kind)
    assert check in found, found
    assert re.search(message, found[check])
    assert "Traceback" not in found[check] or "failed" in message, "an author needs that of his own function alone"


def test_what_is_wrong_for_uneven_parts_alone_is_caught() -> None:
    found = failures(layers.EvenPositions)
    assert [*found] == ["uneven 'scale' along 0, 3 ranks"]
    assert "output: 6 of 30 elements differ; largest absolute error 4 at" in found["uneven 'scale' along 0, 3 ranks"]


def test_a_call_that_is_to_be_refused_and_is_not() -> None:
    wrong = [Refused("leave it whole", ("scale", 0), {"uneven": True})]
    found = failures(layers.RightPositions, refused=wrong)
    assert "splits the layer over 2 ranks; it should be refused with 'leave it whole'" in found["refusals"]


def test_a_split_that_is_refused_has_to_be_listed() -> None:
    example = layers.example(layers.RightGated, ranks=1)
    found = failures(layers.RightGated, ranks=4, refused=[Refused("no parameter", ("bot", 0))])
    assert found == {}
    odd = replace(example, layer=layers.odd_gated, ranks=2)
    with pytest.raises(ConformanceError, match=r"not divisible by 2 ranks.*if this is right, list the call in refused="):
        check_sharding_rule("RightGated", [odd])
    check_sharding_rule("RightGated", [replace(odd, refused=[Refused("not divisible", ("both", 0))])])


def test_examples_are_needed_and_at_module_level() -> None:
    with pytest.raises(ConformanceError, match="there is no example"):
        check_sharding_rule("RightGated", [])
    with pytest.raises(ValueError, match="layer is a lambda or a function inside of one"):
        replace(layers.example(layers.RightRow), layer=lambda: layers.RightRow())
