"""Small vision-language models of Transformers, and batches of rows with none, one or two images.

model, batch = MODELS["llava"](), batch_of("llava", [1, 2, 0, 1], seed=0)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

Batch = dict[str, torch.Tensor]

SGD = partial(torch.optim.SGD, lr=0.1)
IMAGE, START, END, LENGTH = 60, 61, 62, 24
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


def gemma() -> nn.Module:
    """Return a model whose masks let the tokens of one image see each other: ``torch.vmap`` makes them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    windows = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = Gemma3TextConfig(**sizes, **windows, **tokens, num_key_value_heads=2, max_position_embeddings=64, use_cache=False)
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
    )
    tokens = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens, tie_word_embeddings=False)
    return Gemma3ForConditionalGeneration(config)


def smol() -> nn.Module:
    """Return a model that looks at the images' numbers for those that only fill up a row."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0}
    text = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, **sizes)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    config = SmolVLMConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
    config.use_cache = False
    return SmolVLMForConditionalGeneration(config)


_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def pali() -> nn.Module:
    torch.manual_seed(0)
    text = GemmaConfig(**_TEXT, num_key_value_heads=2, head_dim=8, use_cache=False)
    vision = SiglipVisionConfig(**_VISION, image_size=8, patch_size=4, vision_use_head=False)
    sizes = {"projection_dim": 32, "hidden_size": 32}
    config = PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, **sizes)
    return PaliGemmaForConditionalGeneration(config)


def intern() -> nn.Module:
    torch.manual_seed(0)
    text = Qwen2Config(**_TEXT, num_key_value_heads=2, max_position_embeddings=128, use_cache=False)
    vision = InternVLVisionConfig(**_VISION, image_size=[8, 8], patch_size=[2, 2])
    tokens = {"image_token_id": IMAGE, "image_seq_length": 4}
    return InternVLForConditionalGeneration(
        InternVLConfig(text_config=text, vision_config=vision, downsample_ratio=0.5, **tokens)
    )


MODELS = {"llava": llava, "qwen": qwen, "gemma": gemma, "smol": smol}
TRAINED = {**MODELS, "pali": pali, "intern": intern}
"""Those that the tests do not cut into stages, too."""


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
    if kind in ("llava", "pali", "intern"):
        ids = text_of([[4] * number for number in images], generator)
        text = {"input_ids": ids, "labels": ids}
        if kind == "pali":
            text["token_type_ids"] = (ids == IMAGE).long()
        return {**text, "pixel_values": torch.randn(sum(images), 3, 8, 8, generator=generator)} if any(images) else text
    if kind in ("gemma", "smol"):
        return _of_squares(kind, images, generator)
    grids = [[(2, 2 + 2 * ((row + place) % 3)) for place in range(number)] for row, number in enumerate(images)]
    ids = text_of([[height * width // 4 for height, width in row] for row in grids], generator)
    flat = [(1, *grid) for row in grids for grid in row]
    patches = torch.randn(sum(height * width for _, height, width in flat), 96, generator=generator)
    text = {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    return {**text, "pixel_values": patches, "image_grid_thw": torch.tensor(flat)} if flat else text


def _of_squares(kind: str, images: list[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = text_of([[4] * number for number in images], generator)
    text = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "gemma":
        text["token_type_ids"] = (ids == IMAGE).long()
        return {**text, "pixel_values": torch.randn(sum(images), 3, 16, 16, generator=generator)} if any(images) else text
    pixels = torch.zeros(len(images), max(images), 3, 16, 16)
    for row, number in zip(pixels, images, strict=True):
        row[:number] = torch.randn(number, 3, 16, 16, generator=generator)
    return {**text, "pixel_values": pixels} if any(images) else text


def joined(shares: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the batch of all shares; images padded for each row are padded to as many as the most."""
    names = {name: None for share in shares for name in share}
    whole = {name: [share[name] for share in shares if name in share] for name in names}
    most = max((each.shape[1] for each in whole.get("pixel_values", []) if each.dim() == 5), default=0)
    padded = [F.pad(each, (0, 0) * 3 + (0, most - each.shape[1])) for each in whole.get("pixel_values", []) if most]
    return {name: torch.cat(padded if padded and name == "pixel_values" else each) for name, each in whole.items()}


def assert_trains_alike(
    engine: Any, sch: Any, reference: nn.Module, batches: Iterable[tuple[Batch, Batch]], atol: float = 2e-5
) -> None:
    """Compare the losses of an engine's steps and the weights behind them with those of the unmodified model.

    Args:
        engine: Of the optimizer ``SGD``; it is closed at the end.
        sch: The schedule of the engine.
        reference: The unmodified model, in training mode.
        batches: For each step what this rank gives, and what all give.
        atol: Absolute tolerance of the weights.
    """
    optimizer = SGD(reference.parameters())
    for given, whole in batches:
        expected = reference(**whole).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(engine.train_batch(**given)) == pytest.approx(expected.item(), abs=1e-5)
    weights = dict(reference.named_parameters(remove_duplicate=False))
    for name, value in sch.full_state().items():
        torch.testing.assert_close(value, weights[name].detach(), atol=atol, rtol=1e-4)
    engine.close()
