"""No false alarms: real models under schedules that are right, in single and half precision, alone and on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from slapo_core import create_schedule, set_random_seed
from slapo_testing import run_distributed
from slapo_verify import Report, run_as_threads, verify
from tests.zoo.families import FAMILIES, layers

NAMES = ("gpt2", "bert", "opt", "t5", "llama", "qwen3", "gemma3_text", "mixtral", "vit")


def verify_family(rank: int, name: str, dtype: torch.dtype, level: str) -> Report:
    set_random_seed(0, tp_rank=rank)
    family = FAMILIES[name]
    reference, batch = family.model().to(dtype), family.batch()
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=batch)
    if torch.distributed.is_initialized():
        sch.tensor_parallel()
    for path in sorted({path.rpartition(".")[0] for path in layers(sch.mod)}):
        sch[path].checkpoint()
    sch.use_kernels(force={"*": "eager"})
    return verify(reference, sch, level=level)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_alone(name: str, dtype: torch.dtype) -> None:
    report = verify_family(0, name, dtype, "step").check()
    assert report.compared["updates"] == report.compared["weights"] > 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "llama"))) for name in NAMES]
)
def test_on_two_ranks(name: str, dtype: torch.dtype) -> None:
    one, other = run_distributed(verify_family, 2, name, dtype, "step", timeout=100)
    assert one.check() == other
    assert one.largest is not None


def with_kernels_first() -> Report:
    set_random_seed(0, tp_rank=torch.distributed.get_rank())
    family = FAMILIES["ctrl"]
    reference, batch = family.model().to(torch.bfloat16), family.batch()
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=batch)
    sch.tensor_parallel()
    sch.use_kernels(force={"*": "eager"})
    return verify(reference, sch, level="step")


def test_signs_that_turn_in_half_precision_are_looked_at_in_float32() -> None:
    one, other = run_as_threads(with_kernels_first, 2)
    assert one.check() == other
    assert "2 of the tensors are further apart than rounding brings most, and the same in float32" in one.notes


def test_gradients_that_are_0_in_truth_are_compared_as_far_as_the_unmodified_model_rounds_them() -> None:
    torch.manual_seed(0)
    reference, batch = FAMILIES["clip"].model(), FAMILIES["clip"].batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :3] = 0
    sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=batch)
    sch.use_kernels(force={"*": "eager"})
    verify(reference, sch, level="grads").check()
    layer = sch.mod.get_submodule("text_model.encoder.layers.0.self_attn.q_proj")
    layer.register_forward_hook(lambda module, args, output: output * 1.01)  # next to it, and no rounding
    assert not verify(reference, sch, level="grads").ok
