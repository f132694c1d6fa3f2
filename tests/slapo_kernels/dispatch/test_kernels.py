"""Numerics of the kernels: eager ones equal the models' operations. ``test_kernel_conformance.py`` compares the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from slapo_kernels.dispatch.dispatcher import run
from slapo_kernels.implementations import eager, flex

from ..kernel_examples import CALLS, IDS, LABELS, ROWS, WEIGHT, computed


@pytest.mark.parametrize("cast", ["input", "weight"])
def test_a_norm_is_rounded_where_it_says(cast: str) -> None:
    x, weight = ROWS.bfloat16(), WEIGHT.bfloat16()
    found = {name: run("rms_norm", x, weight, eps=1e-6, cast=cast, choice=name) for name in ("eager", "native")}
    assert torch.equal(found["native"], found["eager"])
    other = run("rms_norm", x, weight, eps=1e-6, cast="weight" if cast == "input" else "input", choice="native")
    assert not torch.equal(found["native"], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_models(dtype: torch.dtype) -> None:
    x = ROWS.to(dtype)
    llama, gemma = LlamaRMSNorm(16, eps=1e-3).to(dtype), GemmaRMSNorm(16, eps=1e-3).to(dtype)
    layer, rms = nn.LayerNorm(16, dtype=dtype), nn.RMSNorm(16, eps=1e-3, dtype=dtype)
    with torch.no_grad():
        for module in (llama, gemma, layer, rms):
            module.weight.copy_(WEIGHT)
        layer.bias.copy_(WEIGHT.flip(0))
    assert torch.equal(llama(x), eager.rms_norm(x, llama.weight, eps=1e-3))
    assert torch.equal(gemma(x), eager.rms_norm(x, gemma.weight, eps=1e-3, offset=1.0, cast="weight"))
    close = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(eager.rms_norm(x, rms.weight, eps=1e-3, cast="weight"), rms(x), **close)
    torch.testing.assert_close(eager.layer_norm(x, layer.weight, layer.bias, eps=layer.eps), layer(x), **close)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("gelu_new", "gelu_new"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("silu", "silu"),
    ],
)
def test_activations_are_those_of_transformers(name: str, theirs: str) -> None:
    x = torch.linspace(-6, 6, 1001)
    assert torch.equal(eager.bias_act(x, None, activation=name), ACT2FN[theirs](x))
    others = [other for other in eager.ACTIVATIONS if {name, other} != {"gelu_tanh", "gelu_new"} and other != name]
    assert not any(torch.allclose(eager.bias_act(x, None, activation=other), ACT2FN[theirs](x), atol=1e-5) for other in others)


def test_rotary_is_that_of_transformers() -> None:
    for args, kwargs in CALLS["rotary"]:
        expected = apply_rotary_pos_emb(*args, **kwargs)
        assert all(map(torch.equal, eager.rotary(*args, **kwargs), expected))


@pytest.mark.parametrize("choice", ["eager", "native"])
def test_attention_drops_what_torch_drops(choice: str) -> None:
    q, k, v = CALLS["attention"][0][0]
    torch.manual_seed(5)
    found = run("attention", q, k, v, dropout_p=0.4, choice=choice)
    torch.manual_seed(5)
    weights = F.dropout((q @ k.transpose(-2, -1) / math.sqrt(16)).softmax(-1), 0.4)
    torch.testing.assert_close(found, weights @ v)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks, of inputs that are not leaves
def test_inductor_drops_what_eager_drops() -> None:
    call = CALLS["bias_dropout_residual"][0]
    found, expected = (computed("bias_dropout_residual", call, choice) for choice in ("inductor", "eager"))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_a_query_that_may_look_at_nothing_gets_zeros() -> None:
    (q, k, v, mask), options = CALLS["attention"][-1]
    for choice in ("eager", "native"):
        out = run("attention", q, k, v, mask, choice=choice, **options)
        assert torch.equal(out[1, :, 0], torch.zeros(4, 16))
        assert out[0].abs().min() > 0


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("choice", ["eager", "native"])
def test_gradients_of_a_query_from_which_a_mask_hides_all(choice: str, hidden: float) -> None:
    """As of a softmax written out, whose scores are lost in what is added; of zeros where that is infinite."""

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + added).masked_fill(gone, 0.0)
        return scores.softmax(-1).masked_fill(gone, 0.0) @ v

    (*inputs, mask), _ = CALLS["attention"][-1]
    added = torch.zeros(mask.shape).masked_fill(~mask, hidden)
    gone = (added == -math.inf).all(-1, keepdim=True)
    leaves = [each.clone().requires_grad_() for each in inputs]
    found, expected = run("attention", *leaves, added, choice=choice), written_out(*leaves)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_mask_and_causality_are_refused_together() -> None:
    (q, k, v, mask), _ = CALLS["attention"][-1]
    with pytest.raises(ValueError, match="takes a mask or is_causal, not both"):
        eager.attention(q, k, v, mask, is_causal=True)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("index", range(len(CALLS["attention"])))
def test_flex_attention_is_asked_for_the_same(index: int) -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
        return flex.attend(flex_attention, q, k, v, mask, **options)

    args, kwargs = CALLS["attention"][index]  # backward is for GPUs: tests/gpu
    torch.testing.assert_close(attend(*args, **kwargs), eager.attention(*args, **kwargs))


def test_what_flex_attention_does_not_compute() -> None:
    (q, k, v, mask), _ = CALLS["attention"][-1]
    assert flex.refuses(q, k, v, mask) is None
    assert flex.refuses(q, k, v, dropout_p=0.1) == "has no dropout, and dropout_p is 0.1"
    assert flex.refuses(q, k, v, mask.float().requires_grad_()) == "gives a mask no gradient"
    added = torch.zeros(mask.shape).masked_fill(~mask, -1e4)
    assert flex.refuses(q, k, v, added) == "has wrong gradients where an added mask hides all keys from a query"
    added[1, :, 0, 0] = 0.0  # in place
    assert flex.refuses(q, k, v, added) is None


@pytest.mark.parametrize("choice", ["eager", "native"])
def test_the_loss_is_that_of_all_logits(choice: str) -> None:
    weight = CALLS["linear_cross_entropy"][0][0][1]
    expected = F.cross_entropy((ROWS @ weight.T).flatten(0, 1), LABELS.flatten())
    torch.testing.assert_close(run("linear_cross_entropy", ROWS, weight, LABELS, choice=choice), expected)
    nothing = run("linear_cross_entropy", ROWS, weight, torch.full_like(LABELS, -100), choice=choice)
    assert nothing.isnan()


def test_the_loss_by_chunks_goes_backward_once() -> None:
    weight = CALLS["linear_cross_entropy"][0][0][1].clone().requires_grad_()
    loss = run("linear_cross_entropy", ROWS, weight, LABELS, choice="native")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="called twice"):
        loss.backward()


def test_the_padding_row_gets_no_gradient() -> None:
    for choice in ("eager", "native"):
        weight = CALLS["embedding"][0][0][1].clone().requires_grad_()
        run("embedding", IDS, weight, padding_idx=4, choice=choice).sum().backward()
        assert weight.grad[4].abs().sum() == 0
        assert weight.grad[3].abs().sum() > 0


def test_the_loss_of_what_autocast_made_half() -> None:
    weight = CALLS["linear_cross_entropy"][0][0][1].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [run("linear_cross_entropy", ROWS.bfloat16(), weight, LABELS, choice=choice) for choice in ("eager", "native")]
    torch.testing.assert_close(losses[1], losses[0], atol=0.01, rtol=0.01)
    losses[1].backward()
    assert weight.grad.dtype is torch.float32
