"""A mean over labels is taken for the loss only where the loss is made of it, however many there are beside it."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed
from tests.loss_graphs import BY_HAND, MADE, OTHERS, PLAIN, train

TOLD = "the labels that the loss averages over are unknown, as it is not a plain cross_entropy; say with loss_weights="


def check(found: dict[str, Any], is_hidden: bool, is_even: bool) -> None:
    """Each loss is that of the whole batch, or refused, and only if labels are uneven."""
    for name, (*steps, last) in found.items():
        assert all(step < 1e-5 for step in steps), (name, steps)
        if is_even or name in PLAIN:
            assert not isinstance(last, str), (name, last)
            assert last < 1e-5, name
        else:
            assert TOLD in last, (name, steps, last)
        if not is_even:
            assert len(steps) == (2 if name in PLAIN else 1 if name == "later" else 0), (name, steps)


@pytest.mark.parametrize("is_even", [False, True], ids=["uneven", "even"])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["shown", "hidden"])
def test_losses_of_micro_batches(is_hidden: bool, is_even: bool) -> None:
    # a mean by hand over hidden labels tells nothing of itself
    names = [name for name in MADE if not is_hidden or is_even or name not in BY_HAND]
    (found,) = run_distributed(train, 1, "torch", {}, names, is_hidden, is_even)
    check(found, is_hidden, is_even)


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "names"),
    [({"dp": 2}, ["logged before", "smoothed", "a field", *OTHERS, "later"]), ({"pp": 2}, ["smoothed", "twice", *OTHERS])],
    ids=str,
)
def test_losses_of_ranks(layout: dict[str, int], names: list[str]) -> None:
    for found in run_distributed(train, 2, "torch", layout, names, True, False):
        check(found, True, False)
