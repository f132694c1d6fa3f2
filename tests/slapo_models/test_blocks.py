"""The repeated blocks of any model, and the options that act on them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from slapo_core import ScheduleError, create_schedule
from slapo_models import Configuration, apply_schedule
from slapo_models.shared_steps.blocks import block_lists
from tests.slapo_models.family_models import Block, NanoGPT, family_model
from tests.zoo.families import FAMILIES


def found(model: nn.Module, **options: Any) -> list[list[str]]:
    sch = create_schedule(model)
    return [[block.path for block in each] for each in block_lists(sch, Configuration.read(sch, "auto", options))]


def test_lists_of_equal_blocks() -> None:
    assert found(NanoGPT()) == [[f"transformer.h.{index}" for index in range(4)]]
    assert found(nn.Sequential(*(Block(8, 2) for _ in range(3)))) == [["0", "1", "2"]]
    assert found(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == []


def test_stages_of_other_widths_are_looked_into_and_lists_of_heads_left_out() -> None:
    stages = nn.ModuleList(nn.Sequential(*(Block(width, 2) for _ in range(3))) for width in (8, 16))
    heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))
    model = nn.ModuleDict({"stages": stages, "heads": heads})
    assert found(model) == [[f"stages.{stage}.{index}" for index in range(3)] for stage in range(2)]
    assert found(model, prefix="stages.1") == [[f"stages.1.{index}" for index in range(3)]]


def test_blocks_that_are_attributes() -> None:
    model = nn.Module()
    for name in ("first", "second"):
        setattr(model, name, Block(8, 2))
    assert found(model) == [["first", "second"]]


@pytest.mark.parametrize(("name", "lists"), [("llava", 2), ("whisper", 2), ("clip", 2), ("t5", 2), ("deepseek_v3", 1)])
def test_lists_of_transformers(name: str, lists: int) -> None:
    assert len(found(family_model(name)[0])) == lists


def checkpointed(model: nn.Module, **config: Any) -> list[str]:
    return [step.path for step in apply_schedule(model, **config).journal if "checkpoint(" in str(step)]


def test_checkpoint_takes_a_share_numbers_paths_or_a_policy() -> None:
    assert checkpointed(NanoGPT(), checkpoint=0.5) == ["transformer.h.1", "transformer.h.3"]
    assert checkpointed(NanoGPT(), checkpoint=[0, "transformer.h.2*"]) == ["transformer.h.0", "transformer.h.2"]
    sch = apply_schedule(NanoGPT(), checkpoint="matmuls", ckpt_ratio=0.25)
    assert [str(step) for step in sch.journal] == ["sch['transformer.h.3'].checkpoint(policy='matmuls')"]


def test_the_schedule_of_a_family_is_taken_by_its_type() -> None:
    assert checkpointed(FAMILIES["gpt2"].model(), checkpoint=[1]) == ["transformer.h.1"]
    with pytest.raises(ScheduleError, match=r"apply_schedule\('gpt2'\): checkpoint has 2; give numbers of blocks from 0 to 1"):
        apply_schedule(FAMILIES["gpt2"].model(), checkpoint=[2])


def test_stages() -> None:
    model, batch = family_model("nanogpt")
    sch = apply_schedule(model, example_inputs=batch, pipeline_stages=["transformer.h.0", "transformer.h.2"])
    assert sum("cut_pipeline_stage" in str(each) for step in sch.journal for each in step.children) == 2
    model, batch = family_model("nanogpt")
    sch = apply_schedule(model, example_inputs=batch, pipeline_stages=2)
    assert [str(step).partition(".")[2] for step in sch.journal] == ["pipeline(2)"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"checkpoint": True}, "checkpoint is True; give a share of the blocks, a list of blocks, or a policy"),
        ({"checkpoint": 1.5}, "checkpoint is 1.5; give a share of the blocks from 0 to 1"),
        ({"checkpoint": 0.5, "ckpt_ratio": 0.5}, "checkpoint=0.5 says what is recomputed already; leave ckpt_ratio out"),
        ({"checkpoint": [None]}, "checkpoint has None; give numbers of blocks from 0 to 3, or paths"),
        ({"pipeline_stages": 0}, "pipeline_stages is 0; give the number of stages, or paths at which they end"),
        ({"pipeline_stages": 2, "pipeline_cuts": [0]}, "pipeline_stages and pipeline_cuts are both given"),
        ({"sequence_parallel": True, "tensor_parallel": False}, "sequence_parallel=True needs tensor_parallel"),
        ({"prefix": "model"}, "there is no module at prefix 'model'"),
    ],
)
def test_what_contradicts_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(")):
        apply_schedule(NanoGPT(), **config)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ScheduleError, match="no list of repeated blocks is found in the Linear; give checkpoint= a list of"):
        apply_schedule(nn.Linear(2, 2), checkpoint=1.0)
