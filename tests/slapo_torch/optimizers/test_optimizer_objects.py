"""Optimizers and learning-rate schedules given as objects, and fp16 with a scaled loss."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Registry, build, create_schedule
from slapo_testing import run_distributed

from ..layouts import adamw, gpt2, mesh_of, my_part, scheduled, tokens

CUT = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def _engine(model: nn.Module, **config: Any) -> Any:
    plugins = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_torch.plugin])
    return build(create_schedule(model, plugins=plugins), "torch", **{"optimizer": adamw, "loss_fn": F.cross_entropy, **config})


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights that decay and others that do not, as usual."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, eps=1e-3)


SCHEDULES: dict[str, Any] = {
    "step": partial(StepLR, step_size=2),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=8),
    "plateau": partial(ReduceLROnPlateau, patience=0, threshold=10.0),
    "warm-up": partial(LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 3)),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("as_objects", [True, False])
def test_steps_equal_a_plain_loop(kind: str, as_objects: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    reference = copy.deepcopy(model)
    if as_objects:
        given = _groups(model)
        engine = _engine(model, optimizer=given, lr_scheduler=SCHEDULES[kind](given))
        assert engine.optimizer is given
    else:
        engine = _engine(model, optimizer=lambda parameters: _groups(model), lr_scheduler=SCHEDULES[kind])
    optimizer = _groups(reference)
    rate = SCHEDULES[kind](optimizer)
    for _ in range(5):
        loss = engine.train_batch(input=X, labels=Y)
        optimizer.zero_grad()
        expected = F.cross_entropy(reference(X), Y)
        expected.backward()
        optimizer.step()
        rate.step(expected.item()) if kind == "plateau" else rate.step()
        torch.testing.assert_close(loss, expected.detach())
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


READ = "aten._local_scalar_dense.default"


class _Waits(TorchDispatchMode):
    """Notes the operators for which the host would wait for a device: to read a number, or to count what a batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.ne.Scalar):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "microbatches", "expected"),
    [("step", 1, set()), ("plateau", 1, {READ}), ("step", 2, {"aten.ne.Scalar", READ})],
    ids=["alone", "a schedule reads the loss", "labels of two are counted"],
)
def test_one_rank_by_itself_waits_for_no_number_that_it_does_not_need(kind: str, microbatches: int, expected: set[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = _engine(model, optimizer=sgd, lr_scheduler=SCHEDULES[kind], microbatches=microbatches)
    engine.train_batch(input=X, labels=Y)  # whose checks wait
    with _Waits() as waits:
        engine.train_batch(input=X, labels=Y)
    assert {*waits.seen} == expected


def _object_in_a_layout(rank: int, layout: dict[str, int], kind: str, per_rank: int) -> tuple[float, list[int]]:
    mesh = mesh_of(**layout)
    model = gpt2()
    reference = copy.deepcopy(model)
    given = _groups(model)
    rate = StepLR(given, step_size=1, gamma=0.5)
    data = tokens(layout.get("dp", 1))
    schedule = scheduled(model, mesh, my_part(data[0], mesh), per_rank)
    config: dict[str, Any] = {"optimizer": given, "lr_scheduler": rate, "microbatches": 4, "pipeline_schedule": kind}
    engine: Any = build(schedule, "torch", **config)
    optimizer = _groups(reference)
    for index, batch in enumerate(data):
        engine.train_batch(**my_part(batch, mesh))
        optimizer.zero_grad()
        reference(input_ids=batch, labels=batch).loss.backward()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1e-2 * 0.5**index
        optimizer.step()
    found, expected = schedule.full_state(), dict(reference.named_parameters())
    worst = max(float((found[name] - parameter).abs().max()) for name, parameter in expected.items())
    return worst, [len(group["params"]) for group in given.param_groups]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "kind", "per_rank"),
    [
        pytest.param({"pp": 2, "tp": 2}, "1f1b", 1, marks=pytest.mark.slow),
        ({"pp": 2}, "zbv", 2),
        pytest.param({"dp": 2}, "1f1b", 1, marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_of_the_unmodified_model_trains_what_took_its_place(
    layout: dict[str, int], kind: str, per_rank: int
) -> None:
    size = layout.get("pp", 1) * layout.get("dp", 1) * layout.get("tp", 1)
    found = run_distributed(_object_in_a_layout, size, layout, kind, per_rank)
    for worst, _ in found:
        assert worst < 1e-5
    if layout.get("pp", 1) > 1 and kind == "1f1b":
        assert found[0][1] != [19, 33]  # this rank's parameters alone


def test_objects_that_cannot_be_taken_over_stay_as_they_are() -> None:
    model = nn.Linear(4, 3)
    stepped = torch.optim.AdamW(model.parameters())
    F.cross_entropy(model(X), Y).backward()
    stepped.step()
    with pytest.raises(BuildError, match="the optimizer has stepped already"):
        _engine(model, optimizer=stepped)
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    listed = list(other.param_groups[0]["params"])
    with pytest.raises(BuildError, match=r"a parameter of shape \(2, 2\) that is not a parameter of the scheduled model"):
        _engine(model, optimizer=other)
    assert all(one is two for one, two in zip(other.param_groups[0]["params"], listed, strict=True))
    with pytest.raises(BuildError, match="lr_scheduler= is a schedule of another optimizer"):
        _engine(model, lr_scheduler=StepLR(other, step_size=1))
    with pytest.raises(BuildError, match="lr_scheduler= is of optimizer=, which is not given; give optimizer="):
        _engine(model, optimizer=None, lr_scheduler=StepLR(other, step_size=1))


def test_a_resumed_schedule_goes_on(tmp_path: Path) -> None:
    def engine() -> Any:
        torch.manual_seed(3)
        return _engine(nn.Linear(4, 3), lr_scheduler=partial(StepLR, step_size=2), precision="fp16", loss_scale=64.0)

    first = engine()
    for _ in range(3):
        first.train_batch(input=X, labels=Y)
    first.save(tmp_path)
    ahead = [first.train_batch(input=X, labels=Y) for _ in range(2)]
    second = engine()
    second.load(tmp_path)
    assert second.lr_scheduler.last_epoch == 3
    assert [second.train_batch(input=X, labels=Y) for _ in range(2)] == ahead
    with pytest.raises(
        BuildError, match="the checkpoint's learning-rate schedule is StepLR, the engine's is ReduceLROnPlateau"
    ):
        _engine(nn.Linear(4, 3), lr_scheduler=ReduceLROnPlateau).load(tmp_path)


def _half(rank: int, layout: dict[str, int], kind: str, per_rank: int) -> tuple[list[float], list[float], list[bool]]:
    mesh = mesh_of(**layout)
    model = gpt2()
    reference = copy.deepcopy(model)
    data = tokens(layout.get("dp", 1))
    schedule = scheduled(model, mesh, my_part(data[0], mesh), per_rank)
    config: dict[str, Any] = {"precision": "fp16", "loss_scale": 2.0**30, "microbatches": 4, "pipeline_schedule": kind}
    engine: Any = build(schedule, "torch", optimizer=adamw, **config)
    optimizer = adamw(reference.parameters())
    scales, unchanged = [], []
    for _ in range(40):
        before = [parameter.clone() for parameter in engine.module.parameters()]
        engine.train_batch(**my_part(data[0], mesh))
        scales.append(engine._loss_scale.value)
        after = engine.module.parameters()
        unchanged.append(all(torch.equal(one, two) for one, two in zip(before, after, strict=True)))
        if not unchanged[-1]:
            break
    reference(input_ids=data[0], labels=data[0]).loss.backward()
    optimizer.step()
    differences = []
    for batch in data[1:]:
        loss = engine.train_batch(**my_part(batch, mesh))
        expected = reference(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        differences.append(abs(loss.item() - expected.item()))
    return differences, scales, unchanged


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "kind", "per_rank"),
    [pytest.param({"pp": 2, "dp": 2}, "1f1b", 1, marks=pytest.mark.slow), ({"pp": 2}, "1f1b", 1)],
)
def test_fp16_leaves_out_steps_that_overflow_and_stays_near_fp32(layout: dict[str, int], kind: str, per_rank: int) -> None:
    found = run_distributed(_half, layout["pp"] * layout.get("dp", 1), layout, kind, per_rank)
    assert len({tuple(scales) for _, scales, _ in found}) == 1
    for differences, scales, unchanged in found:
        assert len(scales) > 1
        assert scales[0] == 2.0**29
        assert unchanged == [True] * (len(scales) - 1) + [False]
        assert max(differences) < 5e-2


class Two(nn.Module):
    """Two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def _unfrozen_late(rank: int, kind: str, path: Path | None) -> tuple[float, float, float]:
    """The learning rate, what it would be in one process, and the largest difference of this rank's weights."""
    mesh = mesh_of(pp=2)
    torch.manual_seed(0)
    reference = Two()
    reference.a.requires_grad_(False)

    def built(model: nn.Module) -> Any:
        schedule = create_schedule(model, mesh=mesh, example_inputs={"x": X[:4]}, plugins=CUT)
        schedule["a"].cut_pipeline_stage()
        options: dict[str, Any] = {"lr_scheduler": SCHEDULES[kind], "loss_fn": F.cross_entropy, "microbatches": 2}
        return build(schedule, "torch", optimizer=adamw, **options)

    engine = built(model := copy.deepcopy(reference))
    optimizer = adamw(reference.parameters())
    rate = SCHEDULES[kind](optimizer)
    for step in range(5):
        if step == 2 and path is not None:
            engine.save(path)
            engine = built(model := copy.deepcopy(reference))
            engine.load(path)
        if step == 3:
            model.requires_grad_(True)
            reference.requires_grad_(True)
        optimizer.zero_grad()
        expected = F.cross_entropy(reference(X), Y)
        expected.backward()
        optimizer.step()
        rate.step(expected.item()) if kind == "plateau" else rate.step()
        engine.train_batch(x=X, labels=Y)
    wanted = dict(reference.named_parameters())
    worst = max(float((wanted[name] - found).abs().max()) for name, found in engine.module.named_parameters())
    return engine.optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"], worst


@pytest.mark.multiproc
@pytest.mark.parametrize(("kind", "resumes"), [("one cycle", False), ("plateau", True)])
def test_a_rank_that_trains_late_joins_the_schedule_where_the_others_are(kind: str, resumes: bool, tmp_path: Path) -> None:
    for found, expected, worst in run_distributed(_unfrozen_late, 2, kind, tmp_path if resumes else None):
        assert found == pytest.approx(expected)
        assert worst < 1e-5
