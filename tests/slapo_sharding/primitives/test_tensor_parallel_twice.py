"""``tensor_parallel`` on a model that was modified before."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, create_schedule
from slapo_sharding import plugin

MLP = "model.layers.1.mlp.up_proj"


@pytest.fixture(autouse=True)
def _two_pretended_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, use_cache=False, **sizes))


def _schedule(model: LlamaForCausalLM | None = None) -> Schedule:
    ids = torch.zeros(1, 4, dtype=torch.long)
    return create_schedule(
        model or _model(),
        plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]),
        example_inputs={"input_ids": ids, "labels": ids},
    )


@pytest.mark.parametrize("path", ["", "model.layers.1"])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_a_second_time_is_refused(path: str, options: dict[str, bool]) -> None:
    sch = _schedule()
    sch.tensor_parallel()
    with pytest.raises(
        ScheduleError, match=r"^tensor_parallel\('.*'\): already tensor-parallel, '.*' is split; undo that step first"
    ):
        (sch[path] if path else sch).tensor_parallel(**options)
    sch.undo()
    sch.tensor_parallel()


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_after_a_shard_by_hand_only_a_plan_is_taken(options: dict[str, bool]) -> None:
    sch = _schedule()
    sch[MLP].shard("weight", axis=0)
    with pytest.raises(ScheduleError, match=f"'{MLP}' is sharded already; call tensor_parallel before shard, or give plan="):
        sch.tensor_parallel(**options)
    sch.tensor_parallel({"model.layers.0.mlp.up_proj": "colwise", "model.layers.0.mlp.down_proj": "rowwise"})


def test_parts_of_a_model_one_after_the_other() -> None:
    sch = _schedule()
    for layer in sch.select("model.layers.*"):
        layer.tensor_parallel({"mlp.up_proj": "colwise", "mlp.gate_proj": "colwise", "mlp.down_proj": "rowwise"})
    assert len(sch.journal) == 2


def test_the_hook_of_a_model_that_recomputes_by_itself_is_named() -> None:
    model = _model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name that everybody uses still
        model.gradient_checkpointing_enable()
    message = "which has put a hook on 'model.embed_tokens' that would see .* checkpoint.. on its layers afterwards"
    with pytest.raises(ScheduleError, match=message):
        _schedule(model).tensor_parallel()
    model.disable_input_require_grads()
    _schedule(model).tensor_parallel()
