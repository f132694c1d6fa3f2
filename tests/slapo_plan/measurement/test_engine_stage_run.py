"""Steps of engines on few of many equal blocks beside steps on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import create_schedule
from slapo_deepspeed.estimation.partitioned_memory import PartitionedMemory
from slapo_deepspeed.estimation.replicated_memory import ReplicatedMemory
from slapo_megatron.estimation.stage_memory import MegatronStageMemory
from slapo_plan import estimate, fake_ranks
from slapo_training import StageMemory


def estimated(target: str, options: dict[str, Any], checkpointed: bool) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = torch.zeros(4, 16, dtype=torch.long)
    with fake_ranks(dp=2) as mesh:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=7, vocab_size=128, use_cache=False, **sizes))
        sch = create_schedule(model, mesh=mesh, example_inputs={"input_ids": ids, "labels": ids})
        for block in sch.select("model.layers.*") if checkpointed else ():
            block.checkpoint()
        found = estimate(sch, {"input_ids": ids, "labels": ids}, target=target, microbatches=2, **options)
    assert not found.problems
    return found.to_dict()


def _zero(stage: int, **section: Any) -> dict[str, Any]:
    return {"config": {"zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000, **section}}}


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("target", "memory", "options"),
    [
        ("megatron", MegatronStageMemory, {"precision": "bf16", "distributed_optimizer": True}),
        pytest.param("deepspeed", ReplicatedMemory, _zero(0), marks=pytest.mark.slow),
        pytest.param("deepspeed", PartitionedMemory, _zero(1, contiguous_gradients=False), marks=pytest.mark.slow),
        ("deepspeed", PartitionedMemory, {"precision": "bf16", **_zero(1)}),
    ],
)
def test_few_blocks_stand_for_all(
    target: str, memory: type[StageMemory], options: dict[str, Any], checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"megatron": "megatron.core"}.get(target, target))
    few = estimated(target, options, checkpointed)
    monkeypatch.setattr(memory, "repeats_blocks", property(lambda self: False, lambda self, value: None))
    assert few == estimated(target, options, checkpointed)
