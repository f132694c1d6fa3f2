"""``tensor_parallel()`` on Transformers families: the loss, outputs, every gradient and three steps of the unmodified model."""

from __future__ import annotations

import pytest

from slapo_core.testing import run_distributed
from tests.slapo_sharding.split_families import FAST, refusal, steps_of_one_layer, steps_of_same
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc

REFUSED = {
    "codegen": "its number of model-parallel parts is written in its code",
    "led": "it takes the width from the shape of its input",
    "mamba": "its scan mixes all channels of a chunk with those of the input projection",
    "resnet": "it has no layers but convolutions, which cannot be split yet",
    "poolformer": "it has no layers but convolutions, which cannot be split yet",
    "segformer": "one head, and convolutions",
}
"""Families that are refused, and why."""

DEEP = {"bert", "gpt2", "llama", "mixtral", "opt", "t5"}
"""Those that have two layers here: what is found for one is done to all like it."""

SPLIT = sorted(FAMILIES.keys() - REFUSED.keys())
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SPLIT]


@pytest.mark.parametrize("name", EACH)
def test_two_ranks(name: str) -> None:
    of_one = name in FAST and name not in DEEP
    steps = run_distributed(steps_of_one_layer if of_one else steps_of_same, 2, name, timeout=120)[0]
    assert any(".shard(" in step for step in steps)


@pytest.mark.parametrize("name", FAST)
def test_four_ranks(name: str) -> None:
    assert any(".shard(" in step for step in run_distributed(steps_of_one_layer, 4, name, timeout=120)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mamba" else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_refused_families_say_why(name: str) -> None:
    first, second = run_distributed(refusal, 2, name, timeout=120)
    assert first == second
    assert ".py:" in first, "the line of the model"


def test_there_are_thirty_families() -> None:
    assert len(set(FAST) & set(SPLIT)) == len(FAST) >= 30
