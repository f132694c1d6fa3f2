"""Estimates in seconds on a cluster."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_core import UnknownNameError, create_schedule
from slapo_plan import Estimate, Hardware, estimate, fake_ranks
from slapo_report import plan_page


@cache
def estimated(pp: int = 1, dp: int = 1, microbatches: int = 4, checkpointed: bool = False) -> Estimate:
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    with fake_ranks(pp=pp, dp=dp) as mesh, torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=1, eos_token_id=2))
        ids = torch.zeros(2 * microbatches, 32, dtype=torch.long, device="cpu")
        inputs = {"input_ids": ids[:2], "labels": ids[:2]}
        sch = create_schedule(model, mesh=mesh, example_inputs=inputs)
        for block in sch.select("transformer.h.*") if checkpointed else ():
            block.checkpoint()
        if pp > 1:
            sch.pipeline(pp)
        batch = {"input_ids": ids, "labels": ids}
        return estimate(sch, batch, hardware="h100", microbatches=microbatches, precision="bf16")


def test_four_microbatches_take_about_four_times_as_long_as_one() -> None:
    one, four = (estimated(microbatches=number).time for number in (1, 4))
    assert one is not None
    assert four is not None
    assert four.run.seconds == pytest.approx(4 * one.run.seconds)


def test_the_bubble_of_a_pipeline_is_that_of_1f1b() -> None:
    found = estimated(pp=2)
    assert found.time is not None
    assert found.time.ideal_bubble == pytest.approx(1 / 5, abs=0.12)  # (stages - 1) / (stages - 1 + micro-batches), if equal
    assert found.time.bubble >= found.time.ideal_bubble


def test_recomputation_adds_operations_and_time_but_no_model_operations() -> None:
    plain, recomputed = estimated(), estimated(checkpointed=True)
    assert recomputed.model_flops == plain.model_flops
    assert recomputed.flops > plain.flops
    assert recomputed.step_seconds > plain.step_seconds
    assert recomputed.mfu < plain.mfu


def test_without_hardware_there_are_no_seconds() -> None:
    sch = create_schedule(torch.nn.Linear(4, 4))
    found = estimate(sch, {"input": torch.ones(2, 4)}, loss_fn=lambda outputs, labels: outputs.sum())
    assert (found.step_seconds, found.mfu) == (None, None)
    assert "hardware" not in found.to_dict()


def test_the_data_is_json_and_makes_a_page() -> None:
    data = estimated(pp=2, dp=2).to_dict()
    assert json.loads(json.dumps(data))["hardware"]["name"] == "h100"
    assert "GPT2LMHeadModel" in plan_page(data)


def test_the_text_says_whether_it_fits() -> None:
    assert "h100: fits" in str(estimated())


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no hardware 'h101'; did you mean 'h100'"):
        Hardware.load("h101")
