"""``tensor_parallel()`` on Transformers families: the loss, outputs, every gradient and three steps of the unmodified model.

Those that can be split along the sequence too are compared, in both ways, in ``test_sequence_parallel_families.py``.
"""

from __future__ import annotations

import pytest

from slapo_core.testing import run_distributed
from tests.slapo_sharding.split_families import ALONG_REFUSED, FAST, Refused, check_on_two_and_four_ranks, refusal
from tests.zoo.families import FAMILIES

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

_CONVOLUTIONS = "all its layers are convolutions: `shard` splits them, derived plans do not"

REFUSED = {
    "poolformer": Refused(_CONVOLUTIONS, "nothing of the PoolFormerForImageClassification can be split"),
    "resnet": Refused(_CONVOLUTIONS, "nothing of the ResNetForImageClassification can be split"),
    "segformer": Refused("one head, and convolutions inside of its MLPs", "sharded at segformer_stages_0_blocks_0_mlp_dwconv"),
}
"""Families that are refused, and why."""

SPLIT = sorted(FAMILIES.keys() - REFUSED.keys())
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SPLIT if name in ALONG_REFUSED]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EACH)
def test_families_that_are_not_split_along_the_sequence(name: str) -> None:
    check_on_two_and_four_ranks(name, (False,))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "segformer" else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_refused_families_say_why(name: str) -> None:
    first, second = run_distributed(refusal, 2, name, timeout=120)
    assert first == second
    assert REFUSED[name].told in first
    assert ".py:" in first, "the line of the model"


def test_there_are_thirty_families() -> None:
    assert len(set(FAST) & set(SPLIT)) == len(FAST) >= 30
