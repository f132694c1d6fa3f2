"""A vision-language model written by hand: image tokens put in by ``masked_scatter``, or images in front of the text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from slapo_core import build, create_schedule
from slapo_testing import run_distributed

from ..image_models import IMAGE, SGD, assert_trains_alike, joined, text_of

IMAGES = ([1, 2, 0, 2], [0, 0, 0, 0], [2, 0, 1, 0], [1, 1, 2, 1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(x.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 4, 16))
        self.blocks = nn.ModuleList(Block(16, 2, causal=False) for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return x


class Scattering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.projector = Vision(), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.tokens, self.blocks = nn.Embedding(64, 32), nn.ModuleList(Block(32, 4, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids)
        if pixels is not None:
            x, labels = self.with_images(x, self.projector(self.vision(pixels)), ids, labels)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return Result(F.cross_entropy(logits.reshape(-1, 64), labels[:, 1:].reshape(-1)))

    def with_images(self, x: torch.Tensor, images: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return x.masked_scatter((ids == IMAGE).unsqueeze(-1), images), labels


class Result:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Prefixing(Scattering):
    def with_images(self, x: torch.Tensor, images: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return torch.cat([images, x], 1), torch.cat([labels.new_full(images.shape[:2], -100), labels], 1)


def number_of_images(ids: torch.Tensor) -> torch.Tensor:
    return (ids == IMAGE).sum(1) // 4


def batch_of(kind: type[Scattering], images: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Return rows of text with so many images each, or with one each where any has; labels of images do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = text_of([[4] * number if kind is Scattering else [] for number in images], generator)
    number = sum(images) if kind is Scattering else len(images) * any(images)
    text = {"ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    return {**text, "pixels": torch.randn(number, 3, 8, 8, generator=generator)} if number else text


def train(rank: int, kind: type[Scattering], layout: tuple[int, int, int], trained: str, options: dict[str, Any]) -> None:
    model = kind()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    reference, (pp, dp, tp) = copy.deepcopy(model), layout
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh, example_inputs=batch_of(kind, IMAGES[0], 9))
    if tp > 1:
        sch.tensor_parallel()
        assert model.vision.blocks[0].attention.qkv.weight.shape == (24, 16)
        assert model.blocks[0].attention.qkv.weight.shape == (48, 32)
    if pp > 1:
        sch["blocks.0"].cut_pipeline_stage()
    batches = []
    for seed, images in enumerate(IMAGES):
        if trained and not any(images):
            continue
        rows = len(images) // dp
        shares = [batch_of(kind, images[rows * at : rows * (at + 1)], 2 * seed + at) for at in range(dp)]
        batches.append((shares[mesh["dp"].get_local_rank()], joined(shares)))
    if kind is Scattering:
        options = {**options, "batch_dims": {"pixels": number_of_images}}
    assert_trains_alike(build(sch, "torch", optimizer=SGD, microbatches=2, **options), sch, reference, batches)


@pytest.mark.multiproc
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "layout", "trained", "options"),
    [
        (Scattering, (2, 1, 1), "projector", {}),
        (Scattering, (1, 1, 2), "", {}),
        (Scattering, (1, 2, 1), "projector", {"data_parallel": "fsdp"}),
        (Scattering, (2, 1, 2), "", {}),
        (Scattering, (2, 1, 2), "projector", {}),
        (Prefixing, (1, 1, 2), "", {}),
        (Prefixing, (2, 1, 1), "", {}),
        (Prefixing, (2, 1, 2), "", {}),
    ],
)
def test_images_and_text_alone(
    kind: type[Scattering], layout: tuple[int, int, int], trained: str, options: dict[str, Any]
) -> None:
    pp, dp, tp = layout
    run_distributed(train, pp * dp * tp, kind, layout, trained, options, timeout=100)
