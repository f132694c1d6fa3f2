"""The schedule a run has when the user gives none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slapo.run_data.settings import Settings, SettingsError
from slapo.training.models import build_model
from slapo.training.preflight_check import check_run
from slapo.training.run_schedule import apply_default_steps, find_layers
from slapo_core import create_schedule, init_empty_weights


def steps(settings: Settings) -> list[str]:
    with init_empty_weights():
        sch = create_schedule(build_model(settings))
    apply_default_steps(sch, settings)
    return [str(step) for step in sch.journal]


@pytest.mark.parametrize(
    ("pp", "ends"), [(1, []), (2, [2]), (3, [1, 3]), (4, [0, 2, 3]), (6, [0, 1, 2, 3, 4])], ids=lambda value: str(value)
)
def test_cuts_are_even(pp: int, ends: list[int]):
    assert steps(Settings(layers=6, pp=pp)) == [f"sch['transformer.h.{end}'].cut_pipeline_stage()" for end in ends]


def test_layers_are_checkpointed():
    assert steps(Settings(layers=2, checkpoint_layers=True)) == [f"sch['transformer.h.{i}'].checkpoint()" for i in (0, 1)]


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("gpt2", "transformer.h"),
        ("llama", "model.layers"),
        ("gpt_neox", "gpt_neox.layers"),
        ("opt", "model.decoder.layers"),
        ("mixtral", "model.layers"),
    ],
)
def test_layers_of_a_family(model: str, path: str):
    settings = Settings(model=model, layers=3)
    with init_empty_weights():
        assert find_layers(build_model(settings), settings) == [f"{path}.{i}" for i in range(3)]


def test_a_model_without_layers_is_refused():
    settings = Settings(layers=3)
    with init_empty_weights():
        model = build_model(Settings(layers=2))
    with pytest.raises(SettingsError, match="--model gpt2: it has no list of 3 layers; say with --schedule FILE"):
        find_layers(model, settings)


@pytest.mark.multiproc
def test_the_schedule_file_in_the_readme_fits_the_command_below_it(tmp_path: Path):
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    ((source, tp, pp),) = re.findall(
        r"\$ cat mine.py\n(.*?)\$ slapo train --schedule mine.py --tp (\d) --pp (\d)", readme, re.DOTALL
    )
    (tmp_path / "mine.py").write_text(source)
    check_run(Settings(schedule=str(tmp_path / "mine.py"), tp=int(tp), pp=int(pp)))
