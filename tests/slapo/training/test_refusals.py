"""Errors of ``slapo train`` before it starts a process: one sentence each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from slapo.cli.app import create_app
from slapo.launch.errors import RankError
from slapo_core import SlapoError


def refusal(*flags: str) -> str:
    """The sentence ``slapo train`` ends with, before any rank was started."""
    result = CliRunner().invoke(create_app(), ["train", *flags])
    assert isinstance(result.exception, SlapoError), result.output
    assert not isinstance(result.exception, RankError)
    assert not dist.is_initialized()
    assert result.output == ""
    sentence = str(result.exception)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 3", "--tp 3: 4 heads cannot be divided among 3 ranks; use 1, 2 or 4"),
        ("--pp 5", "--pp 5: the model has 4 layers, fewer than 5 stages; use --layers 5 or more, or a smaller --pp"),
        ("--pp 2 --microbatches 1 --schedule-kind dualpipev", "'dualpipev' needs at least as many micro-batches as stages"),
        ("--data /no/such/file", "--data /no/such/file: cannot be read, no such file or directory; give a readable file"),
        ("--target trch", "no dialect 'trch'; did you mean 'torch'\\?; available: deepspeed, megatron, torch"),
        ("--model gtp2", r"has no language model of type 'gtp2'; try .*gpt2.* or another of its \d+"),
        ("--schedule /no/such/file.py", "cannot read the schedule '/no/such/file.py'"),
        ("--device cuda --tp 4 --dp 4 --batch 32", r"--device cuda: 16 ranks, but \d+ GPUs?; use fewer ranks or --device cpu"),
    ],
)
def test_flags_that_cannot_work(flags: str, message: str):
    assert re.search(message, refusal(*flags.split()))


def test_an_empty_data_file(tmp_path: Path):
    path = tmp_path / "nothing"
    path.touch()
    assert refusal("--data", str(path)) == f"--data {path}: the file is empty; give a file with text in it"


@pytest.mark.parametrize(("below", "reason"), [("", "file exists"), ("deep/report", "not a directory")])
def test_a_report_that_cannot_be_written(tmp_path: Path, below: str, reason: str):
    (tmp_path / "taken").touch()
    folder = tmp_path / "taken" / below
    assert refusal("--report", str(folder)) == f"--report {folder}: cannot be written to, {reason}; give a folder that can be"


@pytest.mark.parametrize("flags", ["--tp 2", "--tp 2 --pp 2"])
def test_a_schedule_without_the_syncs_its_shards_need(tmp_path: Path, flags: str):
    path = tmp_path / "mine.py"
    cut = "    sch['transformer.h.1'].cut_pipeline_stage()\n" if "--pp" in flags else ""
    path.write_text(f"def schedule(sch):\n    sch['transformer.h.0.mlp.c_fc'].shard(['weight', 'bias'], axis=1)\n{cut}")
    report = tmp_path / "report"
    message = refusal("--schedule", str(path), "--report", str(report), *flags.split())
    assert re.search(r"transformer\.h\.0\.mlp\.c_fc.*sync", message)
    assert not report.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("syntax.py", "def schedule(sch)\n    pass\n", r"syntax.py:1: expected ':'"),
        (
            "unknown.py",
            "def schedule(sch):\n    sch.chekpoint()\n",
            r"unknown.py:2: no primitive 'chekpoint'; did you mean 'checkpoint'",
        ),
        ("path.py", "\ndef schedule(sch):\n    sch['transformer.g']\n", r"path.py:3: no module 'transformer.g'"),
        ("bug.py", "def schedule(sch):\n    1 / 0\n", r"bug.py:2: ZeroDivisionError: division by zero"),
        ("nothing.py", "x = 1\n", r"nothing.py: defines no function 'schedule\(sch\)'"),
        ("broken.json", '{"slapo_schedule": 1,\n "steps": ]\n', r"broken.json:2: not JSON"),
        ("other.json", "{}", r"other.json: not a saved schedule"),
        (
            "staged_model.py",
            "def schedule(sch):\n    sch['transformer.h.1'].cut_pipeline_stage()\n",
            r"2 stages on a mesh with pp=1; give the mesh's axis pp more ranks, or leave out the cuts",
        ),
    ],
)
def test_a_schedule_file_with_a_mistake(tmp_path: Path, name: str, text: str, message: str):
    path = tmp_path / name
    path.write_text(text)
    assert re.search(message, refusal("--schedule", str(path)))


def test_a_world_of_torchrun_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert refusal("--tp", "2", "--pp", "2") == (
        "--pp 2 x --dp 1 x --tp 2 is 4 ranks, but torchrun started 3; start 4, or choose sizes whose product is 3"
    )
