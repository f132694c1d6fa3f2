"""Handwritten whole models: outputs and gradients for changing shapes, and names of the modules that stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.whole_models import Mamba, NanoGpt, Whisper, XTransformer
from tests.slapo_sharding.whole_vision_models import Detr, Dit, Mixer, Swin, UNet, Vit

pytestmark = pytest.mark.multiproc

WHOLE: dict[type[Any], set[str]] = {
    NanoGpt: set(),
    Whisper: {"decoder.token_embedding", "decoder"},
    XTransformer: {"layers.*.*"},
    Vit: {"patch_embed.proj", "head", ""},
    Swin: {"patch_embed", "downsample.reduction", "head", "layers.*.*.attn"},
    Dit: {"x_embedder.proj", "y_embedder", "blocks.*.adaLN_modulation.*", "linear", "final_modulation.*"},
    UNet: {*("stem", "pool", "upsample", "out"), *(f"{block}{n}.skip" for block in ("down", "mid", "up") for n in (1, 2))},
    Detr: {"", "conv", "linear_class", "bbox_embed.layers.*"},
    Mixer: {"stem.proj", "head"},
    Mamba: set(),
}
"""Modules with matrices and no split, or with whole matrices of their own beside layers."""

NAMED = {
    Whisper: {"decoder.token_embedding.weight"},
    Vit: {"patch_embed.proj"},
    Swin: {"patch_embed", "downsample.reduction"},
    Dit: {"x_embedder.proj", "linear"},
    UNet: {"pool"},
    Detr: {"conv"},
    Mixer: {"stem.proj"},
}
"""Modules with a large share of the work, which a warning names."""

FAST = {NanoGpt, Whisper}


def loss_of(outputs: Any) -> torch.Tensor:
    return torch.stack([each.square().mean() for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]).sum()


def compare(expected: nn.Module, model: nn.Module, given: dict[str, Any], full_state: Any) -> None:
    for each in (expected, model):
        each.zero_grad()
        loss_of(each(**given)).backward()
    for found, value in zip(tree_leaves(model(**given)), tree_leaves(expected(**given)), strict=True):
        torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-4)
    gradients = full_state("grad")
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def place(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def whole_of(rank: int, kind: type[Any]) -> tuple[set[str], list[str]]:
    """Split and compare a model; return the modules with whole matrices, and the warnings."""
    torch.manual_seed(0)
    expected, model = kind(), kind()
    model.load_state_dict(expected.state_dict())
    sch = create_schedule(model, example_inputs=kind.inputs(2, 8, 0))
    with warnings_told() as told:
        sch.tensor_parallel()
    build(sch)
    for number, (batch, length) in enumerate(((2, 8), (4, 12), (2, 8))):
        compare(expected, model, kind.inputs(batch, length, number), sch.full_state)
    for each in (expected, model):
        each.eval()
    with torch.no_grad():
        given = kind.inputs(3, 8, 7)
        for found, value in zip(tree_leaves(model(**given)), tree_leaves(expected(**given)), strict=True):
            torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-4)
    whole = dict(expected.named_parameters())
    kept = {
        place(name.rpartition(".")[0])
        for name, own in model.named_parameters()
        if own.dim() > 1 and own.shape == whole[name].shape
    }
    return kept, told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in WHOLE])
def test_splits_are_correct_and_whole_modules_are_named(kind: type[Any]) -> None:
    for whole, told in run_distributed(whole_of, 2, kind, timeout=120):
        assert whole == WHOLE[kind]
        names = {message.removeprefix("tensor_parallel: ").partition(" stays whole")[0] for message in told}
        assert names == NAMED.get(kind, set())
        assert all(".py:" in message for message in told)
