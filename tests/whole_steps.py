"""Rank functions of the tests of optimizers: weights after some steps, beside the unmodified model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from tests.slapo_torch.layouts import mesh_of
from tests.strange_optimizers import EVERY

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
        slapo_deepspeed.plugin,
        slapo_megatron.plugin,
    ]
)
STEPS = 3


def model_of(kind: str) -> nn.Module:
    """A small model: ``gqa`` has two key heads, ``one`` has one for two ranks, ``gpt2`` fused attention and ties."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
        model: nn.Module = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_head=2, n_layer=2, use_cache=False, **rates)
        )
    else:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if kind == "gqa" else 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.lr_scale = 0.5  # type: ignore[attr-defined]
    return model


def batches(dp: int) -> list[dict[str, torch.Tensor]]:
    """Batches of all replicas."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (4 * dp, 8), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each} for each in ids]


def part_of(batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {key: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for key, value in batch.items()}


def reference(kind: str, name: str, dp: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights before and after the steps in one process."""
    model = model_of(kind)
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    optimizer = EVERY[name](list(model.parameters()))
    torch.manual_seed(5)
    for batch in batches(dp):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, model.state_dict()


def engine_of(target: str, kind: str, name: str, mesh: DeviceMesh, **options: Any) -> tuple[Any, Schedule]:
    """An engine that trains a model with one of the optimizers."""
    example = part_of(batches(mesh["dp"].size())[0], mesh)
    schedule = create_schedule(model_of(kind), mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule["transformer.h.0" if kind == "gpt2" else "model.layers.0"].cut_pipeline_stage()
    given = {} if "optimizer" in options.get("config", {}) else {"optimizer": EVERY[name]}
    return build(schedule, target, **given, **options), schedule


def state_of(engine: Any, schedule: Schedule) -> dict[str, torch.Tensor]:
    """The weights, whole on every rank."""
    with getattr(engine, "whole_parameters", nullcontext)():
        return {key: value.detach().clone() for key, value in schedule.full_state().items()}


def errors(
    rank: int, target: str, kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any]
) -> dict[str, float | str]:
    """Largest error of the weights for each optimizer, as a share of the largest step of their tensor."""
    mesh, found = mesh_of(**layout), dict[str, float | str]()
    dp = mesh["dp"].size()
    for name in names:
        before, expected = reference(kind, name, dp)
        try:
            engine, schedule = engine_of(target, kind, name, mesh, **copy.deepcopy(options))
        except Exception as err:
            found[name] = f"{type(err).__name__}: {err}"
            continue
        torch.manual_seed(5)
        for batch in batches(dp):
            engine.train_batch(**part_of(batch, mesh))
        state = state_of(engine, schedule)
        engine.close()
        found[name] = max(
            float((state[key] - value).abs().max() / ((value - before[key]).abs().max() + 1e-6))
            for key, value in expected.items()
            if key in state
        )
    return found


def saved(
    rank: int, target: str, kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any], folder: str
) -> None:
    """Train all steps but the last, and save, each optimizer in a folder of its own."""
    mesh = mesh_of(**layout)
    for name in names:
        engine, _ = engine_of(target, kind, name, mesh, **copy.deepcopy(options))
        torch.manual_seed(5)
        for batch in batches(2)[:-1]:
            engine.train_batch(**part_of(batch, mesh))
        engine.save(f"{folder}/{name}")
        engine.close()


def resumed(
    rank: int, target: str, kind: str, layout: dict[str, int], names: list[str], options: dict[str, Any], folder: str
) -> dict[str, float | str]:
    """Load what was saved, train the last step, and give what ``errors`` gives."""
    mesh, found = mesh_of(**layout), dict[str, float | str]()
    for name in names:
        before, expected = reference(kind, name, 2)
        engine, schedule = engine_of(target, kind, name, mesh, **copy.deepcopy(options))
        try:
            engine.load(f"{folder}/{name}")
        except Exception as err:
            found[name] = f"{type(err).__name__}: {err}"
            continue
        engine.train_batch(**part_of(batches(2)[-1], mesh))
        state = state_of(engine, schedule)
        engine.close()
        found[name] = max(
            float((state[key] - value).abs().max() / ((value - before[key]).abs().max() + 1e-6))
            for key, value in expected.items()
            if key in state
        )
    return found


def in_place(rank: int, work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of ``work`` where parameters of any size may be stepped in place, as shards."""
    with patch("slapo_training.optimizers.whole_tensor_construction.MIN_SHARDED_NUMEL", 0):
        return work(rank, *args)


def stepped_in_place(rank: int, target: str, layout: dict[str, int], names: list[str], options: dict[str, Any]) -> list[str]:
    """Name the optimizers that step some parameters in place."""
    found = []
    for name in names:
        engine, _ = engine_of(target, "gqa", name, mesh_of(**layout), **copy.deepcopy(options))
        made = stepping_of(engine)
        if any(each.is_in_place for each in getattr(made, "stand_ins", ())):
            found.append(name)
        engine.close()
    return found


def stepping_of(engine: Any) -> Any:
    """Return the optimizer around the user's, inside of the one of an engine."""
    found = getattr(engine, "optimizer", None) or engine.model.optimizer
    while not hasattr(found, "stand_ins") and hasattr(found, "optimizer"):
        found = found.optimizer
    return found
