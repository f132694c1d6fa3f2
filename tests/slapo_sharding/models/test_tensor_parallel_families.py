"""``tensor_parallel()`` on Transformers families: the loss, outputs, every gradient and three steps of the unmodified model.

Those that can be split along the sequence too are compared, in both ways, in ``test_sequence_parallel_families.py``.
"""

from __future__ import annotations

import pytest

from tests.slapo_sharding.split_families import ALONG_REFUSED, FAST, check_on_two_and_four_ranks
from tests.zoo.families import FAMILIES

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

SPLIT = sorted(FAMILIES)
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SPLIT if name in ALONG_REFUSED]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EACH)
def test_families_that_are_not_split_along_the_sequence(name: str) -> None:
    check_on_two_and_four_ranks(name, (False,))


def test_there_are_thirty_families() -> None:
    assert len(set(FAST) & set(SPLIT)) == len(FAST) >= 30
