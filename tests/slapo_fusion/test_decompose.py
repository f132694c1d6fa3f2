"""``sch.decompose()``: the same numbers and names, and a sum that can be fused."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import slapo_fusion.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import ScheduleError, create_schedule
from slapo_testing import isolated_plugins
from slapo_verify.comparison import assert_equivalent


@pytest.fixture(autouse=True)
def only_fusion() -> Iterator[None]:
    with isolated_plugins(slapo_tracing.plugin, slapo_training.plugin, slapo_fusion.plugin):
        yield


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(4, 6), (2, 3, 4)),
    "linear of one row": (nn.Linear(4, 6), (4,)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), dilation=2, padding="same"), (2, 4, 9, 8)),
    "conv2d without batch": (nn.Conv2d(4, 6, 3), (4, 9, 8)),
    "conv1d of transformers": (Conv1D(6, 4), (2, 3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_bias_is_a_node_and_the_numbers_stay(name: str) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    before = nn.Sequential(layer)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(torch.randn(shape),))
    parameters = dict(sch.mod.named_parameters())
    sch["0"].decompose()
    assert isinstance(sch["0"].mod, type(layer))
    assert {key: id(value) for key, value in sch.mod.named_parameters()} == {k: id(v) for k, v in parameters.items()}
    assert_equivalent(before, sch.mod, torch.randn(shape))
    sch.trace(flatten=True)
    assert len(sch.find(lambda x, bias: x + bias)) == 1


PROJECTIONS: dict[str, tuple[nn.Module, Any]] = {
    "queries, keys and values": (nn.Linear(4, 12), 3),
    "grouped keys": (nn.Linear(4, 8, bias=False), (4, 2, 2)),
    "of transformers": (Conv1D(12, 4), 3),
}


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_fused_projection_is_taken_apart(name: str) -> None:
    layer, parts = copy.deepcopy(PROJECTIONS[name])
    before = nn.Sequential(layer)
    sch = create_schedule(copy.deepcopy(before), example_inputs=(torch.randn(2, 3, 4),))
    parameters = dict(sch.mod.named_parameters())
    sch["0"].decompose(parts=parts)
    assert isinstance(sch["0"].mod, type(layer))
    assert {key: id(value) for key, value in sch.mod.named_parameters()} == {k: id(v) for k, v in parameters.items()}
    assert_equivalent(before, sch.mod, torch.randn(2, 3, 4))
    assert_equivalent(before, copy.deepcopy(sch.mod), torch.randn(2, 3, 4))
    sch.trace(flatten=True)
    found = sch.find(lambda x, weight: F.linear(x, weight)) + sch.find(lambda x, w, b: F.linear(x, w, b))
    assert len({node.name for match in found for _, node in match}) == 3


@pytest.mark.parametrize(
    ("layer", "parts", "message"),
    [
        (nn.Linear(4, 12), 5, "parts is 5, of 12 outputs; give a number of parts that divides them, or sizes that add up"),
        (nn.Linear(4, 12), (4, 4), r"parts is \(4, 4\), of 12 outputs"),
        (nn.Linear(4, 12), 1, "parts is 1, of 12 outputs"),
        (nn.Linear(4, 12), "3", "parts is '3', of 12 outputs"),
        (nn.Linear(4, 12), True, "parts is True, of 12 outputs"),
        (
            nn.Conv1d(4, 12, 1),
            3,
            "a Conv1d is not a projection that parts can be taken of; a Linear or Transformers' Conv1D is",
        ),
    ],
)
def test_parts_that_make_no_projection_are_refused(layer: nn.Module, parts: Any, message: str) -> None:
    sch = create_schedule(nn.Sequential(layer))
    with pytest.raises(ScheduleError, match=message):
        sch["0"].decompose(parts=parts)
    assert sch["0"].mod is layer


def bias_gelu(x: Any, bias: Any) -> Any:
    y = x + bias
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_bias_and_activation_of_gpt2_are_one_call() -> None:
    config: Any = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=32, n_positions=8, use_cache=False)
    before = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(8)[None]
    sch = create_schedule(copy.deepcopy(before), example_inputs={"input_ids": ids})
    names = list(sch.mod.state_dict())
    for layer in sch.select("transformer.h.*"):
        layer["mlp.c_fc"].decompose()
    sch.trace(flatten=True)
    matches = sch.find(bias_gelu)
    assert len(matches) == 2
    sch.fuse(matches, name="bias_gelu")
    assert list(sch.mod.state_dict()) == names
    assert_equivalent(before, sch.mod, input_ids=ids)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LayerNorm(4), "a LayerNorm has no bias that can be added apart"),
        (nn.Linear(4, 4, bias=False), "it has no bias"),
        (nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), "it is padded by 'circular'"),
        (nn.Sequential(nn.Linear(4, 4)), "a Sequential has no bias"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_taken_apart_is_refused(layer: nn.Module, message: str) -> None:
    sch = create_schedule(nn.Sequential(layer))
    with pytest.raises(ScheduleError, match=message):
        sch["0"].decompose()
    assert sch["0"].mod is layer


def test_a_layer_keeps_its_hooks_and_undo_gives_it_back() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    handle = model[0].register_forward_hook(lambda module, args, output: F.relu(output))
    expected, layers = model(x), list(model)
    sch = create_schedule(model)
    sch["0"].decompose()
    assert type(sch["0"].mod) is not nn.Linear
    torch.testing.assert_close(model(x), expected)
    handle.remove()
    torch.testing.assert_close(model(x), layers[1](layers[0](x)))
    sch.undo()
    assert list(model) == layers


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].forward = lambda x: x
    with pytest.raises(ScheduleError, match="its forward was replaced or wrapped, e.g. by a shard of its inputs"):
        create_schedule(model)["0"].decompose()
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: F.relu(output))
    with pytest.raises(ScheduleError, match="it is sharded or hooked, and its parts would not be"):
        create_schedule(model)["0"].decompose(parts=2)
