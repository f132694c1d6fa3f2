"""``slapo train`` from end to end: real processes, real text, the unmodified model beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo.launch.elastic_launch import launch_ranks
from slapo.run_data.settings import Settings
from slapo.training.train_run import run_training

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("launcher_state"), pytest.mark.timeout(300)]
SMALL = "--layers 2 --hidden 32 --seq 32 --steps 6"


def train(folder: Path, flags: str) -> dict[str, Any]:
    """Run the command and read the run back from its report."""
    result = CliRunner().invoke(create_app(), ["train", *flags.split(), "--report", str(folder)])
    assert result.exit_code == 0, f"{result.output}{result.stderr}{result.exception!r}"
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', page)
    assert found is not None
    record: dict[str, Any] = json.loads(found[1])
    return record


def largest_difference(record: dict[str, Any]) -> float:
    return max(abs(own - other) for own, other in zip(record["losses"], record["reference"], strict=True))


@pytest.mark.parametrize("model", ["--model llama --sequence-parallel", pytest.param("", marks=pytest.mark.slow)])
def test_tensor_parallel_stages_equal_the_unmodified_model(tmp_path: Path, model: str):
    record = train(tmp_path, f"{model} --tp 2 --pp 2 {SMALL} --lr 1e-2 --reference")
    assert largest_difference(record) <= 1e-4
    assert record["losses"][-1] < record["losses"][0], "it learns"


@pytest.mark.slow
def test_thirty_steps_equal_the_unmodified_model(tmp_path: Path):
    record = train(tmp_path, "--tp 2 --pp 2 --steps 30 --reference")
    assert len(record["losses"]) == 30
    assert largest_difference(record) <= 1e-4
    assert record["losses"][-1] < record["losses"][0] - 1, "it learns"


@pytest.mark.parametrize("layout", ["--tp 1 --pp 1", pytest.param("--tp 1 --pp 4 --layers 4", marks=pytest.mark.slow)])
def test_layouts_equal_the_unmodified_model(tmp_path: Path, layout: str):
    assert largest_difference(train(tmp_path, f"{SMALL} {layout} --reference")) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        *(f"--model {model} --tp {ranks}" for model in ("gpt2", "llama", "t5") for ranks in (2, 4)),
        "--model llama --tp 2 --sequence-parallel",
    ],
)
def test_families_split_over_ranks_equal_the_unmodified_model(tmp_path: Path, flags: str):
    assert largest_difference(train(tmp_path, f"{flags} --layers 1 --hidden 32 --seq 32 --steps 4 --reference")) <= 1e-4


@pytest.mark.parametrize(
    "flags",
    [
        "--model gpt2 --pp 2",
        *(
            pytest.param(f"--model {model} {layout}", marks=pytest.mark.slow)
            for model in ("gpt2", "llama", "t5")
            for layout in ("--dp 2", "--tp 2", "--pp 2 --tp 2", "--pp 2 --dp 2")
        ),
    ],
)
def test_on_deepspeed_it_equals_the_unmodified_model(tmp_path: Path, flags: str):
    sizes = "--layers 2 --hidden 32 --seq 32 --steps 4 --reference"
    assert largest_difference(train(tmp_path, f"{flags} {sizes} --target deepspeed")) <= 1e-4


@pytest.mark.parametrize(
    "flags",
    [
        "--model gpt2 --pp 2 --schedule-kind interleaved",
        *(
            pytest.param(f"--model {model} {layout}", marks=pytest.mark.slow)
            for model in ("gpt2", "llama", "t5")
            for layout in ("--dp 2", "--tp 2", "--pp 2", "--pp 2 --tp 2 --schedule-kind interleaved", "--pp 2 --dp 2")
        ),
    ],
)
def test_on_megatron_it_equals_the_unmodified_model(tmp_path: Path, flags: str):
    sizes = "--layers 4 --hidden 32 --seq 32 --steps 4 --reference"
    assert largest_difference(train(tmp_path, f"{flags} {sizes} --target megatron")) <= 1e-4


@pytest.mark.slow
def test_report_and_schedule_of_a_run(tmp_path: Path):
    flags = f"--tp 2 --pp 2 {SMALL} --dropout 0.2 --seed 3"
    record = train(tmp_path, flags)
    assert {step["name"] for step in record["steps"] if step["depth"] == 0} == {"tensor_parallel", "cut_pipeline_stage"}
    assert [rank["stages"] for rank in record["ranks"]] == [[0], [0], [1], [1]]
    assert {event["rank"] for event in record["timeline"]} == {0, 1, 2, 3}
    assert {event["kind"] for event in record["timeline"]} == {"F", "B", "SEND_F", "SEND_B", "RECV_F", "RECV_B"}
    assert len(record["stage_paths"]) == 2
    again = train(tmp_path / "again", f"{flags} --schedule {tmp_path / 'schedule.json'}")
    assert again["losses"] == record["losses"], "the same steps and, with a seed, the same dropout"


@pytest.mark.slow
def test_a_schedule_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def schedule(sch):\n"
        "    for layer in sch.select('transformer.h.*'):\n"
        "        layer['mlp.c_fc'].shard(['weight', 'bias'], axis=1).sync('bwd_post', 'all_reduce')\n"
        "        layer['mlp.c_proj'].shard('weight', axis=0).sync('fwd_post', 'all_reduce')\n"
        "    sch['transformer.h.0'].cut_pipeline_stage()\n"
    )
    record = train(tmp_path, f"--tp 2 --pp 2 {SMALL} --reference --schedule {path}")
    assert largest_difference(record) <= 1e-4


def test_started_by_an_elastic_agent_it_joins_that_world(tmp_path: Path):
    launch_ranks(
        run_training, Settings(tp=2, layers=2, hidden=32, seq=32, steps=2, device="auto", report=str(tmp_path))
    )  # as torchrun does
    assert "ranks</dt><dd>2<" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--pp 2",
        "--dp 2",
        "--dp 2 --tp 2 --microbatches 2",
        "--dp 2 --pp 2 --microbatches 2",
        "--dp 2 --data-parallel fsdp",
        "--dp 2 --tp 2 --microbatches 2 --data-parallel fsdp --model llama --sequence-parallel --checkpoint-layers",
        "--dp 2 --pp 2 --microbatches 2 --data-parallel fsdp --model t5",
        "--dp 2 --pp 2 --tp 2 --microbatches 2 --data-parallel fsdp",
        "--pp 2 --schedule-kind gpipe",
        *(
            f"--model {model} --pp {ranks} --schedule-kind {kind} --layers 8"
            for model in ("gpt2", "llama", "t5")
            for ranks in (2, 4)
            for kind in ("1f1b", "interleaved", "zbv")
        ),
        "--tp 2 --pp 2 --checkpoint-layers",
        "--model llama --tp 2 --pp 2",
        "--model llama --tp 4 --sequence-parallel",
        "--model t5 --tp 2 --pp 2",
        "--model gpt2 --tp 2 --sequence-parallel",
        "--model qwen2 --pp 2",
        "--model gpt_neox --tp 2",
        "--model opt --pp 2",
    ],
)
def test_other_runs_equal_the_unmodified_model(tmp_path: Path, flags: str):
    assert largest_difference(train(tmp_path, f"{flags} --steps 10 --reference")) <= 1e-4


@pytest.mark.slow
def test_bf16_stays_near(tmp_path: Path):
    assert largest_difference(train(tmp_path, "--tp 2 --steps 10 --precision bf16 --reference")) <= 5e-2
