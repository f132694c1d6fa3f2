"""The first step's checks on every engine, on two ranks: all come to the same verdict."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_core import get_logger
from slapo_testing import run_distributed
from tests.first_step_cases import MEANS, MIXING, NO_MEANS, QUIET, Loss, batch
from tests.slapo.gradient_injection import Net, batches
from tests.slapo_torch.layouts import mesh_of, message_of

SGD = partial(torch.optim.SGD, lr=0.1)
TARGETS = ("torch", "deepspeed", "megatron")
LAYOUTS: tuple[dict[str, int], ...] = ({"dp": 2}, {"pp": 2}, {"tp": 2})


class InStages(nn.Module):
    """Two linear layers with something between them, and another one behind, that make a loss or two vectors of each row."""

    def __init__(self, early: nn.Module, late: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        self.first, self.early, self.up = nn.Linear(6, 12), early, nn.Linear(12, 24)
        self.down, self.late, self.head = nn.Linear(24, 12), late, nn.Linear(12, 8)
        self.logits, self.loss = nn.Linear(12, 30), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = self.early(self.first(x))
        h = self.late(self.down(torch.tanh(self.up(h))))
        one, other = F.normalize(self.head(h).unflatten(-1, (2, 4)), dim=-1).unbind(1)
        out = {"one": one, "other": other, "logits": self.logits(h).unflatten(-1, (6, 5))}
        return out if self.loss is None else self.loss(out, labels)


def _cases() -> dict[str, tuple[Any, Any, Loss]]:
    """Code between the layers, and the loss."""
    relu, entropy = nn.ReLU, MEANS["cross entropy"]
    found: dict[str, tuple[Any, Any, Loss]] = {name: (relu, relu, NO_MEANS[name]) for name in ("clip", "sum")}
    found["quiet"] = (QUIET["functional dropout"], QUIET["layer norm"], entropy)
    found["quiet pairs"] = (relu, QUIET["dropout"], MEANS["pairs"])
    for name in ("batch norm 1d", "mixup", "centred"):
        found[f"{name} early"] = (MIXING[name][0], relu, entropy)
        found[f"{name} late"] = (relu, MIXING[name][0], entropy)
    return found


def _verdict(case: str, target: str, layout: dict[str, int], own: bool, **options: Any) -> str:
    """Return the refusal, or else what is logged, or else nothing."""
    early, late, loss = _cases()[case]
    torch.manual_seed(0)
    mesh, lines = mesh_of(**layout), []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    model = InStages(early(), late(), loss if own else None)
    rows = batch(8)
    example = {name: value[:2] for name, value in rows.items() if own or name != "labels"}
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=example)
    if layout.get("tp"):
        sch.tensor_parallel({"up": "colwise", "down": "rowwise"})
    if layout.get("pp"):
        sch["early"].cut_pipeline_stage()
    part = {name: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, value in rows.items()}
    given = {} if own else {"loss_fn": loss}
    engine = slapo.build(sch, target, optimizer=SGD, microbatches=1 if layout.get("dp") else 2, **given, **options)
    handler = Kept(logging.INFO)
    get_logger().addHandler(handler)
    try:
        engine.train_batch(**part)
    except slapo.SlapoError as err:
        return f"refused: {err}"
    finally:
        get_logger().removeHandler(handler)
        engine.close()
    return "; ".join(line for line in lines if "got no gradient" not in line)


def _verdicts(rank: int, targets: list[str], chosen: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for target in targets:
        for layout in LAYOUTS:
            for case in chosen:
                for own in (False, True) if target == "torch" and "dp" in layout else (True,):
                    found[f"{target}, {layout}, {case}, {own}"] = _verdict(case, target, layout, own)
        found[f"{target}, strict"] = _verdict("batch norm 1d early", target, {"pp": 2}, True, strict=True)
        found[f"{target}, off"] = _verdict("clip", target, {"dp": 2}, True, check=False)
        dist.barrier()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("targets", "cases"),
    [
        (["torch"], ("sum", "quiet pairs", "batch norm 1d early", "mixup late", "centred late")),
        pytest.param(["torch"], tuple(_cases()), marks=pytest.mark.slow),
        pytest.param(
            ["deepspeed", "megatron"], ("clip", "quiet", "batch norm 1d early", "centred late"), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_engines_come_to_the_same_verdict_on_all_ranks(targets: list[str], cases: tuple[str, ...]) -> None:
    ranks = run_distributed(_verdicts, 2, targets, cases, timeout=280)
    wrong = {}
    for name, own in ranks[0].items():
        texts = [own, ranks[1][name]]
        if ", clip," in name or ", sum," in name:
            ok = all(text.startswith("refused: the loss is not a mean over rows") for text in texts)
        elif "strict" in name:
            ok = all(text.startswith("refused: BatchNorm1d 'early' mixes") for text in texts)
        elif "off" in name:
            ok = own.startswith("checks are off: 'rows', losses") and "; 'injected', gradients" in own
        elif "quiet" in name:
            ok = texts == ["", ""]
        else:
            kind, place = name.split(", ")[2].rsplit(" ", 1)
            path = f"'{place}.1'" if kind == "centred" else f"'{place}'"
            # a cut model runs what has no parameters as a part of the stage
            paths = [path, "the forward of InStages"] if kind == "mixup" and "pp" in name else [path]
            ok = any(f"{each} mixes the rows of a micro-batch" in own for each in paths)
            ok = ok and own.count("mixes the rows of a micro-batch") == 1 and texts[1] == ""
        if not ok:
            wrong[name] = texts
    assert wrong == {}


class MaskedInStages(InStages):
    """A mean by hand over what a mask marks."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return (out["logits"].square().mean((1, 2)) * mask).sum() / mask.sum()


def _later(rank: int) -> dict[str, str]:
    """Return the error of a second step whose masks differ between replicas only, or between micro-batches."""
    found = {}
    x = batch(8)["x"]
    uneven = torch.tensor([1.0, 1, 1, 1, 0.25, 0.25, 0.25, 0.25])
    for target, layout in ((target, layout) for target in TARGETS for layout in ({"dp": 2}, {"pp": 2})):
        for options in ({}, {"data_parallel": "fsdp"}) if target == "torch" and "dp" in layout else ({},):
            torch.manual_seed(0)
            mesh = mesh_of(**layout)
            model = MaskedInStages(nn.ReLU(), nn.ReLU())
            sch = slapo.create_schedule(model, mesh=mesh, example_inputs={"x": x[:2], "mask": uneven[:2]})
            if layout.get("pp"):
                sch["early"].cut_pipeline_stage()
            engine = slapo.build(sch, target, optimizer=SGD, microbatches=1 if layout.get("dp") else 2, **options)
            dp, own = mesh["dp"].size(), mesh["dp"].get_local_rank()
            name, steps = f"{target}, {layout}, {options}", 0
            try:
                for mask in (torch.ones(8), torch.ones(8), uneven):
                    engine.train_batch(x=x.chunk(dp)[own], mask=mask.chunk(dp)[own])
                    steps += 1
            except slapo.SlapoError as err:
                found[name] = f"{steps}: {err}"
            finally:
                engine.close()
            dist.barrier()
    return found


class Asking(InStages):
    """Asks whether gradients are computed, as forwards with a switch for checkpoints do."""

    checkpoints = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if (torch.is_grad_enabled() and self.checkpoints) or not self.first(x).requires_grad:
            x = x.clone()
        return super().forward(x, labels)


def _asking_refused(rank: int) -> str:
    torch.manual_seed(0)
    rows = batch(8)
    sch = slapo.create_schedule(
        Asking(nn.ReLU(), nn.ReLU(), NO_MEANS["sum"]),
        mesh=mesh_of(pp=2),
        example_inputs={name: value[:4] for name, value in rows.items()},
    )
    sch["early"].cut_pipeline_stage()
    engine = slapo.build(sch, "torch", optimizer=SGD, microbatches=2)
    return message_of(lambda: engine.train_batch(**rows))


@pytest.mark.multiproc
def test_stages_that_ask_for_gradients_are_looked_at_too() -> None:
    for message in run_distributed(_asking_refused, 2):
        assert message.startswith("BuildError: the loss is not a mean over rows")


@pytest.mark.multiproc
def test_engines_look_again_where_replicas_first_differ() -> None:
    for found in run_distributed(_later, 2, timeout=120):
        assert len(found) == 7
        assert {name: text for name, text in found.items() if not text.startswith("2: the loss is not a mean over rows")} == {}


class Penalised(InStages):
    """Adds to a loss the size of its gradient by the input."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        logits = super().forward(x)["logits"]
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * gradient.square().sum(-1).mean()


def _penalised(rank: int) -> list[float]:
    """How far losses are from those of the whole batch."""
    found, rows = [], batch(8)
    for target in TARGETS:
        torch.manual_seed(0)
        mesh, model = mesh_of(dp=2), Penalised(nn.Tanh(), nn.Tanh())
        expected = model(**rows).item()
        engine = slapo.build(slapo.create_schedule(model, mesh=mesh), target, optimizer=SGD, microbatches=2)
        own = {name: value.chunk(2)[mesh["dp"].get_local_rank()] for name, value in rows.items()}
        found.append(abs(float(engine.train_batch(**own)) - expected))
        engine.close()
    return found


@pytest.mark.multiproc
def test_a_forward_that_differentiates_trains() -> None:
    for found in run_distributed(_penalised, 2, timeout=60):
        assert max(found) < 1e-5


def _verified(rank: int) -> list[str]:
    """Return whether ``verify_engine`` finds the errors of the disabled checks."""
    mesh, found = mesh_of(dp=2), []
    torch.manual_seed(0)
    clip = InStages(nn.ReLU(), nn.ReLU(), NO_MEANS["clip"])
    for model, rows in ((clip, batch(8)), (Net("attached"), batches(8)[0])):
        for target in TARGETS:
            report = slapo.verify_engine(
                model, lambda copied: slapo.create_schedule(copied, mesh=mesh), rows, target, microbatches=2, check=False
            )
            found.append("same" if report.ok else str(report))
    with_checks = slapo.verify_engine(
        Net("attached"), lambda copied: slapo.create_schedule(copied, mesh=mesh), batches(8)[0], microbatches=2
    )
    found.append("same" if with_checks.ok else str(with_checks))
    try:
        slapo.verify_engine(clip, lambda copied: slapo.create_schedule(copied, mesh=mesh), batch(8), microbatches=2)
    except slapo.SlapoError as err:
        found.append(str(err))
    return found


@pytest.mark.slow
@pytest.mark.multiproc
def test_verify_engine_sees_what_the_checks_would_have() -> None:
    for found in run_distributed(_verified, 2, timeout=200):
        for text in found[:3]:
            assert "check=False is to blame" in text, text
            assert "refuse this: the loss is not a mean over rows" in text, text
        for text in found[3:6]:
            assert "or check=False, without which it is right" in text or "microbatches=2, without which it is right" in text, (
                text
            )
        assert found[6] == "same"
        assert "not a mean over rows" in found[7]
