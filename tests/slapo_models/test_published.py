"""Models of published sizes have the published number of parameters, and are scheduled on 8 ranks without weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from slapo_core import UnknownNameError
from slapo_models import apply_schedule, published_model, published_sizes
from slapo_plan import estimate, fake_ranks

SIZES = published_sizes()
FAST = ("gpt-oss-20b", "llama-3-8b", "llama-4-maverick", "phi-4", "qwen3-32b")
PARTLY_WHOLE = {
    "clip-vit-large": 1.0,
    "falcon-7b": 0.5,
    "gemma-3-1b": 0.3,
    "gpt2": 1.0,
    "gpt2-xl": 1.0,
    "qwen2-7b": 0.3,
    "qwen2-57b-a14b": 0.15,
    "vit-base": 1.0,
    "vit-large": 0.2,
    "whisper-large-v3": 1.0,
}
"""Largest share of the parameters on one of 8 ranks; those with fewer heads than ranks keep their attention whole."""


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Return inputs of one row without data."""
    size = SIZES[name]
    ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
    if size.model_type == "whisper":
        return {"input_features": torch.zeros(1, 128, 3000, device="meta"), "decoder_input_ids": ids}
    images = {"pixel_values": torch.zeros(1, 3, 224, 224, device="meta")}
    return {"vit": images, "clip": {"input_ids": ids, **images}}.get(size.model_type, {"input_ids": ids})


@pytest.fixture
def eight_ranks() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (1, 1, 8), mesh_dim_names=("pp", "dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in SIZES])
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    found = sum(parameter.numel() for parameter in published_model(name).parameters())
    assert abs(found - SIZES[name].parameters) <= (0.005 * found if SIZES[name].rounded else 0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("llama-4-maverick", "qwen3-32b")))
        for name in SIZES
        if name != "llava-1.5-7b"  # its forward counts the image tokens of the batch
    ],
)
def test_it_is_scheduled_on_eight_ranks(name: str, eight_ranks: Any) -> None:
    model = published_model(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    apply_schedule(model, mesh=eight_ranks, example_inputs=batch_of(name), checkpoint=1.0)
    own = sum(parameter.numel() for parameter in model.parameters())
    assert own <= PARTLY_WHOLE.get(name, 0.127) * total


def training_batch(name: str) -> dict[str, Any]:
    """Return inputs of one row with labels: 2,048 tokens, or as many as the model takes."""
    size = SIZES[name]
    longest = size.config.get("n_positions") or size.config.get("max_position_embeddings") or 2048
    ids = torch.zeros(1, min(2048, longest), dtype=torch.long)
    images = torch.zeros(1, 3, 224, 224)
    if size.model_type == "whisper":
        ids = ids[:, :448]
        return {"input_features": torch.zeros(1, 128, 3000), "decoder_input_ids": ids, "labels": ids}
    if size.model_type == "vit":
        return {"pixel_values": images, "labels": torch.zeros(1, dtype=torch.long)}
    if size.model_type == "clip":
        return {"input_ids": ids.repeat(4, 1)[:, :77], "pixel_values": images.repeat(4, 1, 1, 1), "return_loss": True}
    if size.model_type == "llava":
        ids[:, 5 : 5 + 576] = size.config["image_token_index"]
        return {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 336, 336)}
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SIZES)
def test_a_step_is_estimated_on_eight_ranks(name: str) -> None:
    batch = training_batch(name)
    with fake_ranks(tp=8) as mesh:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        sch = apply_schedule(published_model(name), mesh=mesh, example_inputs=inputs, checkpoint=1.0)
        found = estimate(sch, batch, precision="bf16", hardware="h100")
    assert not found.problems
    own = sum(parameter.nbytes for parameter in sch.mod.parameters())
    assert found.ranks[0].memory.kinds["parameters"] == pytest.approx(own, rel=1e-3)
    assert found.peak >= 3 * own  # AdamW has two numbers for each parameter
    assert found.step_seconds is not None
    assert found.step_seconds > 0


def test_other_sizes_and_unknown_ones() -> None:
    model = published_model("llama-3-8b", num_hidden_layers=1)
    assert len(model.model.layers) == 1
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(UnknownNameError, match="no published size 'llama-3-80b'; did you mean 'llama-3-8b'"):
        published_model("llama-3-80b")
