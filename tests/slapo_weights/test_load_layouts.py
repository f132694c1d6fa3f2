"""``build(..., weights=folder)`` on several ranks: logits and gradients are those of ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import slapo
from slapo_core.testing import run_distributed
from tests.slapo_torch.layouts import mesh_of

from .saved import IDS, empty, expected, logits_and_gradients, save

pytestmark = pytest.mark.multiproc


def split(rank: int, name: str, folder: str) -> tuple[float, list[str]]:
    """At tp=2: distance of the logits, and gradients that differ."""
    sch = slapo.create_schedule(empty(name), mesh=mesh_of(tp=2), example_inputs={"input_ids": IDS})
    sch.tensor_parallel()
    module, _ = slapo.build(sch, weights=folder)
    theirs, gradients = logits_and_gradients(expected(name, folder))
    ours, _ = logits_and_gradients(module)
    found = sch.full_state("grad")
    wrong = [key for key, value in gradients.items() if not torch.allclose(found[key], value, rtol=1e-4, atol=1e-6)]
    return float((ours - theirs).abs().max()), wrong


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=SLOW) for name in ("tied", "gpt2", "mixtral"))])
def test_split_weights_are_those_of_from_pretrained(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, max_shard_size="20KB" if name == "llama" else "5GB")
    for distance, wrong in run_distributed(split, 2, name, str(tmp_path)):
        assert distance < 1e-5
        assert wrong == []
