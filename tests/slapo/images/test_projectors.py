"""Only the projector of a vision-language model trained: micro-batches and replicas of text alone have no gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import BuildError, build, create_schedule
from slapo_testing import run_distributed

from ..image_models import IMAGE, IMAGES, SGD, Batch, assert_trains_alike, batch_of, joined, llava

CUT, VISION_CUT = "model.language_model.layers.0", "model.vision_tower.encoder.layers.0"
SEVERAL = ([1, 2, 2, 2], [2, 2, 1, 1], [1, 1, 1, 2])
"""Images of rows that all have some; replicas have different numbers."""


def projecting() -> nn.Module:
    model = llava()
    model.requires_grad_(False).get_submodule("model.multi_modal_projector").requires_grad_(True)
    return model


def without_image_labels(images: list[int], seed: int) -> Batch:
    """Return a batch in which rows have different numbers of labels."""
    batch = batch_of("llava", images, seed)
    return {**batch, "labels": batch["labels"].masked_fill(batch["input_ids"] == IMAGE, -100)}


def train(rank: int, model: nn.Module, layout: tuple[int, int, int], cut: str, images: Any, options: dict[str, Any]) -> None:
    reference, (pp, dp, tp) = copy.deepcopy(model).train(), layout
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("pp", "dp", "tp")) if pp * dp * tp > 1 else None
    sch = create_schedule(model, mesh=mesh, example_inputs=batch_of("llava", IMAGES[0], 0))
    if tp > 1:
        sch.tensor_parallel()
    if pp > 1:
        sch[cut].cut_pipeline_stage()
    batches, replica = [], mesh["dp"].get_local_rank() if mesh is not None else 0
    for seed, each in enumerate(images):
        rows = len(each) // dp
        shares = [without_image_labels(each[rows * at : rows * (at + 1)], 2 * seed + at) for at in range(dp)]
        batches.append((shares[replica], joined(shares)))
    engine: Any = build(sch, "torch", optimizer=SGD, microbatches=2, **options)
    assert_trains_alike(engine, sch, reference, batches)


def project(rank: int, layout: tuple[int, int, int], options: dict[str, Any]) -> None:
    train(rank, projecting(), layout, CUT, IMAGES, options)


def test_micro_batches_of_text_alone() -> None:
    project(0, (1, 1, 1), {})


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ((1, 2, 1), {"data_parallel": "fsdp"}),
        pytest.param((1, 2, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param((2, 1, 1), {"pipeline_schedule": "zero_bubble"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_text_alone(layout: tuple[int, int, int], options: dict[str, Any]) -> None:
    pp, dp, tp = layout
    run_distributed(project, pp * dp * tp, layout, options, timeout=100)


def test_a_batch_of_text_alone_is_refused() -> None:
    """As the backward of the unmodified model is; the next batch trains."""
    engine: Any = build(create_schedule(projecting()), "torch", optimizer=SGD, microbatches=2)
    with pytest.raises(BuildError, match="the loss has no gradient: nothing that is trained is in it"):
        engine.train_batch(**batch_of("llava", [0, 0, 0, 0], 0))
    assert engine.train_batch(**batch_of("llava", IMAGES[0], 1)) > 0
    assert engine.steps == 1


def cut_in_vision(rank: int) -> None:
    train(rank, llava(), (2, 2, 1), VISION_CUT, SEVERAL, {})


@pytest.mark.slow
@pytest.mark.multiproc
def test_replicas_may_send_other_images_between_their_stages() -> None:
    run_distributed(cut_in_vision, 4, timeout=100)
