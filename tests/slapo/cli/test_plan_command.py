"""``slapo plan``: its table, its files, and one sentence for what cannot work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from slapo import Hardware
from slapo.cli.app import create_app
from slapo.run_data.settings import Settings
from slapo.training.plan_limits import Probe, bisect, least_devices
from slapo.training.plan_run import known_facts
from slapo.training.plan_settings import PlanSettings
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
        ("--model gpt22", "has no language model of type 'gpt22'"),
        ("--save plan.txt --gpus 1", "a schedule file is Python; end its name in .py"),
        ("--max-seq", "--seq 16: --max-seq chooses it; leave one of them out"),
        ("--max-batch --rows 2", "--rows 2: --max-batch chooses it; leave one of them out"),
        ("--max-batch --global-batch 2", "--global-batch 2: --max-batch chooses it; leave one of them out"),
        ("--calibrate machine.toml", "--calibrate measures this machine and plans nothing; leave one of them out"),
        ("--gpus 1 --pipeline-schedule zbv", "--pipeline-schedule zbv: 1 device leaves one pipeline rank; use --pp 2 or more"),
        ("--gpus 4 --fit --tp 8", "--gpus 4: the degrees given make 8 devices; use 8 or more"),
        ("--gpus 4 --fit --dp 3 --global-batch 4", "--global-batch 4: not divisible by 3 replicas; the nearest is 3"),
        ("--model vit", "no language model of type 'vit'; plan and tune other models in Python"),
    ],
)
def test_what_cannot_work_is_one_sentence(flags: str, sentence: str) -> None:
    message = refusal(f"{SMALL} {flags}")
    assert sentence in message
    assert "\n" not in message


def test_a_calibration_is_a_toml_file() -> None:
    assert "--calibrate machine.json: give a path that ends in .toml" in refusal("--calibrate machine.json")


@pytest.mark.parametrize("flags", ["--save {}", "--report {}", "--calibrate {}"])
@pytest.mark.parametrize("name", ["missing/plan", "folder"])
def test_files_that_cannot_be_written_are_refused_before_the_work(flags: str, name: str, tmp_path: Path) -> None:
    suffix = {"--save {}": ".py", "--report {}": ".html", "--calibrate {}": ".toml"}[flags]
    (tmp_path / f"folder{suffix}").mkdir()
    sizes = "" if "calibrate" in flags else "--layers 400 --hidden 4096 --heads 32 --gpus 512"  # minutes
    message = refusal(f"{sizes} {flags.format(tmp_path / (name + suffix))}")
    assert "its folder is not there, or cannot be written to; choose another file" in message


@pytest.mark.parametrize("limit", [1, 5, 8, 100, 130, 1000, 4096])
@pytest.mark.parametrize("most", [6, 100, 130, 2048, 2**20])
@pytest.mark.parametrize("margin", [0, 3])
def test_the_largest_number_that_fits(limit: int, most: int, margin: int) -> None:
    found = bisect(lambda number: number <= limit, lambda number: number <= limit - margin, min(4, most), most)
    if limit < 4:
        assert found == 0
        return
    border = min(limit - margin, most)
    assert found <= max(4, border)
    assert found >= border - max(1, min(limit, most) // 8) - margin
    assert found == most or margin or border != most


def plan_settings(flags: dict[str, Any], **constraints: int) -> PlanSettings:
    given = {"gpus": 4, "global_batch": 0, "constraints": constraints, "model": Settings(), **flags}
    fields = ("hardware", "target", "precision", "top", "check", "save", "report", "question", "as_json")
    return PlanSettings(**{**dict.fromkeys(fields, ""), **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "constraints", "least", "found"),
    [
        (16, {}, 3, 4),
        (16, {}, 16, 16),
        (6, {}, 5, 6),
        (24, {"tp": 3}, 5, 6),
        (24, {"tp": 3, "dp": 2}, 1, 6),
        (16, {}, 17, None),
    ],
)
def test_the_least_number_of_devices_is_a_multiple_of_the_given_degrees(
    gpus: int, constraints: dict[str, int], least: int, found: int | None
) -> None:
    tried: list[int] = []

    def fits(settings: PlanSettings) -> bool:
        tried.append(settings.gpus)
        return settings.gpus >= least

    answer, words = least_devices(plan_settings({"gpus": gpus}, **constraints), Probe(fits, fits), 1)
    assert answer.gpus == (found or max(tried))
    assert bool(words) is bool(found)
    assert (f"{found} devices" in words) is bool(found)


def test_where_no_number_of_devices_is_enough_the_exit_status_is_one_and_the_nearest_is_named(tmp_path: Path) -> None:
    hardware = write_small_hardware(tmp_path / "tiny.toml", 100_000)
    result = command(f"{SMALL} --gpus 2 --fit --hardware {hardware} --tp 1 --pp 1")
    assert result.exit_code == 1
    assert "no layout fits on up to 2 devices: the nearest is tp=1 pp=1 dp=2" in result.output


def test_the_longest_sequence_of_a_folder_ends_at_its_positions(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command(f"--model {tmp_path} --gpus 1 --max-seq --hardware h100 --check 0")
    assert "--seq 20: the longest sequence that fits, as the model has 20 positions" in result.output


def test_what_is_known_of_a_model_that_does_not_run() -> None:
    said = known_facts(nn.Linear(1024, 1024, bias=False), Hardware.load("l40s"))
    assert said == ("its parameters have 4 MiB in fp32, 16 MiB with gradients and AdamW's state, so at least 1 device of l40s")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "full.py").symlink_to("/dev/full")
    result = command(f"{SMALL} --gpus 1 --save {tmp_path / 'full.py'}")
    assert result.exit_code == 2
    assert "tp=1 pp=1 dp=1" in result.stdout
    assert "cannot be written: No space left on device" in result.stderr


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
