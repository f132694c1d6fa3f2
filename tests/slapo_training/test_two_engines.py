"""Two engines in one process that meet in one loss, as a GAN's do: the numbers of one process, or one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from slapo_testing import run_distributed

from . import two_engines

pytestmark = pytest.mark.multiproc
ZERO = {"config": {"zero_optimization": {"stage": 1}}}
FSDP = {"data_parallel": "fsdp"}
RIGHT = [
    ("torch", {"tp": 2}, {}, "model"),
    ("torch", {"dp": 2}, {}, "loss"),
    ("deepspeed", {"dp": 2}, {}, "loss"),
    ("deepspeed", {"dp": 2}, {}, "model"),
    ("megatron", {"dp": 2}, {}, "loss"),
]
REFUSED = [
    ("deepspeed", {"dp": 2}, ZERO, "loss", "got a gradient outside of train_batch"),
    ("deepspeed", {"dp": 2}, ZERO, "model", "is trained by another engine that is still open"),
    ("megatron", {"dp": 2}, {}, "model", "another engine was built that trains 'discriminator.net.0.weight'"),
    ("torch", {"dp": 2}, FSDP, "model", "data_parallel='ddp'"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("target", "layout", "options", "kind"), RIGHT)
def test_losses_are_those_of_one_process(target: str, layout: dict[str, int], options: dict[str, Any], kind: str) -> None:
    for found in run_distributed(two_engines.differences, 2, target, layout, options, kind):
        assert isinstance(found, float), found
        assert found < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("target", "layout", "options", "kind", "sentence"), REFUSED)
def test_gradients_that_two_engines_would_take_are_refused(
    target: str, layout: dict[str, int], options: dict[str, Any], kind: str, sentence: str
) -> None:
    for found in run_distributed(two_engines.differences, 2, target, layout, options, kind):
        assert isinstance(found, str), found
        assert sentence in found
