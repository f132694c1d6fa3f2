"""``use_kernels`` with traces, checkpoints, compiled layers and stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule, build_program, create_schedule
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels
from tests.zoo.families import FAMILIES


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


def made(
    name: str, counted: Counted, attention: str = "sdpa", dropout: float = 0.1
) -> tuple[Schedule, nn.Module, dict[str, Any]]:
    """A schedule, the unmodified model, and a batch."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    config = family.make_config(dropout)
    model = getattr(transformers, family.head).from_config(config, attn_implementation=attention).train()
    batch: dict[str, Any] = {**family.batch(), **({} if name in ("bert", "vit") else {"use_cache": False})}
    return create_schedule(model, example_inputs=batch, plugins=counted.plugins), copy.deepcopy(model), batch


FLAT = {
    "gpt2": {"attention": 2, "layer_norm": 5, "bias_dropout_residual": 4},
    "llama": {"attention": 2, "rms_norm": 5, "rotary": 2, "swiglu": 2},
    "gemma": {"attention": 2, "rms_norm": 5, "rotary": 2, "geglu": 2},
    "bert": {"attention": 2, "layer_norm": 6, "bias_dropout_residual": 4},
    "t5": {"attention": 6, "rms_norm": 12, "bias_dropout_residual": 10},
    "opt": {"attention": 2, "layer_norm": 5, "bias_dropout_residual": 4},
    "phi3": {"attention": 2, "rms_norm": 5, "rotary": 2, "swiglu": 2, "bias_dropout_residual": 4},
}
"""Family to the calls of kernels in one graph of all of it, its attention written out."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("llama", "bert") else pytest.mark.slow) for n in FLAT])
def test_one_graph(name: str, counted: Counted) -> None:
    schedule, before, batch = made(name, counted, "eager")
    schedule.trace(flatten=True)
    schedule.use_kernels(force=COUNTED)
    counted.calls.clear()
    schedule.mod(**batch)
    assert counted.calls == FLAT[name]
    assert_equivalent(before, schedule.mod, **batch, atol=5e-5, rtol=5e-4)
    schedule.undo()
    counted.calls.clear()
    assert_equivalent(before, schedule.mod, **batch)
    assert not counted.calls


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_graph_for_each_module(name: str, counted: Counted) -> None:
    schedule, before, batch = made(name, counted)
    schedule.trace()
    schedule.use_kernels(force=COUNTED)
    counted.calls.clear()
    schedule.mod(**batch)
    calls = {"gpt2": {"layer_norm": 5}, "llama": {"rms_norm": 5, "rotary": 2, "swiglu": 2}}
    assert counted.calls == calls[name]
    assert_equivalent(before, schedule.mod, **batch, atol=5e-5, rtol=5e-4)


class Attention(nn.Module):
    """As small models write it."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.qkv, self.variant = nn.Linear(16, 48), variant

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (part.view(2, 5, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / 8**0.5
        if self.variant == "masked":
            scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        if self.variant == "capped":
            scores = 20 * torch.tanh(scores / 20)
        if self.variant == "added":
            scores = scores + torch.linspace(-1, 1, 25).view(5, 5)
        weights = F.dropout(scores.softmax(-2 if self.variant == "columns" else -1), 0.2, self.training)
        out = weights @ v
        return (out, weights) if self.variant == "weights" else out


@pytest.mark.parametrize("variant", ["plain", "masked", "added"])
@pytest.mark.parametrize("training", [True, False])
def test_attention_written_out(variant: str, training: bool, counted: Counted) -> None:
    """Nothing is taken to be causal but what the mask in the graph says."""
    model, x = Attention(variant).train(training), torch.randn(2, 5, 16, requires_grad=True)
    schedule = create_schedule(copy.deepcopy(model), example_inputs=(x,), plugins=counted.plugins).trace()
    schedule.use_kernels("attention", force=COUNTED)
    assert_equivalent(model, schedule.mod, x)
    assert counted.calls == {"attention": 1}
    if not training:
        schedule.undo()
        schedule.use_kernels("attention", force={"attention": "native"})
        assert_equivalent(model, schedule.mod, x)


@pytest.mark.parametrize("variant", ["capped", "columns", "weights"])
def test_what_is_almost_attention(variant: str, counted: Counted) -> None:
    model, x = Attention(variant), torch.randn(2, 5, 16)
    schedule = create_schedule(copy.deepcopy(model), example_inputs=(x,), plugins=counted.plugins).trace()
    schedule.use_kernels(force=COUNTED)
    assert_equivalent(model, schedule.mod, x)
    assert not counted.calls


def test_rotations_that_are_others(counted: Counted) -> None:
    class Rotated(nn.Module):
        def __init__(self, variant: str) -> None:
            super().__init__()
            self.variant = variant

        def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
            def turned(x: torch.Tensor) -> torch.Tensor:
                front, back = x[..., :4], x[..., 4:]
                return torch.cat((back, -front) if self.variant == "backwards" else (-back, front), dim=-1)

            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            other = cos.unsqueeze(1) if self.variant == "other angles" else c
            return q * c + turned(q) * s, k * other + turned(k) * (c if self.variant == "no sine" else s)

    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in ((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8)))
    for variant in ("plain", "backwards", "other angles", "no sine"):
        model = Rotated(variant)
        schedule = create_schedule(copy.deepcopy(model), example_inputs=inputs, plugins=counted.plugins).trace()
        counted.calls.clear()
        schedule.use_kernels(force=COUNTED)
        assert_equivalent(model, schedule.mod, *inputs)
        assert counted.calls == ({"rotary": 1} if variant == "plain" else {})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["checkpoint", "use_kernels"])
def test_checkpoints(first: str, counted: Counted) -> None:
    schedule, before, batch = made("bert", counted)
    mlp = schedule["bert.encoder.layer.0.intermediate"]
    for step in (first, "checkpoint" if first == "use_kernels" else "use_kernels"):
        if step == "checkpoint":
            mlp.checkpoint()
            schedule["bert.encoder.layer.1"].checkpoint()
        else:
            schedule.use_kernels(force=COUNTED)
    assert_equivalent(before, schedule.mod, **batch)
    forward = {"layer_norm": 6, "bias_dropout_residual": 4, "bias_act": 3}
    again = {"layer_norm": 2, "bias_dropout_residual": 2, "bias_act": 2}
    assert counted.calls == {kernel: forward[kernel] + again[kernel] for kernel in forward}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_with_kernels(counted: Counted) -> None:
    schedule, before, batch = made("llama", counted, dropout=0.0)
    schedule["model.layers"].compile(backend="eager")
    schedule.use_kernels()
    assert_equivalent(before, schedule.mod, **batch, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_stages(name: str, counted: Counted) -> None:
    schedule, before, batch = made(name, counted, dropout=0.0)
    schedule.use_kernels(force=COUNTED)
    schedule["model.layers.0" if name == "llama" else "transformer.h.0"].cut_pipeline_stage()
    program = build_program(schedule)
    counted.calls.clear()
    assert len(program.stages) == 2
    loss = program(**batch).loss
    torch.testing.assert_close(loss, before(**batch).loss)
    assert counted.calls == {"llama": {"rms_norm": 5, "swiglu": 2}, "gpt2": {"layer_norm": 5, "bias_act": 2}}[name]
