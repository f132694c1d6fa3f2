"""``use_kernels`` before and after ``tensor_parallel``."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from slapo_core import ScheduleError, create_schedule, set_random_seed
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, counted_kernels
from tests.zoo.families import FAMILIES

FAST = ("gpt2", "llama")
SLOW = ("bert", "t5", "qwen3", "gemma", "phi3", "mixtral", "opt", "vit")
EACH = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def split(rank: int, name: str, sequence: bool = False) -> list[Counter[str]]:
    """Return the kernels of a correct two-rank model, with ``use_kernels`` as the first and as the last step."""
    family, ran = FAMILIES[name], []
    batch = {**family.batch(), **({} if name in ("bert", "vit") else {"use_cache": False})}
    with counted_kernels() as counted:
        for kernels_first in (True, False):
            model = family.model()
            before = copy.deepcopy(model)
            schedule = create_schedule(model, example_inputs=batch, plugins=counted.plugins)
            for kernels in (kernels_first, not kernels_first):
                if kernels:
                    schedule.use_kernels(force=COUNTED)
                else:
                    schedule.tensor_parallel(sequence_parallel=sequence)
            counted.calls.clear()
            assert_equivalent(before, model, **batch, atol=1e-4, rtol=1e-3)
            ran.append(counted.calls.copy())
    return ran


@pytest.mark.sampled(1)
@pytest.mark.multiproc
@pytest.mark.parametrize("name", EACH)
def test_tensor_parallel_before_and_after(name: str) -> None:
    first, later = run_distributed(split, 2, name, timeout=100)[0]
    assert first == later
    assert len(first) >= 2 or name == "opt"


def dropped(rank: int, name: str, kernels_first: bool) -> tuple[float, bool]:
    """How far outputs in training are from those of the split model without kernels, for the same seed; whether some ran."""
    family = FAMILIES[name]
    batch = {**family.batch(), **({} if name == "bert" else {"use_cache": False})}
    outputs = []
    with counted_kernels() as counted:
        for kernels in (None, kernels_first):
            schedule = create_schedule(family.model(dropout=0.2), example_inputs=batch, plugins=counted.plugins)
            if kernels:
                schedule.use_kernels(force=COUNTED)
            schedule.tensor_parallel()
            if kernels is False:
                schedule.use_kernels(force=COUNTED)
            set_random_seed(3, tp_rank=rank)
            outputs.append(schedule.mod(**batch).logits.detach())
        return torch.dist(*outputs).item(), bool(counted.calls)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("kernels_first", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_of_a_split_model(name: str, kernels_first: bool) -> None:
    for distance, ran in run_distributed(dropped, 2, name, kernels_first, timeout=100):
        assert distance < 1e-4
        assert ran


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_along_the_sequence(name: str) -> None:
    first, later = run_distributed(split, 2, name, True, timeout=100)[0]
    assert first == later


def head(rank: int) -> str:
    schedule = create_schedule(FAMILIES["llama"].model(), example_inputs=FAMILIES["llama"].batch())
    schedule.tensor_parallel()
    with pytest.raises(ScheduleError) as caught:
        schedule.use_kernels("linear_cross_entropy")
    return str(caught.value)


@pytest.mark.multiproc
def test_a_split_head_has_another_way_to_its_loss() -> None:
    message = "use_kernels(''): 'lm_head' is sharded; tensor_parallel(parallel_loss=True) makes losses of its parts"
    assert run_distributed(head, 2) == [message] * 2
