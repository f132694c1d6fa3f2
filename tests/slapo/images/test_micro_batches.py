"""Vision-language models in micro-batches: rows with none, one or two images, of other numbers in each batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule
from slapo_sharding.planning.derivation.flat_graphs import recorded_captures
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told

from ..image_models import IMAGES, SGD, TRAINED, assert_trains_alike, batch_of, joined

pytestmark = pytest.mark.multiproc


def train(rank: int, kind: str, target: str, layout: dict[str, int], options: dict[str, Any]) -> None:
    """Compare losses and weights with the unmodified model's; the first step's checks cut and join the rows, too."""
    model = TRAINED[kind]()
    reference = copy.deepcopy(model).train()
    dp, tp = layout.get("dp", 1), layout.get("tp", 1)
    mesh = init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(model, mesh=mesh)
    if tp > 1:
        sch.tensor_parallel()
    batches = []
    for seed, images in enumerate(IMAGES):
        rows = len(images) // dp
        shares = [batch_of(kind, images[rows * each : rows * (each + 1)], 2 * seed + each) for each in range(dp)]
        batches.append((shares[mesh["dp"].get_local_rank()], joined(shares)))
    assert_trains_alike(build(sch, target, optimizer=SGD, **options), sch, reference, batches)


ENGINES = ("torch", "deepspeed", "megatron")
TWO = {"microbatches": 2}
COUNTED = {**TWO, "batch_dims": {"pixel_values": "image_grid_thw"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "target", "layout", "options"),
    [
        ("llava", "torch", {}, TWO),
        ("qwen", "torch", {"dp": 2}, {}),
        ("smol", "torch", {"dp": 2}, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("qwen", "torch", {}, TWO),
                ("qwen", "torch", {}, COUNTED),
                ("qwen", "torch", {"tp": 2}, TWO),
                ("llava", "torch", {"dp": 2}, TWO),
                *((kind, "torch", {}, TWO) for kind in ("gemma", "smol", "pali", "intern")),
                *((kind, target, {"dp": 2}, {}) for kind in ("gemma", "smol", "pali", "intern") for target in ENGINES),
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


def adapted(rank: int) -> None:
    """Compare losses and weights where no published plan is followed, and look at what a rank has of the language part."""
    from peft import LoraConfig, get_peft_model

    projections = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = get_peft_model(TRAINED["llava"](), LoraConfig(r=4, target_modules=projections, init_lora_weights=False))
    text = model.get_submodule("base_model.model.model.language_model")
    whole, reference = sum(each.numel() for each in text.parameters()), copy.deepcopy(model).train()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sch = create_schedule(model, mesh=mesh, example_inputs=batch_of("llava", IMAGES[0], 9))
    with warnings_told() as told:
        sch.tensor_parallel()
    assert not [each for each in told if "self_attn stays whole" in each]
    assert sum(each.numel() for each in text.parameters()) < 0.6 * whole
    batches = [batch_of("llava", images, seed) for seed, images in enumerate(IMAGES[:2])]
    assert_trains_alike(build(sch, "torch", optimizer=SGD), sch, reference, zip(batches, batches, strict=True))


def test_hooks_of_a_first_call_are_not_put_on_twice() -> None:
    """A layer whose hidden states count twice is not the one that Llava asks for."""
    model = TRAINED["llava"]()
    model(**batch_of("llava", IMAGES[0], 0))
    layer = model.get_submodule("model.vision_tower.encoder.layers.0")
    hooks = dict(layer._forward_hooks)
    with recorded_captures(model):
        assert dict(layer._forward_hooks) == hooks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_the_language_part() -> None:
    run_distributed(adapted, 2, timeout=200)


VISION = dict.fromkeys(("gemma", "pali", "llava", "intern"), "model.vision_tower") | {"smol": "model.vision_model"}


def split(rank: int, kind: str) -> None:
    """Compare losses and weights, and look at what a rank has of the vision part."""
    model = TRAINED[kind]()
    if kind == "intern":  # Transformers puts hooks on its layers in the first call
        model(**batch_of(kind, IMAGES[0], 9))
    vision = model.get_submodule(VISION[kind])
    whole, reference = sum(each.numel() for each in vision.parameters()), copy.deepcopy(model).train()
    sch = create_schedule(
        model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), example_inputs=batch_of(kind, IMAGES[0], 9)
    )
    sch.tensor_parallel()
    assert sum(each.numel() for each in vision.parameters()) < 0.7 * whole
    batches = [batch_of(kind, images, seed) for seed, images in enumerate(IMAGES[:2])]
    engine = build(sch, "torch", optimizer=SGD)
    assert_trains_alike(engine, sch, reference, zip(batches, batches, strict=True), atol=3e-5)


@pytest.mark.parametrize(
    "kind", ["intern", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llava", "gemma", "pali", "smol"))]
)
def test_tensor_parallel_splits_the_vision_part(kind: str) -> None:
    run_distributed(split, 2, kind, timeout=100)
