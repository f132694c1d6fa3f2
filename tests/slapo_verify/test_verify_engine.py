"""Engines against the unmodified model: right ones in many layouts, and faults that are planted in one."""

from __future__ import annotations

import copy
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Program, Registry, Schedule, VerifyError, create_schedule, hookimpl
from slapo_testing import run_distributed
from slapo_verify import Report, verify, verify_engine
from slapo_verify.comparison import Tolerance
from slapo_verify.training_runs.reference_run import sgd, train_reference
from tests.engine_models import Skips, batches, small, twice
from tests.output_cases import GPT, RETURNS, batch_of, two
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc

TP, PP, DP = {"tp": 2}, {"pp": 2}, {"dp": 2}


def make_schedule(
    model: nn.Module, layout: dict[str, int], plugins: Registry | None = None, change: Callable[[Any], None] | None = None
) -> Schedule:
    """Sharded and cut as the layout wants."""
    example = {name: value[:2] for name, value in batches(1)[0].items()}
    sch: Any = create_schedule(model, mesh=mesh_of(**layout), example_inputs=example, plugins=plugins)
    if change is not None:
        change(sch)
    if layout.get("tp", 1) > 1:
        sch.tensor_parallel()
    if layout.get("pp", 1) > 1:
        sch.pipeline(layout["pp"])
    return sch  # type: ignore[no-any-return]


def of_engine(rank: int, name: str, layout: dict[str, int], target: str, options: dict[str, Any]) -> Report:
    batch = batches(layout.get("dp", 1))[0]
    report = verify_engine(small(name), lambda model: make_schedule(model, layout), batch, target, **options)
    object.__setattr__(report, "trained", None)
    return report


def same(reports: list[Report]) -> Report:
    """The report that every rank has."""
    for report in reports:
        assert report == reports[0]
        assert str(report) == str(reports[0])
    return reports[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [TP, PP, DP], ids=str)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["torch", "deepspeed", "megatron"])
def test_right_engines_are_right(layout: dict[str, int], target: str, precision: str) -> None:
    options = {"microbatches": 2, "precision": precision}
    report = same(run_distributed(of_engine, 2, "gpt2", layout, target, options, timeout=100)).check()
    assert report.compared == {"evaluations": 2, "losses": 1, "updates": 53}
    assert report.largest is not None
    assert report.largest.absolute > 0
    assert report.notes[0].startswith(f"{target}: 2 ranks (pp {layout.get('pp', 1)}, ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("target", ["torch", "deepspeed", "megatron"])
def test_right_engines_are_right_on_four_ranks(name: str, layout: dict[str, int], target: str) -> None:
    same(run_distributed(of_engine, 4, name, layout, target, {"microbatches": 2, "steps": 2}, timeout=100)).check()


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Divides by the size of a gradient, also where that is all rounding, as of the bias of keys."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def with_adam(rank: int, name: str, layout: dict[str, int], target: str, fault: str) -> list[Report]:
    """Reports for several models; the last model is also checked with the faulty schedule."""
    found = []
    for seed in range(3):
        reference = small(name)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        for change in (None, globals()[fault])[: 2 if seed == 2 else 1]:
            schedule = partial(make_schedule, layout=layout, change=change)
            given = {"microbatches": 2, "optimizer": adam, "steps": 2}
            found.append(verify_engine(reference, schedule, batches(1)[0], target, **given, blame=False))
            object.__setattr__(found[-1], "trained", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "target"),
    [
        ("gpt2", TP, "torch"),
        *(
            pytest.param(name, layout, target, marks=pytest.mark.slow)
            for name in ("gpt2", "llama")
            for layout in (TP, PP)
            for target in ("torch", "deepspeed", "megatron")
            if (name, layout, target) != ("gpt2", TP, "torch")
        ),
    ],
    ids=str,
)
def test_an_optimizer_that_makes_much_of_rounding_raises_no_alarm(name: str, layout: dict[str, int], target: str) -> None:
    fault = "relu_in_layer_2" if name == "gpt2" else "relu_in_a_gate"
    ranks = run_distributed(with_adam, 2, name, layout, target, fault, timeout=100)
    *right, wrong = (same(list(reports)) for reports in zip(*ranks, strict=True))
    assert [report.ok for report in right] == [True] * 3
    assert not wrong.ok


@pytest.mark.parametrize("layout", [pytest.param(TP, marks=pytest.mark.slow), DP], ids=str)
def test_two_engines_against_each_other(layout: dict[str, int]) -> None:
    options = {"microbatches": 2, "against": "deepspeed"}
    report = same(run_distributed(of_engine, 2, "gpt2", layout, "torch", options, timeout=100)).check()
    assert str(report).startswith("torch against deepspeed: the same: 2 evaluations, 1 losses, 53 updates; ")


def with_rates(rank: int, optimizer: str) -> Report:
    """Report of three steps with clipped gradients and a falling learning rate."""
    made = partial(torch.optim.AdamW, lr=1e-2) if optimizer == "adamw" else partial(torch.optim.SGD, lr=0.1)
    rate = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    options = {"steps": 3, "optimizer": made, "lr_scheduler": rate, "clip": 0.5, "microbatches": 2}
    return of_engine(rank, "gpt2", TP, "torch", options)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_clip_and_a_schedule_of_the_rate_are_the_unmodified_models_too(optimizer: str) -> None:
    same(run_distributed(with_rates, 2, optimizer, timeout=100)).check()


def with_fsdp(rank: int) -> Report:
    options = {"data_parallel": "fsdp", "microbatches": 2}
    return of_engine(rank, "gpt2", DP, "torch", options)


def test_replicas_that_hold_rows() -> None:
    same(run_distributed(with_fsdp, 2)).check()


# ---- faults


class AfterBuild:
    """A plugin that breaks an engine."""

    def __init__(self, fault: Callable[[Any], None]) -> None:
        self.fault = fault

    @hookimpl
    def slapo_after_build(self, engine: Any) -> None:
        self.fault(engine)


class Border:
    """A plugin that loses the mask on its way into the second stage."""

    def tampered(self, program: Program) -> Program:
        def lose(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {name: torch.ones_like(value) if name == "mask" else value for name, value in kwargs.items()}

        stage = program.stages[1].module
        if not stage._forward_pre_hooks:
            stage.register_forward_pre_hook(lose, with_kwargs=True)
        again = program.replan
        assert again is not None
        return replace(program, replan=lambda training, inputs: self.tampered(again(training, inputs)))

    @hookimpl(wrapper=True)
    def slapo_partition(self) -> Any:
        program = yield
        return program and self.tampered(program)


def not_divided(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def tie_not_summed(engine: Any) -> None:
    engine._parameters.reduce_ties = lambda: None


def not_in_the_optimizer(engine: Any) -> None:
    engine.optimizer.param_groups[0]["params"].pop()


def one_rank_apart(engine: Any) -> None:
    if torch.distributed.get_rank() == 1:
        next(engine.module.parameters()).register_hook(lambda gradient: gradient * 1.01)


def clipped_to_half(engine: Any) -> None:
    options = engine.options
    engine.options = replace(options, clip=options.clip / 2)


def nothing(engine: Any) -> None:
    """Leave it right."""


def relu_in_layer_2(sch: Any) -> None:
    sch["transformer.h.2.mlp.act"].replace(nn.ReLU())


def relu_in_a_gate(sch: Any) -> None:
    sch["model.layers.2.mlp.act_fn"].replace(nn.ReLU())


def mixed_qkv(sch: Any) -> None:
    attention = sch["transformer.h.1.attn.c_attn"].mod
    mixed = copy.deepcopy(attention)
    with torch.no_grad():
        mixed.weight.copy_(torch.cat([*attention.weight.chunk(3, 1)][::-1], 1))
    sch["transformer.h.1.attn.c_attn"].replace(mixed)


def planted(rank: int, layout: dict[str, int], fault: str, options: dict[str, Any]) -> Report:
    broken: Any = globals()[fault]
    in_schedule = broken in (relu_in_layer_2, mixed_qkv)
    plugins = [slapo_pipeline.plugin, slapo_sharding.plugin, slapo_torch.plugin, AfterBuild(nothing if in_schedule else broken)]

    def schedule(model: nn.Module) -> Schedule:
        return make_schedule(model, layout, plugins=Registry(plugins), change=broken if in_schedule else None)

    report = verify_engine(small("gpt2"), schedule, batches(layout.get("dp", 1))[0], "torch", **options)
    object.__setattr__(report, "trained", None)
    return report


ENGINE = "the schedule alone, in stages and in one process, is right: target 'torch' is to blame"
FAULTS: dict[str, tuple[str, dict[str, int], dict[str, Any], str, str | None]] = {
    "loss not divided": ("not_divided", PP, {"microbatches": 2}, "engine", "every number is 2 times what it should be"),
    "tie not summed": ("tie_not_summed", PP, {"microbatches": 2}, "engine", None),
    "not in the optimizer": ("not_in_the_optimizer", TP, {}, "engine", None),
    "one rank apart": ("one_rank_apart", PP, {"microbatches": 2}, "engine", None),
    "clipped too much": ("clipped_to_half", TP, {"clip": 0.01, "microbatches": 2}, "clip", None),
    "another activation": ("relu_in_layer_2", PP, {"microbatches": 2}, "1: sch['transformer.h.2.mlp.act'].replace(", None),
    "q, k and v mixed": ("mixed_qkv", PP, {"microbatches": 2}, "1: sch['transformer.h.1.attn.c_attn'].replace(", None),
}


QUICK = ("q, k and v mixed", "not in the optimizer", "tie not summed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in FAULTS])
def test_a_fault_is_found_and_the_engine_or_the_step_is_blamed(name: str) -> None:
    fault, layout, options, blamed, hint = FAULTS[name]
    report = same(run_distributed(planted, 2, layout, fault, options, timeout=100))
    print(report)
    assert not report.ok
    assert report.blame is not None
    if blamed in ("engine", "clip"):
        option = ", or clip=0.01, without which it is right" if blamed == "clip" else ""
        assert report.blame.engine == ENGINE + option
        assert report.blame.step is None
    else:
        assert report.blame.step is not None
        assert report.blame.step.startswith(blamed)
        assert report.blame.engine is None
    if hint:
        assert (report.blame.hint or "").startswith(hint)


def lost_at_a_border(rank: int, target: str) -> Report:
    x, model = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), twice(Skips)[0]
    batch = {"x": x, "mask": (x > 0).float(), "labels": x.flip(-1)}
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin, Border()])

    def schedule(model: nn.Module) -> Schedule:
        example = {"x": x[:2], "mask": torch.ones(2, 8)}
        sch: Any = create_schedule(model, mesh=mesh_of(pp=2), example_inputs=example, plugins=plugins)
        sch["layers.1"].cut_pipeline_stage()
        return sch  # type: ignore[no-any-return]

    if not target:
        batch.pop("labels")
        return verify(model, schedule(copy.deepcopy(model)), batch)
    report = verify_engine(model, schedule, batch, target, loss_fn=F.mse_loss, microbatches=2)
    object.__setattr__(report, "trained", None)
    return report


@pytest.mark.parametrize("target", ["", "torch"])
def test_what_is_lost_between_stages_is_the_cut_s_fault(target: str) -> None:
    report = same(run_distributed(lost_at_a_border, 2, target))
    assert report.blame is not None
    assert report.blame.unknown == "the model is right before it is cut into stages: the cuts are to blame, or what cuts"


def test_a_schedule_in_stages_runs_as_these_alone() -> None:
    model, batch = small("gpt2"), batches(1)[0]
    sch: Any = create_schedule(copy.deepcopy(model), example_inputs=batch)
    sch["transformer.h.1"].cut_pipeline_stage()
    before = copy.deepcopy(sch.mod.state_dict())
    report = verify(model, sch, level="step").check()
    assert "2 stages, one after the other in one process" in report.notes
    assert report.compared["updates"] == report.compared["gradients"] > 40
    torch.testing.assert_close(before, sch.mod.state_dict(), rtol=0, atol=0)
    assert sch.mod.training
    assert verify(model, sch, tuple(batch.values())[:1], "outputs", eval_mode=False).ok
    sch["transformer.h.3.mlp.act"].replace(nn.ReLU())
    blame = verify(model, sch).blame
    assert blame is not None
    assert blame.module == "transformer.h.3.mlp.act"
    assert blame.step == "2: sch['transformer.h.3.mlp.act'].replace(slapo_core.make(torch.nn.modules.activation.ReLU))"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps is 0; give a whole number from 1 on"),
        ({"reference": 3}, "the reference is 3; give the unmodified model"),
        ({"schedule": 3}, "schedule is 3; give a schedule, or a function that makes one of a model"),
        ({"schedule": lambda model: 3}, "the function that schedules gave 3; let it return the schedule"),
        ({"batch": {"input_ids": torch.zeros(1, 4, dtype=torch.long)}}, "do not show which number is the loss; give loss="),
        ({"tolerance": Tolerance(-1.0, 0.0)}, "give numbers from 0 on"),
    ],
    ids=["steps", "reference", "schedule", "function", "loss", "tolerance"],
)
def test_bad_input_is_one_sentence(given: dict[str, Any], message: str) -> None:
    arguments = {"reference": small("gpt2"), "schedule": create_schedule, "batch": batches(1)[0], **given}
    with pytest.raises(VerifyError, match=re.escape(message)):
        verify_engine(**arguments)


@pytest.mark.parametrize("name", ["logits, loss", "accuracy, loss", "nested", "by position", "by field", "by function"])
def test_the_loss_is_the_one_that_the_engine_takes(name: str) -> None:
    way, (idx, targets) = RETURNS[name], batch_of(1)
    report = verify_engine(
        GPT(way.output), create_schedule, {"idx": idx, "targets": targets}, microbatches=2, **way.options
    ).check()
    assert report.largest is not None
    assert report.largest.absolute > 0


def test_a_loss_that_outputs_do_not_show_is_asked_for() -> None:
    idx, targets = batch_of(1)
    with pytest.raises(VerifyError, match="do not show which number is the loss; give loss=, a key, a position or a function"):
        verify_engine(GPT(two), create_schedule, {"idx": idx, "targets": targets})


def test_a_loss_that_the_checks_would_have_refused_is_blamed() -> None:
    def root(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, labels).sqrt()

    torch.manual_seed(0)
    batch = {"input": torch.randn(8, 4), "labels": torch.randn(8, 4)}
    report = verify_engine(nn.Linear(4, 4), create_schedule, batch, loss_fn=root, microbatches=2, check=False)
    assert report.blame is not None
    found = report.blame.engine or ""
    assert "check=False is to blame, or microbatches=2, without which it is right; the checks" in found
    assert "refuse this: the loss is not a mean over rows" in found


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_parameter_without_elements_is_no_difference(options: dict[str, str]) -> None:
    model = nn.Sequential(OrderedDict(input=nn.Linear(4, 4), act=nn.ReLU()))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    batch = {"input": torch.ones(2, 4), "labels": torch.zeros(2, 4)}
    assert verify_engine(model, create_schedule, batch, loss_fn=F.mse_loss, **options).check().ok


def test_a_schedule_that_is_given_is_taken_again_and_left_as_it_is() -> None:
    model = small("gpt2")
    sch: Any = create_schedule(copy.deepcopy(model), example_inputs=batches(1)[0])
    sch["transformer.h.0"].checkpoint()
    report = verify_engine(model, sch, batches(1)[0], steps=2).check()
    assert report.trained is not None
    assert len(report.trained.losses) == 2
    assert json.loads(report.as_json())["subject"] == "torch"
    assert verify_engine(model, sch, batches(1)[0], steps=2, against=report.trained).ok
    sch.undo()
    torch.testing.assert_close(model.state_dict(), sch.mod.state_dict(), rtol=0, atol=0)


def test_what_a_model_in_float64_learns_is_what_it_does_in_float32() -> None:
    batch = batches(1)[0]
    single, double = (train_reference(model, batch, 1, None, sgd).updates for model in (small("gpt2"), small("gpt2").double()))
    for name, update in double.items():
        assert float(update.abs().max()) > 0
        torch.testing.assert_close(single[name], update, rtol=1e-3, atol=1e-5)
