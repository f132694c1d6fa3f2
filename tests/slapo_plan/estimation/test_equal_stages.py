"""Stages with equal graphs, and blocks that graphs call: what is measured once counts as if all had run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import create_schedule
from slapo_plan import Estimate, estimate, fake_ranks


def estimated(marked: bool, **options: Any) -> Estimate:
    """Estimate a pipeline of three stages with four blocks each; with ``marked`` no two blocks are equal."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=12, use_cache=False, **sizes))
    for number, block in enumerate(model.model.layers):
        block.marker = number if marked else 0
    ids = torch.zeros(4, 32, dtype=torch.long)
    inputs = {"input_ids": ids[:1], "labels": ids[:1]}
    with fake_ranks(pp=3, tp=2) as mesh:
        sch = create_schedule(model, mesh=mesh, example_inputs=inputs)
        sch.tensor_parallel(sequence_parallel=True)
        for block in sch.select("model.layers.*"):
            block.checkpoint()
        sch.pipeline(3)
        return estimate(sch, {"input_ids": ids, "labels": ids}, microbatches=4, hardware="h100", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"pipeline_schedule": "zero_bubble"}],
)
def test_few_blocks_of_a_stage_stand_for_all(options: dict[str, Any]) -> None:
    few, every = (estimated(marked, **options).to_dict() for marked in (False, True))
    assert few["ranks"] == every["ranks"]
    assert few["collectives"] == every["collectives"]
    assert few["step_seconds"] == pytest.approx(every["step_seconds"])
