"""Model types that ``slapo train`` can schedule without weights."""

from __future__ import annotations

import pytest

from slapo.run_data.settings import Settings
from slapo.training.models import build_config
from slapo.training.preflight_check import check_run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_are_traced_before_they_have_weights(model: str) -> None:
    """Their product in groups has a fake for bfloat16 alone in torch."""
    check_run(Settings(model=model, layers=1, seq=16, batch=4, tp=2, sequence_parallel=True))


def test_the_layout_does_not_change_the_model() -> None:
    heads = {build_config(Settings(model="mistral", heads=4, hidden=64, tp=tp)).num_key_value_heads for tp in (1, 2, 4)}
    assert heads == {1}
