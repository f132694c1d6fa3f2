"""``tensor_parallel(sequence_parallel=True)`` on Transformers families, compared like the plain one."""

from __future__ import annotations

import pytest

from slapo_core.testing import run_distributed
from tests.slapo_sharding.split_families import FAST, Refused, refusal, steps_of_one_layer, steps_of_same
from tests.slapo_sharding.test_tensor_parallel_families import DEEP, SPLIT

pytestmark = pytest.mark.multiproc

_TOKENS = Refused(
    "16 patches and one more token are not divisible by the number of ranks", "has length 17, not divisible by 2 ranks"
)
_EXPERTS = Refused("nothing but its experts is split", "nothing but 'model.layers.0.mlp.experts' and its like is")
_NO_LAYERS = "no list of layers (nn.ModuleList) is given values of [batch, sequence, width]"

REFUSED = {
    "beit": _TOKENS,
    "clip": _TOKENS,
    "convnext": Refused("it has no sequence", _NO_LAYERS),
    "ctrl": Refused("its attention takes the length from one of three inputs", "the length of the whole sequence at view"),
    "dinov2": _TOKENS,
    "gpt_oss": _EXPERTS,
    "olmoe": _EXPERTS,
    "squeezebert": Refused("its layers are given [batch, width, sequence]", _NO_LAYERS),
    "swin": Refused("its windows are cut by the height and width of the image", "the length of the whole sequence at view"),
    "vit": _TOKENS,
    "xlnet": Refused(
        "its layers are given [sequence, batch, width]", "values of shape [12, 2, 32], not [batch, sequence, width]"
    ),
}
"""Families that are split, but not along the sequence, and why."""

WHOLE = {"mobilebert"}
"""Families whose layers are gathered before anything in them is split."""

ALLOWED = [name for name in SPLIT if name not in REFUSED]
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in ALLOWED]


@pytest.mark.parametrize("name", EACH)
def test_two_ranks(name: str) -> None:
    of_one = name in FAST and name not in DEEP
    found = run_distributed(steps_of_one_layer if of_one else steps_of_same, 2, name, True, timeout=120)[0]
    found.check_what_is_whole(name, sequence_parallel=True)
    assert any("'scatter'" in step for step in found.steps)
    assert any("'fwd_post', 'reduce_scatter'" in step for step in found.steps) == (name not in WHOLE)


@pytest.mark.parametrize("name", [name for name in ALLOWED if name in FAST])
def test_four_ranks(name: str) -> None:
    found = run_distributed(steps_of_one_layer, 4, name, True, timeout=120)[0]
    found.check_what_is_whole(name, sequence_parallel=True)
    assert any("'fwd_post', 'reduce_scatter'" in step for step in found.steps)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("ctrl", "vit") else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_refused_families_say_why(name: str) -> None:
    first, second = run_distributed(refusal, 2, name, True, timeout=120)
    assert first == second
    assert "the sequence cannot be split: " in first
    assert REFUSED[name].told in first


def test_there_are_thirty_families() -> None:
    assert len(set(FAST) & set(ALLOWED)) >= 30
