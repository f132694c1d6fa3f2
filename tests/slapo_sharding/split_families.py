"""Split a small model of a Transformers family over the ranks and compare it with the unmodified one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.build import build
from slapo_core.errors import ScheduleError
from slapo_core.registry import Registry
from slapo_core.schedule import Schedule, create_schedule
from slapo_core.testing import assert_equivalent
from slapo_sharding import plugin
from tests.zoo.families import FAMILIES

FAST = tuple(
    """
    albert bart bert bloom clip deepseek_v3 distilbert falcon gemma2 gemma3_text glm gpt2 gpt_neo gpt_neox gpt_oss gptj
    granitemoe llama mistral mixtral modernbert mpnet opt openai-gpt phi3 qwen2 qwen2_moe qwen3 qwen3_moe roberta stablelm t5
    vit whisper xglm
    """.split()
)
"""Those of which the others are variations."""

UNLIKE = {"deepseek_v3", "gemma2", "gemma3_text", "gpt_neo", "gpt_oss", "modernbert"}
"""Those whose two layers are of different make; of the others one tells as much, in half the time."""

ROUNDING = {"blenderbot", "clip", "exaone4", "gemma3_text", "mt5", "nemotron"}
"""Families of which single gradients are sums of much larger numbers."""


def family(name: str, depth: int | None = None, **sizes: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model that keeps no cache, and a batch; ``sizes`` are of its config."""
    known = FAMILIES[name]
    model, batch = dataclasses.replace(known, config={**known.config, **sizes}).model(depth=depth), known.batch()
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        batch["use_cache"] = False  # type: ignore[assignment]
    return model, batch


def split(model: nn.Module, batch: dict[str, Any], sequence_parallel: bool) -> Schedule:
    """A built schedule with this one step."""
    sch = create_schedule(model, plugins=Registry([plugin]), example_inputs=batch)
    sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert len(sch.journal) == 1
    build(sch)
    return sch


def three_steps(model: nn.Module, batch: dict[str, Any]) -> None:
    """Train with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def steps_of_same(rank: int, name: str, sequence_parallel: bool = False, depth: int | None = None) -> list[str]:
    """Split a family and compare outputs, loss, gradients and three steps with the unmodified model's; the steps taken."""
    model, batch = family(name, depth)
    before = copy.deepcopy(model)
    sch = split(model, batch, sequence_parallel)
    atol = 1e-4 if name in ROUNDING else 1e-5
    assert_equivalent(before, model, atol=atol, **batch)
    for each in (before, model):
        three_steps(each, batch)
    trained = sch.full_state()
    expected = {name: parameter.detach() for name, parameter in before.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(trained, {name: expected[name] for name in trained}, atol=atol, rtol=1e-5)
    return [str(child) for child in sch.journal.steps[0].children]


def steps_of_one_layer(rank: int, name: str, sequence_parallel: bool = False) -> list[str]:
    """The same with one layer of each kind."""
    return steps_of_same(rank, name, sequence_parallel, None if name in UNLIKE else 1)


def refusal(rank: int, name: str, sequence_parallel: bool = False) -> str:
    """The message for a family that cannot be split, which it leaves as it is."""
    model, batch = family(name)
    names = dict(model.named_parameters())
    sch = create_schedule(model, plugins=Registry([plugin]), example_inputs=batch)
    with pytest.raises(ScheduleError) as caught:
        sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert all(names[path] is parameter for path, parameter in model.named_parameters())
    return str(caught.value)
