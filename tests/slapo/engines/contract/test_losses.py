"""Losses that are not plain means, on other projects' engines: each step is that of the whole batch, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.engines import zero
from tests.loss_cases import CASES, REFUSED, all_differences, refusals
from tests.loss_graphs import OTHERS, train

pytestmark = pytest.mark.multiproc

TARGETS = ("deepspeed", "megatron")
NAMES = {"deepspeed": [name for name in CASES if name != "over clip"], "megatron": [*CASES]}
"""DeepSpeed takes no parameter without dimensions."""
SLOW = [
    ({"dp": 2}, {"microbatches": 1}),
    ({"pp": 2}, {"microbatches": 2}),
    ({"tp": 2}, {"microbatches": 2}),
]


@pytest.mark.parametrize(
    ("target", "layout", "options"),
    [
        *((target, {"dp": 2}, {"microbatches": 2}) for target in TARGETS),
        *(pytest.param(target, *case, marks=pytest.mark.slow) for target in TARGETS for case in SLOW),
        pytest.param("deepspeed", {"dp": 2}, {"microbatches": 2, **zero(3)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_step_is_that_of_the_whole_batch(target: str, layout: dict[str, int], options: dict[str, Any]) -> None:
    names = ["over split"] if "tp" in layout else NAMES[target]
    for found in run_distributed(all_differences, 2, target, layout, options, names, timeout=110):
        for name, difference in found.items():
            assert not isinstance(difference, str), (name, difference)
            assert difference < (5e-5 if name == "over sum" else 5e-6), name


@pytest.mark.parametrize("target", TARGETS)
def test_what_does_not_fit_is_refused_on_all_ranks(target: str) -> None:
    for found in run_distributed(refusals, 2, target, {"dp": 2}):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], (name, found[name])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_hidden", [pytest.param(False, marks=pytest.mark.slow), True], ids=["shown", "hidden"])
def test_a_mean_that_is_not_the_loss_is_not_taken_for_it(target: str, is_hidden: bool) -> None:
    names = ["logged before", "two heads", *OTHERS, "later"]
    for found in run_distributed(train, 2, target, {"dp": 2}, names, is_hidden, False):
        for name, (*steps, last) in found.items():
            assert all(step < 1e-5 for step in steps), (name, steps)
            if name in OTHERS or is_hidden:
                assert not steps
                assert "with loss_weights= what each term is a mean over" in last, (name, last)
            elif name == "later":
                assert "the labels that the loss averages over are unknown" in last
            else:
                assert last < 1e-5, (name, last)
