"""Vision-language models in micro-batches: rows with none, one or two images, of other numbers in each batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from slapo_core import build, create_schedule
from slapo_core.testing import run_distributed

pytestmark = pytest.mark.multiproc

IMAGE, START, END, LENGTH = 60, 61, 62, 24
SGD = partial(torch.optim.SGD, lr=0.1)
IMAGES = ([1, 2, 0, 1], [2, 0, 1, 0], [1, 1, 1, 1], [0, 0, 2, 1])
"""Number of images in each row, by batch."""


def llava() -> nn.Module:
    """Return a model that takes hidden states of its vision part, which hooks capture that its first call puts there."""
    torch.manual_seed(0)
    sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False}
    vision = CLIPVisionConfig(hidden_size=16, num_attention_heads=2, image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, **sizes)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE))


def qwen() -> nn.Module:
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "use_cache": False,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": 63, "vision_start_token_id": START, "vision_end_token_id": END}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens, tie_word_embeddings=False)
    return Qwen2VLForConditionalGeneration(config)


def text_of(sizes: list[list[int]], generator: torch.Generator) -> torch.Tensor:
    """Return rows of tokens, with images of so many tokens each."""
    ids = torch.randint(1, 50, (len(sizes), LENGTH), generator=generator)
    for row, images in zip(ids, sizes, strict=True):
        place = 1
        for size in images:
            row[place], row[place + size + 1] = START, END
            row[place + 1 : place + size + 1] = IMAGE
            place += size + 3
    return ids


def batch_of(kind: str, images: list[int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "llava":
        ids = text_of([[4] * number for number in images], generator)
        text = {"input_ids": ids, "labels": ids}
        return {**text, "pixel_values": torch.randn(sum(images), 3, 8, 8, generator=generator)} if any(images) else text
    grids = [[(2, 2 + 2 * ((row + place) % 3)) for place in range(number)] for row, number in enumerate(images)]
    ids = text_of([[height * width // 4 for height, width in row] for row in grids], generator)
    flat = [(1, *grid) for row in grids for grid in row]
    patches = torch.randn(sum(height * width for _, height, width in flat), 96, generator=generator)
    text = {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    return {**text, "pixel_values": patches, "image_grid_thw": torch.tensor(flat)} if flat else text


def joined(shares: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = {name: None for share in shares for name in share}
    return {name: torch.cat([share[name] for share in shares if name in share]) for name in names}


def train(rank: int, kind: str, target: str, layout: dict[str, int], options: dict[str, Any]) -> None:
    """Compare losses and weights with the unmodified model's; the first step's checks cut and join the rows, too."""
    model = {"llava": llava, "qwen": qwen}[kind]()
    reference = copy.deepcopy(model).train()
    dp, tp = layout.get("dp", 1), layout.get("tp", 1)
    mesh = init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh)
    if tp > 1:
        sch.tensor_parallel()
    engine, optimizer = build(sch, target, optimizer=SGD, **options), SGD(reference.parameters())
    for seed, images in enumerate(IMAGES):
        rows = len(images) // dp
        shares = [batch_of(kind, images[rows * each : rows * (each + 1)], 2 * seed + each) for each in range(dp)]
        expected = reference(**joined(shares)).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(engine.train_batch(**shares[mesh["dp"].get_local_rank()])) == pytest.approx(expected.item(), abs=1e-5)
    weights = dict(reference.named_parameters())
    for name, value in sch.full_state().items():
        torch.testing.assert_close(value, weights[name].detach(), atol=2e-5, rtol=1e-4)
    engine.close()


TWO = {"microbatches": 2}
COUNTED = {**TWO, "batch_dims": {"pixel_values": "image_grid_thw"}}


@pytest.mark.parametrize(
    ("kind", "target", "layout", "options"),
    [
        ("llava", "torch", {}, TWO),
        ("qwen", "torch", {"dp": 2}, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("qwen", "torch", {}, TWO),
                ("qwen", "torch", {}, COUNTED),
                ("qwen", "torch", {"tp": 2}, TWO),
                ("llava", "torch", {"dp": 2}, TWO),
                *(
                    (kind, target, layout, TWO)
                    for kind in ("llava", "qwen")
                    for target in ("deepspeed", "megatron")
                    for layout in ({}, {"dp": 2})
                ),
            ]
        ),
    ],
)
def test_each_row_keeps_its_images(kind: str, target: str, layout: dict[str, int], options: dict[str, Any]) -> None:
    ranks = layout.get("dp", 1) * layout.get("tp", 1)
    run_distributed(train, ranks, kind, target, layout, options, timeout=100)
