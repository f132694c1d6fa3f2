"""Vision-language models in pipeline stages: other numbers of images in each batch and micro-batch, some without any."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import BuildError, ScheduleError, build, build_program, create_schedule
from slapo_testing import run_distributed
from tests.slapo_pipeline.stage_comparison import assert_same, cut, expected_of, loss_of

from ..image_models import IMAGES, MODELS, SGD, assert_trains_alike, batch_of

CUTS = {**dict.fromkeys(MODELS, "model.language_model.layers.0"), "smol": "model.text_model.layers.0"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_for_other_images(kind: str) -> None:
    """The language part is cut; the vision part is in the first stage."""
    model = MODELS[kind]().train()
    program = build_program(cut(model, batch_of(kind, IMAGES[0], 0), CUTS[kind]))
    for seed, images in enumerate([IMAGES[0], IMAGES[0], IMAGES[1], [0, 1, 2, 1], [0, 0, 0, 0]]):
        batch = batch_of(kind, images, seed)
        expected = expected_of(model, batch)
        found = program(**batch)
        assert_same(found, expected.outputs, "outputs", 1e-5)
        loss_of(found).backward()
        assert_same({name: each.grad for name, each in model.named_parameters()}, expected.gradients, "gradients", 1e-5)
        model.zero_grad()


def test_a_batch_that_the_model_refuses_is_refused_by_its_stages() -> None:
    model = MODELS["llava"]()
    batch = batch_of("llava", IMAGES[0], 0)
    program = build_program(cut(model, batch, CUTS["llava"]))
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, -1] = model.config.image_token_id
    with pytest.raises(Exception, match="Image features and image tokens do not match"):
        program(**batch)


def test_text_alone_is_refused_behind_a_cut_in_the_vision_part() -> None:
    model = MODELS["llava"]()
    program = build_program(cut(model, batch_of("llava", IMAGES[0], 0), "model.vision_tower.encoder.layers.0"))
    with pytest.raises(ScheduleError, match="or on a micro-batch, as text alone runs no vision part; cut behind a module"):
        program(**batch_of("llava", [0, 0, 0, 0], 0))


def test_pipeline_keeps_the_vision_part_whole() -> None:
    batch = batch_of("qwen", IMAGES[0], 0)
    for options in ({"leaf_modules": "model.visual"}, {"leaf_modules": ["Qwen2VisionTransformerPretrainedModel"]}):
        sch = create_schedule(MODELS["qwen"](), example_inputs=batch)
        sch.pipeline(2, **options)
        assert sch.metadata.primitives["pipeline"].cuts[0].startswith("model.language_model.layers.")
    with pytest.raises(ScheduleError, match=r"leaf_modules: 'visual' is neither a class nor the path"):
        create_schedule(MODELS["qwen"](), example_inputs=batch).pipeline(2, leaf_modules="visual")


def train(rank: int, kind: str, target: str, layout: tuple[int, int], options: dict[str, Any]) -> None:
    model = MODELS[kind]()
    reference = copy.deepcopy(model).train()
    pp, tp = layout
    mesh = init_device_mesh("cpu", (pp, 1, tp), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh, example_inputs=batch_of(kind, IMAGES[0], 0))
    if tp > 1:
        sch.tensor_parallel()
    sch[CUTS[kind]].cut_pipeline_stage()
    batches = [batch_of(kind, images, seed) for seed, images in enumerate(IMAGES)]
    assert_trains_alike(build(sch, target, optimizer=SGD, **options), sch, reference, zip(batches, batches, strict=True))


def train_each(rank: int, cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        train(rank, *case)


ONE, TWO = {"microbatches": 1, "pipeline_schedule": "gpipe"}, {"microbatches": 2}
COUNTED = {**TWO, "batch_dims": {"pixel_values": "image_grid_thw"}}
CASES = [
    pytest.param(2, [("llava", "torch", (2, 1), TWO), ("qwen", "torch", (2, 1), COUNTED)], id="two"),
    *(
        pytest.param(2, [(kind, "torch", (2, 1), options) for options in (ONE, TWO)], id=kind, marks=pytest.mark.slow)
        for kind in MODELS
    ),
    *(
        pytest.param(2, [("llava", target, (2, 1), {"microbatches": 1}), ("qwen", target, (2, 1), TWO)], id=target, marks=slow)
        for slow in [pytest.mark.slow]
        for target in ("deepspeed", "megatron")
    ),
    pytest.param(4, [("llava", "torch", (2, 2), TWO), ("qwen", "torch", (2, 2), TWO)], id="tp", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_losses_and_weights_for_other_images(ranks: int, cases: list[tuple[Any, ...]]) -> None:
    run_distributed(train_each, ranks, cases, timeout=200)


def refused(rank: int, target: str) -> None:
    with pytest.raises(BuildError, match=r"stage 1 receives .* in micro-batch 1, .*give each as many images"):
        train(rank, "llava", target, (2, 1), TWO)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_an_engine_that_sends_the_same_for_all_micro_batches_says_so(target: str) -> None:
    run_distributed(refused, 2, target, timeout=100)
