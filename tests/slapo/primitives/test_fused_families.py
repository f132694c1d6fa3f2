"""Transformers families, compiled, fused, checkpointed and all of it together, alone and on two tensor-parallel ranks.

Outputs and gradients are those of the unmodified model, in training with the same dropout masks, and in evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slapo_core import Schedule, build, create_schedule
from slapo_testing import run_distributed
from slapo_tracing.matching.patterns import call_module
from slapo_verify.comparison import assert_equivalent
from tests.slapo_torch.layouts import mesh_of
from tests.zoo.families import FAMILIES, layers

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

NAMES = ("gpt2", "bert", "opt", "t5", "llama", "qwen2", "gemma", "mixtral", "vit")
QUICK = ("llama",)


def gelu_new(x: Any) -> Any:
    """As GPT-2 and T5 write it."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


MLPS = ("mlp", "DenseReluDense", "intermediate")
"""Last names of modules that hold an activation and what it is of."""


def gated(act: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda gate, up: act(gate) * up


def plain(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: act(x)


ACTIVATIONS = (F.relu, F.gelu, F.silu, gelu_new, lambda x: F.gelu(x, approximate="tanh"))
PATTERNS: tuple[Callable[..., Any], ...] = (
    *map(gated, ACTIVATIONS),
    *map(plain, ACTIVATIONS),
    lambda x: call_module("act|activation_fn", x),
    lambda x, variance: x * torch.rsqrt(variance),
)


def compiled(sch: Schedule) -> int:
    """Each layer, by the part of torch's compiler that traces and differentiates."""
    torch.compiler.reset()
    for path in layers(sch.mod):
        sch[path].compile(backend="aot_eager")
    return len(layers(sch.mod))


def recomputed(sch: Schedule) -> int:
    """Every second layer whole, the others but for their products."""
    for index, path in enumerate(layers(sch.mod)):
        sch[path].checkpoint(policy="matmuls" if index % 2 else None)
    return len(layers(sch.mod))


def fused(sch: Schedule) -> int:
    """Activations of MLPs, with the product where they are gated; of experts, which have no layers, the norms before."""
    paths = [path for path, _ in sch.mod.named_modules() if path.rpartition(".")[2] in MLPS] or layers(sch.mod)
    if any(path.endswith("experts") for path, _ in sch.mod.named_modules()):
        paths = [path for path, _ in sch.mod.named_modules() if path.endswith("layernorm")]
    return sum(_fused(sch[path]) for path in paths)


def _fused(part: Schedule) -> int:
    held = {type(module).__name__ for module in part.mod.children() if list(module.parameters())}
    part.trace(flatten=True, leaf_modules=sorted(held))
    for pattern in PATTERNS:
        if matches := part.find(pattern):
            part.fuse(matches, compiler=None)
            return len(matches)
    return 0


def served(sch: Schedule) -> int:
    """Everything that kernels serve, in torch's plain operations or its own kernels."""
    sch.use_kernels(force={"*": "eager"})
    return len(sch.metadata.primitives["use_kernels"])


def together(sch: Schedule) -> int:
    """All of it; what kernels have taken is not fused again."""
    return min(served(sch), recomputed(sch), compiled(sch))


def model_and_batch(name: str, dropout: float = 0.0) -> tuple[Any, Any]:
    """Without the cache of keys and values, of which a rank has a part."""
    model: Any = FAMILIES[name].model(dropout=dropout)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model, FAMILIES[name].batch()


WAYS = {"compiled": compiled, "fused": fused, "served": served, "recomputed": recomputed, "together": together}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in NAMES])
def test_in_one_process(name: str, way: str) -> None:
    before, batch = model_and_batch(name, dropout=0.1)
    for is_training in (True, False):
        sch = create_schedule(copy.deepcopy(before.train(is_training)), example_inputs=batch)
        names = list(sch.mod.state_dict())
        assert WAYS[way](sch)
        assert list(sch.mod.state_dict()) == names
        assert_equivalent(before, sch.mod, atol=2e-5, **batch)  # kernels add in another order


def split(rank: int, name: str, way: str) -> None:
    """Without dropout, whose masks within shards are the ranks' own."""
    before, batch = model_and_batch(name)
    for is_training in (True, False):
        sch = create_schedule(copy.deepcopy(before.train(is_training)), mesh=mesh_of(tp=2), example_inputs=batch)
        sch.tensor_parallel()
        assert WAYS[way](sch)
        model, _ = build(sch)
        assert_equivalent(before, model, **batch)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] * ((name, way) != ("llama", "together")))
        for name in NAMES
        for way in WAYS
    ],
)
def test_on_two_ranks(name: str, way: str) -> None:
    run_distributed(split, 2, name, way, timeout=250)
