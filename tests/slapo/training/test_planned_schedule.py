"""From a folder of Hugging Face's format to a verified training in two commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo.run_data.saved_schedule import other_build_options
from slapo_core import SlapoError

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("launcher_state"), pytest.mark.timeout(300)]


def run(flags: str) -> str:
    result = CliRunner().invoke(create_app(), flags.split())
    assert result.exit_code == 0, f"{result.output}{result.stderr}{result.exception!r}"
    return result.output


def write_model(folder: Path, vocabulary: int = 300) -> Path:
    """Write a small Llama with weights that no seed of a run draws."""
    torch.manual_seed(77)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocabulary, **sizes, num_key_value_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", ["--pp 2 --tp 1", *(pytest.param(f, marks=pytest.mark.slow) for f in ("--tp 2", "--dp 2"))])
def test_a_folder_becomes_a_planned_training(tmp_path: Path, layout: str) -> None:
    folder, file = write_model(tmp_path / "model"), tmp_path / "schedule.py"
    run(f"plan --model {folder} --gpus 2 --seq 16 --global-batch 4 {layout} --save {file}")
    run(f"train --schedule {file} --steps 3 --reference --report {tmp_path / 'report'}")
    found = re.search(r'id="run">(.*?)</script>', (tmp_path / "report" / "report.html").read_text())
    assert found is not None
    record = json.loads(found[1])
    axis, size = layout.split()[0].removeprefix("--"), 2
    assert record["settings"][axis] == size
    assert record["settings"]["batch"] == 4
    assert max(abs(own - other) for own, other in zip(record["losses"], record["reference"], strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("target", "data_parallel", "options"),
    [
        ("deepspeed", "zero1", {"config": {"zero_optimization": {"stage": 1}}}),
        pytest.param("megatron", "distributed_optimizer", {"distributed_optimizer": True}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_for_another_engine_trains_with_its_options(
    tmp_path: Path, target: str, data_parallel: str, options: dict[str, Any]
) -> None:
    file = tmp_path / "planned.py"
    size = "--layers 2 --hidden 32 --heads 2 --seq 16 --gpus 2 --global-batch 4"
    run(f"plan {size} --dp 2 --target {target} --data-parallel {data_parallel} --check 0 --save {file}")
    assert other_build_options(str(file)) == options
    run(f"train --schedule {file} --steps 2 --reference --report {tmp_path / 'report'}")
    found = re.search(r'id="run">(.*?)</script>', (tmp_path / "report" / "report.html").read_text())
    assert found is not None
    assert json.loads(found[1])["settings"]["target"] == target


@pytest.mark.slow
def test_a_planned_schedule_is_verified(tmp_path: Path) -> None:
    file = tmp_path / "schedule.py"
    run(f"plan --layers 2 --hidden 32 --heads 2 --seq 16 --gpus 2 --global-batch 4 --dp 2 --save {file}")
    assert run(f"verify --schedule {file}")  # its exit status is 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--model {0}/small", "its vocabulary has 200 entries, and tokens are bytes; use a model with 256 or more"),
        ("--model {0}", "no config.json there"),
        ("--model {0}/model --seq 65", "has 64 positions; use at most 64"),
        ("--model {0}/model --layers 3", "--layers 3: the model in {0}/model has 2; leave the flag out"),
    ],
)
def test_a_folder_that_cannot_work_is_one_sentence(tmp_path: Path, flags: str, sentence: str) -> None:
    write_model(tmp_path / "model")
    write_model(tmp_path / "small", vocabulary=200)
    result = CliRunner().invoke(create_app(), ["train", *flags.format(tmp_path).split()])
    assert isinstance(result.exception, SlapoError), result.output
    assert sentence.format(tmp_path) in str(result.exception)
