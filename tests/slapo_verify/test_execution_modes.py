"""No false alarms: compiled, fused, by kernels, with checkpoints, alone and on up to four ranks, and along the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import create_schedule, set_random_seed
from slapo_verify import Report, run_as_threads, verify
from tests.slapo.primitives.test_fused_families import NAMES, WAYS, model_and_batch

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),  # torch's compiler does
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),  # in Mixtral's experts
]

DTYPES = (torch.float32, torch.bfloat16)
LENGTH_ODD = {"vit"}
"""Those whose sequence is not split over two ranks."""
UNEVEN = {("t5", "together")}
"""Compiled by torch in other ways in a backward than in the forward before, where ranks are threads; torch says so."""


def verify_in_mode(name: str, way: str | None, tp: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Report:
    """Report of ``verify`` for a step in evaluation mode; tensor-parallel ranks run as threads."""

    def work() -> Report:
        set_random_seed(0, tp_rank=dist.get_rank() if tp > 1 else 0)
        reference, batch = model_and_batch(name)
        reference.to(dtype).eval()
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        mesh = init_device_mesh("cpu", (1, 1, tp), mesh_dim_names=("pp", "dp", "tp")) if tp > 1 else None
        sch: Any = create_schedule(copy.deepcopy(reference), mesh=mesh, example_inputs=batch)
        if tp > 1:
            sch.tensor_parallel(**options)
        assert way is None or WAYS[way](sch)
        return verify(reference, sch, level="step")

    first, *others = run_as_threads(work, tp) if tp > 1 else [work()]
    assert others == [first] * (tp - 1)
    assert first.compared["updates"] > 10
    return first.check()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_alone(name: str, way: str) -> None:
    for dtype in DTYPES:
        verify_in_mode(name, way, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] * ((name, way) != ("llama", "fused")))
        for name in NAMES
        for way in WAYS
        if (name, way) not in UNEVEN
    ],
)
def test_on_two_ranks(name: str, way: str) -> None:
    verify_in_mode(name, way, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, "recomputed"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LENGTH_ODD])
def test_along_the_sequence(name: str, way: str | None) -> None:
    for dtype in DTYPES:
        verify_in_mode(name, way, tp=2, dtype=dtype, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_on_four_ranks(name: str, along: bool) -> None:
    verify_in_mode(name, None, tp=4, sequence_parallel=along and name not in LENGTH_ODD)
