"""``tensor_parallel()`` on Transformers families: the loss, outputs, every gradient and three steps of the unmodified model."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core.build import build
from slapo_core.errors import ScheduleError
from slapo_core.registry import Registry
from slapo_core.schedule import create_schedule
from slapo_core.testing import assert_equivalent, run_distributed
from slapo_sharding import plugin
from tests.zoo.families import FAMILIES

pytestmark = pytest.mark.multiproc

REFUSED = {
    "codegen": "its number of model-parallel parts is written in its code",
    "led": "it takes the width from the shape of its input",
    "mamba": "its scan mixes all channels of a chunk with those of the input projection",
    "resnet": "it has no layers but convolutions, which cannot be split yet",
    "poolformer": "it has no layers but convolutions, which cannot be split yet",
    "segformer": "one head, and convolutions",
}
"""Families that are refused, and why."""

ROUNDING = {"blenderbot", "clip", "exaone4", "gemma3_text", "mt5", "nemotron"}
"""Families of which single gradients are sums of much larger numbers."""


def family(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model that keeps no cache, and a batch."""
    model, batch = FAMILIES[name].model(), FAMILIES[name].batch()
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        batch["use_cache"] = False  # type: ignore[assignment]
    return model, batch


def _three_steps(model: nn.Module, batch: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def steps_of_same(rank: int, name: str, sequence_parallel: bool = False) -> list[str]:
    """Split a family and compare it with the unmodified model; the steps taken."""
    model, batch = family(name)
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([plugin]), example_inputs=batch)
    sch.tensor_parallel(sequence_parallel=sequence_parallel)
    (step,) = sch.journal
    build(sch)
    atol = 1e-4 if name in ROUNDING else 1e-5
    assert_equivalent(before, model, atol=atol, **batch)
    for each in (before, model):
        _three_steps(each, batch)
    trained = sch.full_state()
    expected = {name: parameter.detach() for name, parameter in before.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(trained, {name: expected[name] for name in trained}, atol=atol, rtol=1e-5)
    return [str(child) for child in step.children]


FAST = (
    *("albert", "bart", "bert", "bloom", "clip", "deepseek_v3", "distilbert", "falcon", "gemma2", "gemma3_text", "glm", "gpt2"),
    *(
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granitemoe",
        "llama",
        "mistral",
        "mixtral",
        "modernbert",
        "mpnet",
        "opt",
        "openai-gpt",
        "phi3",
    ),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "stablelm", "t5", "vit", "whisper", "xglm"),
)
"""Those of which the others are variations."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(FAMILIES.keys() - REFUSED.keys())],
)
def test_two_ranks(name: str) -> None:
    assert any(".shard(" in step for step in run_distributed(steps_of_same, 2, name, timeout=120)[0])


def refusal(rank: int, name: str, sequence_parallel: bool = False) -> str:
    """The message for a family that cannot be split, which it leaves as it is."""
    model, batch = family(name)
    names = dict(model.named_parameters())
    sch = create_schedule(model, plugins=Registry([plugin]), example_inputs=batch)
    with pytest.raises(ScheduleError) as caught:
        sch.tensor_parallel(sequence_parallel=sequence_parallel)
    assert all(names[path] is parameter for path, parameter in model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mamba" else pytest.mark.slow) for name in sorted(REFUSED)]
)
def test_refused_families_say_why(name: str) -> None:
    first, second = run_distributed(refusal, 2, name, timeout=120)
    assert first == second
    assert ".py:" in first, "the line of the model"
