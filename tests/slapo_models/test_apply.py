"""``apply_schedule``: keys, models and schedules, steps in the journal, and what a failure leaves behind."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slapo
import slapo.model_schedule
import slapo_memory.plugin
import slapo_models.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import PluginError, Registry, Schedule, ScheduleError, UnknownNameError, hookimpl, use_registry
from slapo_models import apply_schedule, get_schedule, register_schedule
from slapo_models.apply import REGISTERED_SCHEDULES
from slapo_verify.comparison import assert_equivalent
from tests.slapo_models.cases import CASES


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """Remove what a test registers."""
    yield
    REGISTERED_SCHEDULES.clear()


def steps(sch: Schedule) -> list[str]:
    return [str(step) for step in sch.journal]


def test_the_steps_are_those_of_primitives() -> None:
    sch = apply_schedule(CASES["gpt2"].model(), "gpt2", attn_op_name="eager", ckpt_ratio=1.0, pipeline_cuts=[0])
    assert steps(sch) == [
        "sch.use_kernels('attention', force={'attention': 'eager'})",
        "sch['transformer.h.0'].checkpoint()",
        "sch['transformer.h.1'].checkpoint()",
        "sch['transformer.h.0'].cut_pipeline_stage()",
    ]


@pytest.mark.parametrize("key", CASES)
def test_a_schedule_is_saved_replayed_and_undone(key: str, tmp_path: Path) -> None:
    case = CASES[key]
    batch = {name: value for name, value in case.batch().items() if key != "wideresnet" or name != "labels"}
    config = {name: value for name, value in case.everything.items() if name != "disable_fuse_bias_gelu"}
    model = case.model()
    sch = apply_schedule(model, key, example_inputs=batch, **config)
    sch.save(tmp_path / "schedule.json")
    replayed = slapo.load_schedule(case.model(), tmp_path / "schedule.json", example_inputs=batch)
    assert steps(replayed) == steps(sch) != []
    assert_equivalent(case.model(), replayed.mod, **batch)
    while sch.journal.steps:
        sch.undo()
    assert_equivalent(case.model(), model, **batch)


def test_nothing_asked_for_is_no_step() -> None:
    for key, case in CASES.items():
        assert steps(apply_schedule(case.model(), key)) == []


def test_a_schedule_that_is_given_goes_on() -> None:
    sch = slapo.create_schedule(CASES["gpt2"].model())
    sch["transformer.h.1"].checkpoint()
    assert apply_schedule(sch, "gpt", ckpt_ratio=0.5, checkpoint_method="head", group=None) == sch
    assert steps(sch) == ["sch['transformer.h.1'].checkpoint()", "sch['transformer.h.0'].checkpoint()"]
    with pytest.raises(ScheduleError, match=r"apply_schedule\('gpt2'\): example_inputs is that of the schedule which is given"):
        apply_schedule(sch, "gpt2", example_inputs={})


def test_the_facade_has_it() -> None:
    assert slapo.apply_schedule is apply_schedule is slapo.model_schedule.api.apply_schedule
    assert slapo.model_schedule.registry.register_schedule is register_schedule
    assert list(inspect.signature(slapo.apply_schedule).parameters) == ["model_or_schedule", "key", "config"]
    sch = slapo.model_schedule.get_schedule("bert")(CASES["bert"].model(), ckpt_ratio=0.5)
    assert steps(sch) == ["sch['bert.encoder.layer.1'].checkpoint()"]


# ---- keys


def broken() -> Any:
    def slapo_models() -> dict[str, str]:
        raise RuntimeError("no schedules today")

    return SimpleNamespace(slapo_models=hookimpl(slapo_models), __name__="broken")


def test_an_unknown_key_says_what_is_there_and_what_did_not_load(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UnknownNameError, match="no schedule 'gtp2'; did you mean 'gpt2'.*available: albert, auto, bert, gpt, gpt2, gpt_neo, "
    ):
        apply_schedule(nn.Linear(1, 1), "gtp2")
    registry = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_models.plugin])
    registry.records[-1].loaded, registry.records[-1].problems = False, ["No module named 'xformers'"]
    with pytest.raises(UnknownNameError, match="did not load: No module named 'xformers'"):
        apply_schedule(nn.Linear(1, 1), "gpt3", plugins=registry)


def test_a_plugin_brings_a_schedule_and_another_one_of_the_same_name_is_refused() -> None:
    def schedule(sch: Schedule, **options: Any) -> None:
        sch["0"].checkpoint(**options)

    plugin = SimpleNamespace(slapo_models=hookimpl(lambda: {"mine": schedule}))
    registry = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_memory.plugin, slapo_models.plugin, plugin])
    model = nn.Sequential(nn.Linear(2, 2))
    assert steps(apply_schedule(model, "mine", plugins=registry)) == ["sch['0'].checkpoint()"]
    rival = SimpleNamespace(slapo_models=hookimpl(lambda: {"bert": schedule}))
    with pytest.raises(PluginError, match="model 'bert' is provided by .* and .*; uninstall one"):
        Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_models.plugin, rival])


def test_a_function_is_registered_for_this_process() -> None:
    @register_schedule("mine")
    def mine(model: nn.Module, ckpt_ratio: float = 0.0) -> Schedule:
        sch = slapo.create_schedule(model)
        sch["0"].checkpoint()
        return sch

    assert steps(apply_schedule(nn.Sequential(nn.Linear(2, 2)), "mine", ckpt_ratio=1.0)) == ["sch['0'].checkpoint()"]
    assert get_schedule("mine")
    with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
        get_schedule("mines")
    register_schedule("mine")(mine)
    for key in ("mine", "gpt2"):
        with pytest.raises(PluginError, match=f"model '{key}' is provided by"):
            register_schedule(key)(lambda model: model)


def test_a_function_without_a_key_is_called_as_its_file() -> None:
    register_schedule()(test_a_function_without_a_key_is_called_as_its_file)
    assert [*REGISTERED_SCHEDULES] == [Path(__file__).stem]
    with pytest.raises(ScheduleError, match=r"is given a function; write @register_schedule\(\)"):
        register_schedule(steps)  # type: ignore[arg-type]


def test_a_function_that_returns_no_schedule_is_refused() -> None:
    register_schedule("plain")(lambda model: model)
    with pytest.raises(ScheduleError, match=r"apply_schedule\('plain'\): the function returned a Linear; return the schedule"):
        apply_schedule(nn.Linear(1, 1), "plain")


# ---- a failure


def test_what_fails_is_undone() -> None:
    model = CASES["gpt2"].model()
    before = copy.deepcopy(model)
    sch = slapo.create_schedule(model)
    sch["transformer.h.1"].cut_pipeline_stage()
    with pytest.raises(ScheduleError, match="cut_pipeline_stage.'transformer.h.1'.: a stage ends after this module already"):
        apply_schedule(sch, "gpt2", ckpt_ratio=0.5, pipeline_cuts=[0, 1])
    assert steps(sch) == ["sch['transformer.h.1'].cut_pipeline_stage()"]
    assert_equivalent(before, model, **CASES["gpt2"].batch())


def test_numbers_that_were_converted_are_put_back() -> None:
    model = CASES["gpt2"].model()
    before = copy.deepcopy(model)
    parameters = [*model.parameters()]
    with (
        use_registry(Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_models.plugin])),
        pytest.raises(UnknownNameError, match="no primitive 'checkpoint'"),
    ):
        apply_schedule(model, "gpt2", bf16=True, ckpt_ratio=0.5)
    assert [*map(id, model.parameters())] == [*map(id, parameters)]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before.state_dict()[name])
        assert value.dtype == before.state_dict()[name].dtype
