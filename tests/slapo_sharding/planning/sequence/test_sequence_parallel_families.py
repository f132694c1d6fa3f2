"""``tensor_parallel()`` on Transformers families with and without ``sequence_parallel`` equals the unmodified model."""

from __future__ import annotations

import pytest

from slapo_testing import run_distributed
from tests.slapo_sharding.models.test_tensor_parallel_families import SPLIT
from tests.slapo_sharding.split_families import (
    ALONG_ON_TWO,
    FAST,
    ON_FOUR,
    check,
    check_on_two_and_four_ranks,
    depth_of,
    refusal,
)
from tests.slapo_sharding.split_families import ALONG_REFUSED as REFUSED

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

ALLOWED = [name for name in SPLIT if name not in REFUSED]
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ALLOWED]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EACH)
def test_families_with_and_without_a_split_sequence(name: str, request: pytest.FixtureRequest) -> None:
    """Most families run with a split sequence only in fast runs, as that includes the other split."""
    both = name in ON_FOUR or request.node.get_closest_marker("slow") is not None
    check_on_two_and_four_ranks(name, (False, True) if both else (True,))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAST if name in ALLOWED and name not in ON_FOUR])
def test_other_families_without_a_split_sequence(name: str) -> None:
    check_on_two_and_four_ranks(name, (False,))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAST if name not in ON_FOUR])
def test_other_families_on_four_ranks(name: str) -> None:
    check(name, 4, (False, True) if name in ALLOWED and name not in ALONG_ON_TWO else (False,), depth_of(name))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("ctrl", "vit") else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_refused_families_have_a_reason(name: str) -> None:
    first, second = run_distributed(refusal, 2, name, True, timeout=120)
    assert first == second
    assert "the sequence cannot be split: " in first
    assert REFUSED[name].told in first


def test_there_are_thirty_families() -> None:
    assert len(set(FAST) & set(ALLOWED)) >= 30
