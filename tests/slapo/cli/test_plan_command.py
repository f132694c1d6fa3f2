"""``slapo plan``: its table, its files, and one sentence for what cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from slapo import Hardware
from slapo.cli.app import create_app
from slapo.training.plan_run import known_facts
from slapo_core import SlapoError

SMALL = "--layers 2 --hidden 32 --heads 2 --seq 16"
"""A model that is searched in about two seconds."""


def command(flags: str, name: str = "plan") -> Result:
    return CliRunner().invoke(create_app(), [name, *flags.split()])


def refusal(flags: str, name: str = "plan") -> str:
    result = command(flags, name)
    assert isinstance(result.exception, SlapoError), result.output
    return str(result.exception)


def write_small_hardware(path: Path, memory: int) -> Path:
    """Write a file for a device of so many bytes."""

    from slapo import Hardware

    replace(Hardware.load("this-machine"), name=path.stem, memory_bytes=memory, usable_bytes=memory).save(path)
    return path


def test_best_layouts_are_printed_and_written(tmp_path: Path) -> None:
    schedule, page = tmp_path / "schedule.py", tmp_path / "plan.html"
    result = command(f"{SMALL} --gpus 2 --global-batch 4 --tp 1 --pp 2 --top 2 --save {schedule} --report {page}")
    assert result.exit_code == 0, result.exception
    assert "tp=1 pp=2 dp=1 1f1b" in result.output
    assert "the fastest" in result.output
    assert "model = {'model': 'gpt2', 'layers': 2, 'hidden': 32, 'heads': 2, 'seq': 16, 'batch': 4}" in schedule.read_text()
    assert "Layouts, the fastest first" in page.read_text()


def test_what_stays_whole_is_noted() -> None:
    result = command(f"{SMALL} --gpus 4 --global-batch 4 --tp 4 --rows 4 --no-sequence-parallel --check 0")
    assert "note: tp=4: tensor_parallel: transformer.h.0.attn.c_attn stays whole" in result.output


def test_data_instead_of_a_table() -> None:
    result = command(f"{SMALL} --gpus 1 --global-batch 2 --json")
    found = json.loads(result.stdout)
    assert found["gpus"] == 1
    assert {each["tp"] for each in found["candidates"]} == {1}


def test_no_layout_fits_says_by_how_much(tmp_path: Path) -> None:
    hardware = write_small_hardware(tmp_path / "tiny.toml", 100_000)
    result = command(f"{SMALL} --gpus 1 --hardware {hardware}")
    assert result.exit_code == 1
    assert "no layout fits: the nearest is tp=1 pp=1 dp=1" in result.output
    assert " of 97.7 KiB with all of its" in result.output


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_twice_as_many_rows_do_not(tmp_path: Path) -> None:
    hardware = write_small_hardware(tmp_path / "tiny.toml", 1_500_000)
    result = command(f"{SMALL} --gpus 1 --hardware {hardware} --max-batch --json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert command(f"{SMALL} --gpus 1 --hardware {hardware} --rows {2 * found['global_batch']}").exit_code != 0
    assert found["answer"].startswith(f"--rows {found['global_batch']}: the largest micro-batch that fits")


def test_the_least_number_of_devices(tmp_path: Path) -> None:
    hardware = write_small_hardware(tmp_path / "tiny.toml", 550_000)
    result = command(f"{SMALL} --gpus 4 --hardware {hardware} --fit --json --data-parallel ddp --dp 1 --pp 2 --tp 1")
    assert json.loads(result.stdout)["gpus"] == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--gpus 8 --tp 3", "--tp 3 does not divide 8 devices; the nearest is --gpus 9"),
        ("--gpus 8 --tp 2 --pp 2 --dp 1", "is 4 devices, and --gpus is 8; the nearest is --gpus 4"),
        ("--gpus 8 --dp 4 --global-batch 6", "--global-batch 6: not divisible by 4 replicas; the nearest is 8"),
        ("--gpus 2 --dp 1 --data-parallel fsdp", "--dp 1 leaves one replica; use more devices"),
        ("--gpus 2 --tp 1 --sequence-parallel", "there is nothing to split among one tensor-parallel rank"),
        ("--gpus 4 --pp 4", "--pp 4: the model has 2 layers to cut between; use at most 2"),
        ("--gpus -1", "--gpus -1: not a positive number"),
        ("--fit --max-seq", "one question at a time"),
        ("--hardware h101", "no hardware 'h101'; did you mean 'h100'"),
        ("--model gpt22", "has no language model of this type"),
        ("--save plan.txt --gpus 1", "does not end in .py"),
        ("--calibrate machine.json", "give a path that ends in .toml"),
    ],
)
def test_what_cannot_work_is_one_sentence(flags: str, sentence: str) -> None:
    message = refusal(f"{SMALL} {flags}")
    assert sentence in message
    assert "\n" not in message


def test_what_is_known_of_a_model_that_does_not_run() -> None:
    said = known_facts(nn.Linear(1024, 1024, bias=False), Hardware.load("l40s"))
    assert said == ("its parameters have 4 MiB in fp32, 16 MiB with gradients and AdamW's state, so at least 1 device of l40s")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "full.py").symlink_to("/dev/full")
    assert "cannot be written: No space left on device" in refusal(f"{SMALL} --gpus 1 --save {tmp_path / 'full.py'}")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("layout = {'tp': '2'}", "line 1: tp of layout is '2'; write a number"),
        ("model = {'model': 3}", "line 1: model of model is 3; write a string"),
    ],
)
def test_a_schedule_file_with_a_wrong_value_is_refused(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "schedule.py"
    file.write_text(f"{line}\n\n\ndef schedule(sch):\n    pass\n")
    assert sentence in refusal(f"--schedule {file}", "train")


def test_flags_of_the_user_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "schedule.py"
    file.write_text("layout = {'tp': 3}\nmodel = {'hidden': 32, 'heads': 5}\n\n\ndef schedule(sch):\n    pass\n")
    assert "--heads 5: --hidden 32 is not divisible" in refusal(f"--schedule {file}", "train")
    assert "--heads 7: --hidden 32 is not divisible" in refusal(f"--schedule {file} --heads 7", "train")
