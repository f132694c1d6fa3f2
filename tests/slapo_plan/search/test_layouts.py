"""Enumeration of layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_core import SlapoError
from slapo_plan.search.constraints import check_constraints, contradiction
from slapo_plan.search.layouts import LayoutSpace
from slapo_torch.dialect import TorchDialect

MODEL: Any = TorchDialect.classes["step_model"]
CHOICES = MODEL.pipeline_choices(), MODEL.replica_choices()


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 256), st.integers(1, 12))
def test_every_layout_uses_all_ranks_and_the_whole_batch(ranks: int, batch: int, blocks: int) -> None:
    space = LayoutSpace(ranks, batch, blocks, 8, {}, *CHOICES)
    for tp in space.degrees():
        for layout in space.layouts(tp):
            assert layout.tp * layout.pp * layout.dp == ranks
            assert layout.dp * layout.rows * layout.microbatches == batch
            assert layout.pp <= blocks


def test_constraints_hold() -> None:
    space = LayoutSpace(16, 64, 8, 8, check_constraints({"tp": [2, 4], "pp": 2, "data_parallel": "fsdp"}), *CHOICES)
    found = [layout for tp in space.degrees() for layout in space.layouts(tp)]
    assert {layout.tp for layout in found} == {2, 4}
    assert {layout.pp for layout in found} == {2}
    assert {layout.data_parallel for layout in found} == {"fsdp"}


@pytest.mark.parametrize(
    ("ranks", "constraints", "reason"),
    [
        (
            2,
            {"pp": 2, "pipeline_schedule": "interleaved"},
            "interleaved has 4 stages, and needs as many blocks and micro-batches",
        ),
        (1, {"data_parallel": "fsdp"}, "there is one replica, and fsdp needs 2 or more"),
    ],
)
def test_constraints_that_leave_nothing_say_why(ranks: int, constraints: dict[str, Any], reason: str) -> None:
    space = LayoutSpace(ranks, 8, 3, 8, check_constraints(constraints), *CHOICES)
    assert not [layout for tp in space.degrees() for layout in space.layouts(tp)]
    assert any(reason in each.reason for each in space.rejected)


CONSTRAINTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("tp", "pp", "dp", "rows", "microbatches"), st.integers(1, 9)),
        "sequence_parallel": st.booleans(),
        "data_parallel": st.sampled_from([*CHOICES[1]]),
    },
)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 16), st.integers(1, 24), CONSTRAINTS)
def test_constraints_that_contradict_each_other_name_values_that_work(
    ranks: int, batch: int, constraints: dict[str, Any]
) -> None:
    space = LayoutSpace(ranks, batch, 8, 8, check_constraints(constraints), *CHOICES)
    try:
        found = [layout for tp in space.degrees() for layout in space.layouts(tp)]
    except SlapoError:  # tp alone is impossible
        return
    if found or space.rejected:
        return
    problem, _, remedies = contradiction(space).partition("; ")
    assert all(f"{name}={value}" in problem for name, value in constraints.items())
    for name, values in re.findall(r"with (\w+)=(\S+(?: or (?!with)\S+)*)", remedies.removesuffix(" there is one")):
        for value in values.rstrip(",").split(" or "):
            kind = constraints[name]
            other = value if isinstance(kind, str) else value == "True" if isinstance(kind, bool) else int(value)
            changed = LayoutSpace(ranks, batch, 8, 8, check_constraints({**constraints, name: other}), *CHOICES)
            assert [layout for tp in changed.degrees() for layout in changed.layouts(tp)]


@pytest.mark.parametrize(
    ("constraints", "sentence"),
    [
        ({"rows": 3}, "no layout of 2 ranks and a global batch of 4 rows has rows=3; with rows=2 or 4 or 1 there is one"),
        ({"tp": 2, "pp": 2}, "has tp=2, pp=2; with tp=1, or with pp=1 there is one"),
        ({"tp": 2, "pp": 2, "dp": 2}, "has tp=2, pp=2, dp=2; leave two or more of these out"),
        ({"tp": 1, "sequence_parallel": True}, "with tp=2, or with sequence_parallel=False there is one"),
    ],
    ids=str,
)
def test_the_sentence_says_which_constraint_binds(constraints: dict[str, Any], sentence: str) -> None:
    space = LayoutSpace(2, 4, 8, 8, check_constraints(constraints), *CHOICES)
    assert sentence in contradiction(space)


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"tp": "2"}, "constraint tp is '2'; give a whole number from 1 on"),
        ({"tp": True}, "constraint tp is True; give a whole number"),
        ({"tp": 2.0}, "constraint tp is 2.0; give a whole number"),
        ({"rows": 0}, "constraint rows is 0; give a whole number from 1 on"),
        ({"pp": []}, r"constraint pp is \[\]; give a whole number"),
        ({"kernels": "yes"}, "constraint kernels is 'yes'; give True or False"),
        ({"data_parallel": 3}, "constraint data_parallel is 3; give a name"),
        (5, "constraints is 5; give a dict"),
    ],
    ids=str,
)
def test_constraints_of_a_wrong_kind_are_one_sentence(constraints: Any, words: str) -> None:
    with pytest.raises(SlapoError, match=words):
        check_constraints(constraints)


def test_a_constraint_of_none_allows_all_and_sets_are_lists() -> None:
    assert check_constraints({"tp": None, "pp": {1, 2}, "dp": range(1, 3)}) == {"pp": (1, 2), "dp": (1, 2)}
