"""Plans as spaces: the symbols of their layouts, their order, what they rule out, and trials of their candidates."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slapo_core import create_schedule, load_schedule
from slapo_plan import Hardware, Plan, fake_ranks, plan
from slapo_tune import MeasurementSettings, ScheduleSpace, TuneError, tune
from slapo_tune.sampling.plan_sampler import PlanSampler
from slapo_tune.sampling.search_plan import Predictions
from slapo_tune.schedule_space.exploration import enumerate_space
from slapo_tune.schedule_space.planned_space import PlannedSpace
from slapo_tune.search import values_in

from .models import Blocks, batch, schedule

QUICK = MeasurementSettings(warmup=1, max_steps=6, max_seconds=1.0)


def planned(constraints: dict[str, Any] | None = None, usable_bytes: int = 2**30, **options: Any) -> Plan:
    hardware = replace(Hardware.load("h100"), usable_bytes=usable_bytes)
    given = {"ranks": 2, "global_batch": 4, "check": 0, **options}
    return plan(Blocks(), batch(), hardware=hardware, constraints=constraints, **given)


@cache
def small() -> PlannedSpace:
    return PlannedSpace(planned({"tp": 1, "pipeline_schedule": "1f1b"}))


@cache
def replicas() -> Plan:
    return planned({"tp": 1, "pp": 1, "rows": 2})


def configurations(space: PlannedSpace) -> list[dict[str, Any]]:
    return [values_in(path) for path in enumerate_space(space.declare, 9999) or ()]


def test_the_space_has_every_layout_with_every_checkpoint_policy() -> None:
    found = configurations(small())
    assert len({tuple(each.items()) for each in found}) == len(found)
    several, stages = ([each for each in found if each[axis] == 2] for axis in ("dp", "pp"))
    assert {each["data_parallel"] for each in several} == {"ddp", "fsdp"}
    assert {each["pipeline_schedule"] for each in stages} == {"1f1b"}
    assert {each["checkpointing"] for each in found} == {"none", "matmuls", "full"}
    assert len(found) == 3 * (2 * 2 + 3)  # micro-batches of 2 and 1 rows in two kinds, of 4, 2 and 1 rows
    assert not any("sequence_parallel" in each or "data_parallel" in each for each in stages)


def test_the_defaults_are_the_fastest_candidate_and_the_sampler_starts_there() -> None:
    space = ScheduleSpace()
    small().declare(space)
    assert dict(space) == small().candidates[0].settings
    predictions = Predictions(small())
    pool = enumerate_space(small().declare, 9999)
    assert PlanSampler(pool, predictions).next_values([]) == small().candidates[0].settings
    seconds = [each.step_seconds for each in small().candidates]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("place", range(0, 21, 4))
def test_a_configuration_takes_the_steps_of_its_values(place: int) -> None:
    values = small().candidates[place].settings
    with fake_ranks(pp=values["pp"], dp=values["dp"]) as mesh:
        sch = create_schedule(Blocks(), mesh=mesh, example_inputs=batch())
        small().schedule(sch, values)
        primitives = [step.name for step in sch.journal.steps]
    assert primitives.count("cut_pipeline_stage") == values["pp"] - 1
    assert primitives.count("checkpoint") == (0 if values["checkpointing"] == "none" else 4)
    options = dict(small().build_options(values))
    assert options.pop("microbatches") == values["microbatches"]
    chosen = {name: values[name] for name in ("data_parallel", "pipeline_schedule") if name in values}
    assert options == chosen


def test_what_does_not_fit_is_ruled_out_with_its_sentence() -> None:
    of_ddp = [each for each in PlannedSpace(replicas()).candidates if each.settings["data_parallel"] == "ddp"]
    peaks = {each.settings["checkpointing"]: each.candidate.peak for each in of_ddp if each.candidate}
    limit = (peaks["full"] + peaks["none"]) // 2
    tight = PlannedSpace(planned({"tp": 1, "pp": 1, "rows": 2, "data_parallel": "ddp"}, limit))
    found = {each["checkpointing"]: tight.impossible(each) for each in configurations(tight)}
    assert found["none"].endswith("with no block recomputed")
    assert found["full"] == ""
    assert tight.impossible({"tp": 8}) == ""
    with pytest.raises(TuneError, match=r"checkpointing: none\): a rank needs"):
        tight.candidate(next(each for each in configurations(tight) if each["checkpointing"] == "none"))


def test_layouts_that_do_not_fit_are_configurations_and_others_are_rejected() -> None:
    space = PlannedSpace(planned({"tp": 2}))
    assert [each.reason for each in space.rejected if each.settings.get("sequence_parallel")]
    with pytest.raises(TuneError, match="plan: no layout fits h100, so there is nothing to try: tp=1 pp=1 dp=2 "):
        PlannedSpace(planned({"tp": 1, "pp": 1}, usable_bytes=1000))


def test_equal_plans_have_one_digest() -> None:
    assert PlannedSpace(planned({"tp": 1, "pp": 1, "rows": 2})).digest == PlannedSpace(replicas()).digest
    assert PlannedSpace(replicas()).digest != small().digest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"space": lambda space: None}, "tune: space is for a schedule that is no plan; leave it out"),
        ({"layout": {"tp": 2}}, "tune: layout is for a schedule that is no plan; leave it out, or plan with constraints"),
        ({"target": "deepspeed"}, "tune: the plan is for target 'torch', not 'deepspeed'; plan for that target"),
        ({"precision": "bf16"}, "tune: precision changes what the plan says; give it to slapo.plan, and leave it out here"),
        ({"optimizer": torch.optim.SGD}, "tune: optimizer changes what the plan says; give it to slapo.plan"),
        ({"model": Blocks(16)}, "tune: the plan is of a Blocks with 1120 parameters, and the model is another: a Blocks with"),
        ({"batch": {"x": torch.ones(6, 8)}}, "tune: the batch has 6 rows, and the plan is for 4; plan with global_batch=6"),
    ],
)
def test_arguments_that_contradict_the_plan_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"schedule": replicas(), "model": Blocks(), "batch": batch(), **options}
    with pytest.raises(TuneError, match=f"^{sentence}"):
        tune(**given)


def test_a_plan_prunes_itself() -> None:
    with pytest.raises(TuneError, match="tune: prune is for a schedule that is no plan"):
        tune(replicas(), Blocks(), batch(), prune=replicas())


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.mark.multiproc
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("importable")
def test_the_fastest_candidate_is_tried_first_and_saved_as_a_schedule_file(tmp_path: Path) -> None:
    found = planned({"tp": 1, "dp": 2, "rows": 2, "data_parallel": "ddp"})
    lines: list[str] = []
    result = tune(found, Blocks(), batch(), trials=1, verify=False, measurement=QUICK, report=lines.append)
    (trial,) = result.trials
    assert trial.values == {"tp": 1, "pp": 1, "dp": 2, "data_parallel": "ddp", "microbatches": 1, "checkpointing": "none"}
    assert (trial.state, trial.predicted) == ("measured", found.best.step_seconds)
    assert not dist.is_initialized()
    result.save(tmp_path / "best.py", {"model": "blocks", "batch": 4})
    text = (tmp_path / "best.py").read_text()
    assert "layout = {'pp': 1, 'dp': 2, 'tp': 1}\nbuild = {'microbatches': 1, 'data_parallel': 'ddp'}\n" in text
    assert "\n\nmodel = {'model': 'blocks', 'batch': 4}\n# trial 0 of plan " in text
    assert len(load_schedule(Blocks(), tmp_path / "best.py").journal) == 0


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("importable")
def test_the_search_goes_on_in_the_database_and_learns_from_its_trials(tmp_path: Path) -> None:
    options: dict[str, Any] = {"measurement": QUICK, "database": tmp_path / "tune.json", "report": lambda line: None}
    first = tune(planned(), Blocks(), batch(), trials=2, verify=False, **options)
    second = tune(planned(), Blocks(), batch(), trials=5, **options)
    assert [each.values for each in second.trials[:2]] == [each.values for each in first.trials]
    assert len({str(each.values) for each in second.trials}) == 5
    assert second.best is not None
    assert second.best.verified is True
    assert any(settings.get("sequence_parallel") for settings, _ in second.skipped)
    other = tune(planned({"tp": 1}), Blocks(), batch(), trials=1, verify=False, **options)
    assert len(other.trials) == 1
    with pytest.raises(TuneError, match="another space"):
        tune(schedule, Blocks(), batch(), name=second.name, **options)
