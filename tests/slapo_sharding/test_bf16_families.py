"""``tensor_parallel()`` in bf16: as near to the model in fp32 as the unmodified model in bf16 is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.schedule import Schedule, create_schedule
from slapo_core.testing import run_distributed
from tests.slapo_sharding.split_families import family, split

pytestmark = pytest.mark.multiproc

FACTOR = 2.0
"""Sums over ranks are rounded once more, and the rounding of either model is a matter of luck."""


def _computed(sch: Schedule, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Outputs, loss and every gradient of the first step, and the weights after the third; full ones under original names."""
    found = {}
    optimizer = torch.optim.SGD(sch.mod.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        outputs = sch.mod(**batch)
        outputs.loss.backward()
        if step == 0:
            gradients = sch.full_state("grad")
            found = {
                "logits": outputs.logits,
                "loss": outputs.loss,
                **{f"gradient of {key}": gradients[key] for key in gradients},
            }
        optimizer.step()
    found.update({f"trained {key}": value for key, value in sch.full_state().items()})
    return {key: value.detach().double() for key, value in found.items() if value is not None}


def _unmodified(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return _computed(create_schedule(model), batch)


def errors(rank: int, name: str, sequence_parallel: bool) -> dict[str, tuple[float, float, float]]:
    """Distance of the split and of the unmodified model in bf16 from the one in fp32, and how large that one is."""
    model, batch = family(name, depth=1)
    model = model.bfloat16()
    exact = _unmodified(copy.deepcopy(model).float(), batch)
    rounded = _unmodified(copy.deepcopy(model), batch)
    sharded = _computed(split(model, batch, sequence_parallel), batch)
    assert sharded.keys() == rounded.keys() == exact.keys()

    def distance(found: dict[str, torch.Tensor], key: str) -> float:
        return float((found[key] - exact[key]).norm())

    return {key: (distance(sharded, key), distance(rounded, key), float(exact[key].norm())) for key in exact}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mixtral", "t5"])
def test_as_near_to_fp32_as_the_unmodified_model(name: str, sequence_parallel: bool) -> None:
    """A tensor may also be off by what bf16 cannot tell apart."""
    found, other = run_distributed(errors, 2, name, sequence_parallel, timeout=120)
    assert found == other
    finest = torch.finfo(torch.bfloat16).eps / 2
    near = {key for key, (ours, theirs, size) in found.items() if ours <= FACTOR * theirs + finest * size}  # which no NaN is
    assert {key: numbers for key, numbers in found.items() if key not in near} == {}
