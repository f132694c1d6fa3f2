"""Search over layouts of a small GPT-2 on devices with little memory."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_core import SlapoError, UnknownNameError, create_schedule, load_schedule
from slapo_plan import Hardware, Plan, fake_ranks, plan

MIB = 2**20
BATCH = {name: torch.zeros(1, 64, dtype=torch.long) for name in ("input_ids", "labels")}


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_layer": 6, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, bos_token_id=1, eos_token_id=2))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Numbered(nn.Module):
    """Reads the output of a block by its number, so that none can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x := layer(x) for layer in self.layers]
        return (outputs[6] + outputs[-1]).square().mean()


class Cells(nn.Module):
    """Writes what it computes into a tensor that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros(x.shape[0], 3, 32)
        state = torch.zeros(x.shape[0], 32)
        for step in range(3):
            state = self.cell(x, state)
            outputs[:, step] = state
        return outputs.square().mean()


def small_devices(mebibytes: float) -> Hardware:
    return replace(Hardware.load("h100"), usable_bytes=int(mebibytes * MIB))


FEW = {"tp": [1, 2], "pipeline_schedule": "1f1b", "sequence_parallel": False}


@cache
def planned() -> Plan:
    return plan(gpt2(), BATCH, ranks=4, global_batch=16, hardware=small_devices(18), constraints=FEW, check=1)


def test_candidates_are_sorted_and_fit() -> None:
    found = [*planned()]
    assert len(found) > 10
    checked = [each.is_estimated for each in found].index(False)
    assert checked >= 1
    for part in (found[:checked], found[checked:]):
        assert [each.step_seconds for each in part] == sorted(each.step_seconds for each in part)
    assert all(each.peak <= 18 * MIB for each in found)
    assert all(each.layout.tp * each.layout.pp * each.layout.dp == 4 for each in found)
    assert all(each.layout.dp * each.layout.rows * each.layout.microbatches == 16 for each in found)


def test_the_estimate_of_the_best_schedule_fits() -> None:
    exact = planned().estimate()
    assert not exact.problems
    assert exact.peak <= 18 * MIB


def test_the_model_computes_the_same_in_every_layout() -> None:
    assert {each.flops for each in planned()} == {planned().estimate().model_flops}


@pytest.mark.parametrize("index", [0, 5, 10])
def test_predicted_memory_is_near_the_estimate(index: int) -> None:
    candidate = [*planned()][index]
    assert candidate.peak == pytest.approx(planned().estimate(candidate).peak, rel=0.2)


def test_less_memory_means_more_recomputation() -> None:
    wanted = {"tp": 1, "pp": 1, "rows": 4, "data_parallel": "ddp"}
    counts = []
    for mebibytes in (100, 14, 11):
        found = plan(gpt2(), BATCH, ranks=4, global_batch=16, hardware=small_devices(mebibytes), constraints=wanted, check=0)
        counts.append(sum(each.num_checkpointed for each in found.best.stages))
    assert counts[0] == 0 < counts[1] < counts[2]


@pytest.mark.parametrize("make", [Numbered, Cells])
def test_unusual_models_are_planned(make: type[nn.Module]) -> None:
    found = plan(make(), {"x": torch.zeros(1, 32)}, ranks=2, global_batch=8, hardware="h100", constraints={"tp": 1, "pp": 1})
    assert found.best.is_estimated
    assert found.best.layout.dp == 2


class Uncalled(nn.Module):
    """Runs what its lists hold by a loop of its own; no block is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(32, 32)}) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["inner"](x).relu()
        return x.square().mean()


def test_lists_whose_modules_are_not_called_are_no_blocks_to_cut_between() -> None:
    found = plan(
        Uncalled(), {"x": torch.zeros(1, 32)}, ranks=2, global_batch=4, hardware="h100", constraints={"tp": 1}, check=0
    )
    assert {each.layout.dp for each in found} == {2}
    (rejected,) = found.rejected
    assert str(rejected) == "tp=1 pp=2: the model has 0 blocks to cut between"


@pytest.mark.parametrize("numbers", [{"ranks": 0, "global_batch": 4}, {"ranks": 1, "global_batch": -2}])
def test_numbers_that_are_not_positive_are_one_sentence(numbers: dict[str, int]) -> None:
    with pytest.raises(SlapoError, match="^plan: (ranks is 0|global_batch is -2); give a whole number from 1 on$"):
        plan(gpt2(), BATCH, **numbers)


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    found = plan(gpt2(), BATCH, ranks=1, global_batch=4, hardware=small_devices(1), check=0)
    with pytest.raises(
        SlapoError, match=r"no layout fits h100: .* needs [0-9.]+ MiB of [0-9.]+ MiB with all of its 6 blocks recomputed"
    ):
        _ = found.best


def test_what_stays_whole_is_noted() -> None:
    found = plan(gpt2(), BATCH, ranks=8, global_batch=8, hardware="h100", constraints={"tp": 8, "rows": 8}, check=0)
    assert any("tp=8: tensor_parallel: transformer.h.0.attn.c_attn stays whole" in note for note in found.notes)


@pytest.mark.parametrize(
    ("constraints", "error", "words"),
    [
        ({"tp": 3}, SlapoError, "tp=3 does not divide 4 ranks; these do: 1, 2, 4"),
        ({"ep": 2}, UnknownNameError, "no constraint 'ep'"),
    ],
)
def test_bad_constraints_are_refused(constraints: dict[str, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(gpt2(), BATCH, ranks=4, global_batch=16, hardware="h100", constraints=constraints)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": len}, "the model is a builtin_function_or_method; give an nn.Module"),
        ({"model": nn.Linear}, "the model is Linear; give an nn.Module"),
        ({"model": create_schedule(nn.Linear(2, 2))}, "slapo.estimate takes a schedule"),
        ({"batch": torch.zeros(1, 8)}, "the batch is a Tensor; give the arguments of the forward by name"),
        ({"batch": {"input_ids": torch.zeros(0, 8)}}, "the batch has no tensor with rows"),
        ({"hardware": None}, "hardware is a NoneType; give a name"),
        ({"check": -1}, "check is -1; give a whole number from 0 on"),
        ({"check": "1"}, "check is '1'; give a whole number"),
        ({"microbatches": 2}, "microbatches is chosen by the plan; give constraints={'microbatches': 2}"),
        ({"data_parallel": "fsdp"}, "data_parallel is chosen by the plan; give constraints={'data_parallel': 'fsdp'}"),
        ({"constraints": {"tp": 2, "dp": 4}}, "no layout of 4 ranks and a global batch of 16 rows has tp=2, dp=4"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_kind_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"ranks": 4, "global_batch": 16, "hardware": "h100", "batch": BATCH, **arguments}
    with pytest.raises(SlapoError, match=re.escape(words)):
        plan(given.pop("model", None) or gpt2(), given.pop("batch"), **given)


def test_a_mesh_of_another_number_of_ranks_is_refused() -> None:
    found = plan(gpt2(), BATCH, ranks=2, global_batch=4, hardware="h100", constraints={"tp": 1, "pp": 1}, check=0)
    with pytest.raises(SlapoError, match="has 2 ranks, and this job has 1; start 2"):
        found.mesh()


def test_where_nothing_fits_the_best_is_the_sentence_on_the_nearest_layout() -> None:
    found = plan(gpt2(), BATCH, ranks=2, global_batch=4, hardware=small_devices(1), check=0)
    with pytest.raises(SlapoError, match="the nearest is ") as error:
        _ = found.best
    assert str(min(found.rejected, key=lambda each: each.missing or 2**60)) in str(error.value)


def test_a_batch_that_replicas_do_not_divide_names_the_nearest() -> None:
    found = plan(gpt2(), BATCH, ranks=4, global_batch=6, hardware="h100", constraints={"tp": 1, "pp": 1}, check=0)
    assert str(found.rejected[0]).endswith("a global batch of 6 rows is not divisible by 4 replicas; 8 is the nearest")


@pytest.mark.slow
def test_a_saved_schedule_takes_the_same_steps(tmp_path) -> None:
    wanted = {"tp": 2, "pp": 2, "pipeline_schedule": "1f1b"}
    found = plan(
        gpt2(),
        BATCH,
        ranks=4,
        global_batch=16,
        hardware=small_devices(18),
        constraints=wanted,
        check=0,
    )
    found.best.save(tmp_path / "schedule.py")
    journals = []
    for load in (True, False):
        with fake_ranks(pp=2, tp=2) as mesh:
            inputs = {name: value.repeat(found.best.layout.rows, 1) for name, value in BATCH.items()}
            if load:
                sch = load_schedule(gpt2(), tmp_path / "schedule.py", mesh=mesh, example_inputs=inputs)
            else:
                sch = found.best.apply(create_schedule(gpt2(), mesh=mesh, example_inputs=inputs))
            journals.append([str(step) for step in sch.journal])
    assert journals[0] == journals[1]
    assert len(journals[0]) > 1
