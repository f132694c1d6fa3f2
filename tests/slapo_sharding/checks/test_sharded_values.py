"""Code between a column and a row layer that needs the whole sharded value is refused in the first run."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_sharding.checks.value_tracking.op_rules import cached_layouts
from slapo_sharding.checks.value_tracking.tracked_value import OpCall, Slice, untracked_layout
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent

pytestmark = pytest.mark.multiproc

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin, slapo_torch.plugin])


class Mlp(nn.Module):
    """A function runs between the layers."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], inner: int = 8, out: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(out, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], 1, -1, 2).transpose(1, 2)


def _set(x: torch.Tensor, place: Any) -> torch.Tensor:
    x[place] = 0
    return x


PART_BY_PART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "in place": lambda x: F.relu(x.mul_(2), inplace=True),
    "along another dimension": lambda x: x.softmax(0) - x.mean(0),
    "pairs": lambda x: torch.stack([x[..., ::2], x[..., 1::2]], -1).flatten(-2),
    "heads": lambda x: x.view(x.shape[0], -1, 2).softmax(-1).view(x.shape[0], -1),
    "rotated heads": lambda x: torch.cat([-x.unflatten(-1, (-1, 2))[..., 1:], x.unflatten(-1, (-1, 2))[..., :1]], -1).flatten(
        -2
    ),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.unflatten(-1, (-1, 2)).transpose(0, 1)] * 3).transpose(0, 1).flatten(1)
    ),
    "one head": lambda x: x.view(x.shape[0], 1, x.shape[1]).transpose(0, 1).reshape(x.shape[0], -1),
    "moved": lambda x: x.to(x.device).double().float().t().contiguous().t(),
    "chosen": lambda x: torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x > 1, 0.5),
    "neighbours": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "no rule": lambda x: torch.special.i0(x),
    "an empty tensor": lambda x: torch.cat([torch.empty(0), x], 0),
    "a product of each head": lambda x: (_heads(x).transpose(1, 2) @ torch.ones(2, 2)).transpose(1, 2).flatten(1),
    "head by head": lambda x: torch.cat([head.softmax(-1) for head in x.split(2, -1)], -1),
    "one head after the other": lambda x: torch.stack([_heads(x)[:, i] for i in range(x.shape[-1] // 2)], 1).flatten(1),
    "one of the others set": lambda x: _set(x.clone(), 0),
    "a triangle of scores": lambda x: (_heads(x) @ _heads(x).mT).tril().sum(-1, keepdim=True).expand(-1, -1, -1, 2).flatten(1),
    "without their logarithm": lambda x: x - x.logsumexp(0, keepdim=True),
    "only looked at": lambda x: x if x.isnan().any() or x.detach().abs().mean().item() > 0 else -x,
    "truth values": lambda x: x * (x > 0).any(0) + (x > -1).all(0, keepdim=True).to(x.dtype) * (x > 0).unsqueeze(-1).any(-1),
    "truth values of each head": lambda x: (x.unflatten(-1, (-1, 2)) > 0).any(-1).repeat_interleave(2, -1) * x,
    "whole numbers": lambda x: x * (x * 8).long().argmax(0, keepdim=True) + (x * 8).int().sum(0) + (x * 8).long().cumsum(0),
    "ones set": lambda x: _set(x.clone(), x > 0.5),
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))).cumsum(0)).flatten(-2),
    "sizes read off it": lambda x: (
        x.view(-1, x.shape[-1]).view(1, -1, x.shape[-1])[0].reshape(x.shape[-1] * 3, -1).view(x.shape)
    ),
    "by keyword": lambda x: torch.reshape(input=x, shape=(3, -1, 2)).flatten(1),
}

NEEDS_ALL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "group_norm": lambda x: F.group_norm(x[..., None], 4)[..., 0],
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "sum": lambda x: x / x.exp().sum(-1, keepdim=True),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "std": lambda x: x / x.std(-1, keepdim=True),
    "argmax": lambda x: x * x.argmax(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1)[0],
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "chunk": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "__getitem__": lambda x: torch.cat([-x[..., 1:], x[..., :1]], -1),
    "matmul": lambda x: (x @ x.t()).softmax(-1) @ x,
    "linear": lambda x: F.linear(x, torch.ones(x.shape[-1], x.shape[-1])),
    "mm": lambda x: torch.mm(torch.ones(x.shape), x.t()) @ torch.ones(3, x.shape[-1]),
    "einsum": lambda x: torch.einsum("bh,ch->bc", x, x) @ x,
    "fft_fft": lambda x: torch.fft.fft(x).real,
    "__setitem__": lambda x: _set(x.clone(), (slice(None), 0)),
    "count_nonzero": lambda x: x * x.count_nonzero(-1)[:, None],
    "any": lambda x: x * (x > 0.9).any(-1, keepdim=True),
    "all": lambda x: torch.where((x > -0.9).all(-1, keepdim=True), x, -x),
    "prod": lambda x: x * (x * 8).int().prod(-1, keepdim=True),
    "max": lambda x: x * (x * 8).long().max(-1, keepdim=True)[0],
    "argmin": lambda x: x * (x * 8).long().argmin(-1, keepdim=True),
}


def _split(model: nn.Module, blocks: int | None = None) -> nn.Module:
    sch = create_schedule(model, plugins=PLUGINS)
    if blocks is None:
        sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
    else:
        sch["up"].shard("weight", axis=0, blocks=blocks).sync("bwd_post", "all_reduce")
        sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return build(sch).module


X = torch.arange(12.0).view(3, 4).cos()


def _message(model: nn.Module, blocks: int | None = None) -> str:
    module = _split(model, blocks)
    with pytest.raises(BuildError) as caught:
        module(X)
    return str(caught.value)


def _part_by_part(rank: int) -> None:
    for between in PART_BY_PART.values():
        torch.manual_seed(0)
        model = Mlp(between)
        before = copy.deepcopy(model)
        assert_equivalent(before, _split(model), X)


def test_code_that_works_on_shards_runs() -> None:
    run_distributed(_part_by_part, 2)


def _needs_all(rank: int) -> dict[str, str]:
    return {name: _message(Mlp(between)) for name, between in NEEDS_ALL.items()}


def test_code_that_needs_other_shards_is_refused_on_every_rank() -> None:
    first, second = run_distributed(_needs_all, 2)
    assert first == second
    for name, message in first.items():
        assert message.startswith(f"the model, Mlp, at {__file__}:")
        assert f": {name} needs the whole value, and each rank has a part of the output of 'up'; gather it there, " in message


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = F.hardtanh(x, -9, 9).chunk(2, -1)
    return F.silu(gate) * value


def _slices(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def _fused(rank: int) -> list[str]:
    for between in (_swiglu, _slices):
        torch.manual_seed(0)
        model = Mlp(between, inner=16)
        before = copy.deepcopy(model)
        assert_equivalent(before, _split(model, blocks=2), X)
    return [
        _message(Mlp(_swiglu, inner=16), blocks=1),
        _message(Mlp(lambda x: sum(x.chunk(4, -1)), inner=32), blocks=2),  # type: ignore[arg-type, return-value]
        _message(Mlp(lambda x: x[..., 1:5], inner=16, out=8), blocks=2),
        _message(Mlp(lambda x: x.view(3, -1, 6).chunk(3, -1)[0].flatten(1), inner=24, out=4), blocks=3),
        _message(Mlp(F.gelu), blocks=2),
        _message(Mlp(lambda x: F.gelu(x).softmax(-1)), blocks=2),
        _message(Mlp(lambda x: x.view(3, 2, 2).transpose(1, 2).reshape(3, 4))),
    ]


def test_fused_outputs_are_split_at_their_blocks() -> None:
    first, second = run_distributed(_fused, 2)
    assert first == second
    for message, part in zip(
        first,
        (
            "chunk needs the whole value",
            "chunk takes [4, 4, 4, 4] out of blocks of [8, 8]",
            "[1, 5] is cut out of blocks of [4, 4]",
            "view makes rows of 6 out of blocks of [4, 4, 4]",
            "a Linear that is split in one block along 1 is given [4, 4] along 1",
            "softmax needs the whole value",
            "a Linear that is sharded receives parts in another order",
        ),
        strict=True,
    ):
        assert part in message


def _fails(rank: int) -> list[str]:
    return [_message(Mlp(lambda x: F.layer_norm(x, (8,)))), _message(Mlp(lambda x: x.view(3, 2, 4).flatten(1)))]


def test_errors_of_torch_name_the_layer() -> None:
    for message, text in zip(run_distributed(_fails, 2)[0], ("layer_norm fails, Given", "view fails, shape"), strict=True):
        assert text in message
        assert "each rank has a part of the output of 'up'; gather it there" in message


class Reduced(nn.Module):
    """A hand-written row layer whose output a sync reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).pow(2).sum(-1)


def _built(model: nn.Module, sync: bool, **config: bool) -> nn.Module:
    sch = create_schedule(copy.deepcopy(model), plugins=PLUGINS)
    sch["up"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
    if sync:
        sch.sync("fwd_post", "all_reduce")
    return build(sch, **config).module


def _cached(rank: int) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)).eval()
    before, tokens = copy.deepcopy(model), torch.arange(4)[None]
    sch = create_schedule(model, plugins=PLUGINS, example_inputs={"input_ids": tokens, "use_cache": False})
    sch.tensor_parallel()
    build(sch)
    expected = before.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), expected)


def test_a_model_with_a_cache_generates() -> None:
    run_distributed(_cached, 2)


def _summed(rank: int) -> str:
    torch.manual_seed(0)
    model = Reduced()
    assert_equivalent(model, _built(model, sync=True), X)
    assert _built(model, sync=False, check=False)(X).shape == (3,)
    with pytest.raises(BuildError) as caught:
        _built(model, sync=False)(X)
    return str(caught.value)


def test_a_sum_that_a_sync_reduces_is_allowed() -> None:
    assert "sum needs the whole value" in run_distributed(_summed, 2)[0]


class Stack(nn.Module):
    """Identical layers."""

    def __init__(self, *between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(each, inner=24, out=24) for each in between)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _stack(*between: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    sch = create_schedule(Stack(*between), plugins=PLUGINS)
    sch.tensor_parallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    return build(sch).module


def _softmax_of_heads(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).view(x.shape[0], -1, 4).softmax(-1).flatten(1)


def _softmax_of_all(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).view(x.shape[0], -1, 4).softmax(1).flatten(1)


def _worked_out(run: Callable[[], Any]) -> tuple[int, int]:
    before = cached_layouts.cache_info()
    run()
    after = cached_layouts.cache_info()
    return after.misses - before.misses, after.hits - before.hits


def _alike(rank: int) -> list[str]:
    cached_layouts.cache_clear()
    assert _worked_out(lambda: _stack(_softmax_of_heads)(X)) == (4, 0)
    assert _worked_out(lambda: _stack(*[_softmax_of_heads] * 3)(X)) == (0, 12)
    messages = []
    for between in ([_softmax_of_all], [_softmax_of_heads, _softmax_of_all]):
        with pytest.raises(BuildError) as caught:
            _stack(*between)(X)
        messages.append(str(caught.value))
    return messages


def test_identical_layers_are_analysed_once_and_others_still_refused() -> None:
    for index, message in enumerate(run_distributed(_alike, 2)[0]):
        assert message.startswith(f"Mlp 'layers.{index}' at {__file__}:")
        assert f": softmax needs the whole value, and each rank has a part of the output of 'layers.{index}.up'" in message


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    kernel = torch.eye(3)[1 + by].view(1, 1, 3)
    return F.conv1d(x[:, None], kernel, padding=1)[:, 0]


def _by_numbers(rank: int) -> None:
    """Answers that depend on values are not cached by shape."""
    for _ in range(2):
        _stack(lambda x: _shift(x, 0))(X)
        with pytest.raises(BuildError, match="conv1d needs the whole value"):
            _stack(lambda x: _shift(x, 1))(X)


def test_answers_of_the_numeric_probe_are_not_cached() -> None:
    run_distributed(_by_numbers, 2)


def _others(rank: int) -> None:
    """Functions that are not torch's, equal arguments of different types, and dispatch modes."""
    x, calls = torch.ones(2, 3), []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    cached_layouts.cache_clear()
    model = _stack(lambda x: x * 1)
    with Sees():
        model(X)
    assert calls
    assert cached_layouts.cache_info().currsize == 0
    _stack(lambda x: x * 1)(X)
    _stack(lambda x: x * 1.0)(X)
    assert cached_layouts.cache_info().currsize == 2
    given = OpCall(len, (x,), (), None, untracked_layout(x), (), False, False, ())
    assert not given.is_cacheable
    assert not dataclasses.replace(given, func=torch.add).is_cacheable
    assert dataclasses.replace(given, func=torch.add, leaves=(untracked_layout(x), 1, Slice(0, None, 2))).is_cacheable
    assert not dataclasses.replace(given, func=torch.add, leaves=(Slice(x, None, None),)).is_cacheable


def test_answers_with_other_inputs_than_the_call_are_not_cached() -> None:
    run_distributed(_others, 2)


class Loss(nn.Module):
    """A loss of sharded logits with as many rows as local columns."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.head, self.loss = nn.Embedding(16, 8), nn.Linear(8, 16), loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.words(ids)), ids % 8)


_LOSSES: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, int]]] = [
    (lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()), (2, 4)),
    (lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1, reduction="none"), (2, 4)),
    (lambda logits, ids: F.cross_entropy(logits.transpose(1, 2), ids), (2, 8)),
]


def _losses(rank: int) -> None:
    for loss, shape in _LOSSES:
        sch = create_schedule(
            Loss(loss), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_sharding.plugin])
        )
        sch["head"].shard("weight", axis=0).sync("bwd_post", "all_reduce")
        build(sch)
        with pytest.raises(BuildError, match="cross_entropy needs the whole value"):
            sch.mod(torch.arange(math.prod(shape)).view(shape) % 16)


def test_a_loss_of_as_many_rows_as_columns_is_refused_too():
    run_distributed(_losses, 2)
