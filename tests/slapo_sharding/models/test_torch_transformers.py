"""Torch's own transformer layers: attention and MLPs are split, and correct in training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_sharding.planning.local_sizes.test_handwritten import tokens

pytestmark = pytest.mark.multiproc

SIZES: dict[str, Any] = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}


class Encoder(nn.Module):
    """Encoder with a padding mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(**SIZES, **options)
        self.embedding, self.encoder, self.head = nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=padding))


class Both(nn.Module):
    """Encoder and causal decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.both = nn.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=2)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x, mask = self.embedding(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.both(x, x.flip(1), tgt_mask=mask, src_key_padding_mask=padding))


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"relu": Encoder, "gelu": lambda: Encoder(activation="gelu", norm_first=True), "both": Both}[kind]()


def batch(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    padding = torch.zeros(rows, length, dtype=torch.bool)
    padding[-1, length - 3 :] = True
    return tokens(rows, length, seed), padding


def compare_splits(rank: int, kind: str) -> tuple[set[str], list[str]]:
    """Compare in training and in evaluation; return the split layers and the warnings."""
    expected, model = model_of(kind), model_of(kind)
    sch = create_schedule(model, example_inputs=batch(2, 8, 0))
    with warnings_told() as told:
        sch.tensor_parallel()
    build(sch)
    for number, shape in enumerate(((2, 8), (3, 12), (2, 8))):
        given = batch(*shape, number)
        for each in (expected, model):
            each.zero_grad()
            each(*given)[~given[1]].square().mean().backward()
        gradients = sch.full_state("grad")
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-3)
    for each in (expected, model):
        each.eval()
    for switch in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with switch():
            torch.testing.assert_close(model(*given), expected(*given), atol=1e-5, rtol=1e-4)
    whole = dict(expected.named_parameters())
    return {name.rpartition(".")[0] for name, own in model.named_parameters() if own.shape != whole[name].shape}, told


def layer_has(kind: str, layer: str, name: str) -> bool:
    """Return whether a layer has a submodule of this name: encoders have no cross-attention."""
    return kind != "both" or "decoder" in layer or not name.startswith("multihead_attn")


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", ["relu", "gelu", pytest.param("both", marks=pytest.mark.slow)])
def test_layers_are_split(kind: str) -> None:
    stacks = ("both.encoder.layers.0", "both.decoder.layers.0", "both.decoder.layers.1")
    layers = {"both": stacks}.get(kind, ("encoder.layers.0", "encoder.layers.1"))
    for split, told in run_distributed(compare_splits, 2, kind):
        attentions = ("self_attn", "multihead_attn") if kind == "both" else ("self_attn",)
        names = ("linear1", "linear2", *(f"{each}{part}" for each in attentions for part in ("", ".out_proj")))
        inside = {f"{layer}.{name}" for layer in layers for name in names if layer_has(kind, layer, name)}
        assert split == inside | {"embedding", "head"}
        assert told == []
