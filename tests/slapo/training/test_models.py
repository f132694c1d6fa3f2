"""Model types that ``slapo train`` can schedule without weights."""

from __future__ import annotations

import pytest

from slapo.run_data.settings import Settings
from slapo.training.preflight_check import check_run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_are_traced_before_they_have_weights(model: str) -> None:
    """Their product in groups has a fake for bfloat16 alone in torch."""
    check_run(Settings(model=model, layers=1, seq=16, batch=4, tp=2, sequence_parallel=True))
