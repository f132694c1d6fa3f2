"""``verify``: what it compares, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo_core import VerifyError, create_schedule, hookimpl, rng_state
from slapo_verify import Verify, verify
from slapo_verify.comparison import Tolerance
from slapo_weights import made_of

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        out = self.down(self.drop(self.act(self.up(self.norm(x)))))
        return {"out": out, "loss": out.square().mean()}


def make_schedule(reference: nn.Module) -> slapo.Schedule:
    return create_schedule(copy.deepcopy(reference), example_inputs=X)


def wrong(reference: nn.Module) -> slapo.Schedule:
    return make_schedule(reference)["act"].replace(nn.ReLU()).get_top_schedule()


@pytest.mark.parametrize("eval_mode", [True, False])
@pytest.mark.parametrize("level", ["outputs", "grads", "step"])
def test_what_is_compared_and_that_all_is_left_as_it_was(level: str, eval_mode: bool) -> None:
    reference = Model()
    sch = make_schedule(reference)
    sch["up"].mod.eval()
    models = (reference, sch.mod)
    for model in models:
        model.up.weight.grad = torch.ones(16, 8)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    state = rng_state()
    report = verify(reference, sch, level=level, eval_mode=eval_mode).check()
    assert report.compared == {
        "weights": 6,
        "outputs": 2,
        **({"gradients": 6} if level != "outputs" else {}),
        **({"updates": 6} if level == "step" else {}),
        **({} if eval_mode else {"buffers": 3}),
    }
    assert report.largest is None
    assert "dropout is off" in str(report) if eval_mode else "training mode" in str(report)
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert torch.equal(model.up.weight.grad, torch.ones(16, 8))
        assert model.down.weight.grad is None
        assert model.training
    assert not sch["up"].mod.training
    assert torch.equal(rng_state().devices["cpu"], state.devices["cpu"])


def test_a_report_as_text_and_as_data() -> None:
    reference = Model()
    report = verify(reference, wrong(reference))
    assert not report
    with pytest.raises(VerifyError, match=r"^NOT the same: .*\noutput\['out'\]: 48 of 48 elements differ; largest absolute"):
        report.check()
    data = json.loads(report.as_json())
    assert data["ok"] is False
    assert data["blame"]["step"] == "1: sch['act'].replace(slapo_core.make(torch.nn.modules.activation.ReLU))"
    assert data["blame"]["module"] == "act"
    assert verify(reference, wrong(reference), blame=False).blame is None
    assert verify(reference, wrong(reference), tolerance=Tolerance(100.0, 0.0))


def test_the_step_of_an_optimizer_is_compared_where_gradients_are_alike() -> None:
    reference = Model()
    sch = make_schedule(reference)
    frozen = [parameter.requires_grad_(False) for name, parameter in sch.mod.named_parameters() if name == "up.bias"]
    assert len(frozen) == 1
    report = verify(reference, sch, level="step", optimizer=torch.optim.AdamW)
    assert report.blame is not None
    assert report.blame.hint == "'up.bias' is frozen since, and was not before"
    assert report.blame.unknown == "no step was taken"


def test_a_model_changed_outside_of_the_schedule_is_told_apart() -> None:
    reference = Model()
    sch = make_schedule(reference)
    sch["act"].replace(nn.GELU())
    sch.mod.act = nn.ReLU()
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.step is None
    assert report.blame.unknown == "the same steps on a fresh copy are right: something else has changed the model"


def test_a_model_that_differs_from_itself_is_told() -> None:
    class Noisy(Model):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x * self.calls)

    reference = Noisy()
    sch = make_schedule(reference)
    reference(X)
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.unknown == "the unmodified model differs from itself: it draws random numbers, or keeps a state"


def test_nan_is_never_the_same() -> None:
    reference = Model()
    with torch.no_grad():
        reference.down.bias[0] = float("nan")
    report = verify(reference, make_schedule(reference))
    assert [each.what for each in report.differences][:2] == ["weight of 'down.bias'", "output['out']"]


def test_a_with_verifies_its_own_steps_alone() -> None:
    reference = Model()
    sch = wrong(reference)
    with Verify(sch, eval_mode=False) as proof:
        sch["up"].replace(copy.deepcopy(sch["up"].mod))
    assert proof.report
    sch["down"].replace(copy.deepcopy(sch["down"].mod))
    with pytest.raises(VerifyError, match=r"step to blame: 4: sch\['act'\]"), Verify(sch, X, device="cpu"):
        sch["act"].replace(nn.SiLU())
    with pytest.raises(VerifyError, match="device is 'meta' and the model is on 'cpu'; move it there, or leave device out"):
        Verify(sch, device="meta").__enter__()
    with Verify(sch, X, device="nowhere", enable=False) as off:
        sch["act"].replace(nn.Tanh())
    assert off.report is None
    with pytest.raises(VerifyError, match="sch is 3; give a schedule"):
        Verify(3)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), Verify(sch, X):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "gradients"}, "no level 'gradients'"),
        ({"level": 3}, "no level '3'"),
        ({"reference": 3}, "the reference is 3; give the unmodified model"),
        ({"reference": "itself"}, "the reference is the scheduled model itself"),
        ({"sch": 3}, "sch is 3; give a schedule"),
        ({"reference": nn.Linear(8, 8)}, "the reference has no parameter 'norm.weight'"),
        ({"reference": nn.Linear(8, 8, device="meta")}, "the reference has no parameter 'norm.weight'"),
        ({"level": "step", "loss": lambda outputs: outputs["loss"].detach()}, "level='step' needs a loss"),
        ({"inputs": None, "sch": "no inputs"}, "no inputs to run the models on"),
        ({"tolerance": 1e-3}, "tolerance is 0.001; give a Tolerance"),
        ({"loss": 3}, "loss is 3; give a function of the outputs"),
        ({"optimizer": 3, "level": "step"}, "optimizer is 3; give a function of the parameters"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], message: str) -> None:
    reference = Model()
    given = dict(options)
    sch: Any = {
        "no inputs": lambda: create_schedule(copy.deepcopy(reference)),
    }.get(given.get("sch"), lambda: make_schedule(reference))()
    if given.pop("sch", None) == 3:
        sch = 3
    chosen = given.pop("reference", reference)
    with pytest.raises(VerifyError, match=message):
        verify(sch.mod if chosen == "itself" else chosen, sch, **given)


def test_names_of_the_facade() -> None:
    assert slapo.verify is verify
    assert slapo.Verify is Verify
    assert hookimpl is slapo.hookimpl


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_rounding_is_measured_and_faults_are_found(dtype: torch.dtype) -> None:
    reference = Model().to(dtype)
    sch = create_schedule(copy.deepcopy(reference), example_inputs=X.to(dtype))
    sch["up"].decompose()  # rounds the sum with the bias once more
    assert verify(reference, sch).check().largest is not None
    sch["act"].replace(nn.ReLU())
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.step == "2: sch['act'].replace(slapo_core.make(torch.nn.modules.activation.ReLU))"
    assert report.blame.module == "act"


class Slightly(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 5e-5)


def test_what_rounding_a_large_weight_does_to_its_update_is_allowed() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(64, 64), nn.Identity())
    nn.init.uniform_(reference[0].weight, 500, 1000)  # type: ignore[arg-type]  # whose next numbers are 6e-5 apart
    sch = create_schedule(copy.deepcopy(reference), example_inputs=torch.rand(4, 64) * 1e-2)
    sch["1"].replace(Slightly())
    report = verify(reference, sch, level="step").check()
    assert report.largest is not None
    assert report.largest.what == "output"
    updated = verify(reference, sch, level="step", tolerance=Tolerance(1e-8, 1e-4, 1e-4), blame=False)
    assert {each.what for each in updated.differences} == {"update of '0.weight'"}


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Fused(nn.Module):
    """The three as one product."""

    def __init__(self, layers: list[nn.Linear], says: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([each.weight.detach() for each in layers]) * scale)
        self.bias = nn.Parameter(torch.cat([each.bias.detach() for each in layers]))
        for name, parameter in self.named_parameters() if says else ():
            made_of(parameter, [getattr(each, name) for each in layers])

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x, self.weight, self.bias).chunk(3, -1)


def fuse(sch: slapo.Schedule, **options: Any) -> None:
    def projections(x: Any) -> Any:
        return tuple(slapo.call_module(name, x) for name in ("query", "key", "value"))

    sch.trace()
    layers = [sch[name].mod for name in ("query", "key", "value")]
    sch.replace(Fused(layers, **options), sch.find(projections))  # type: ignore[arg-type]


def test_a_fused_parameter_is_compared_by_what_it_is_made_of() -> None:
    reference = Attention()
    for options, compared in (({}, 2), ({"says": True}, 8)):
        sch = make_schedule(reference)
        fuse(sch, **options)
        report = verify(reference, sch, level="step").check()
        assert report.compared == {"weights": compared, "outputs": 1, "gradients": compared, "updates": compared}
        assert ("it has no 'query.weight' and 5 more any more" in str(report)) is not options.get("says", False)


@pytest.mark.parametrize("options", [{}, {"says": True}], ids=str)
def test_a_fault_in_a_fused_parameter_is_found(options: dict[str, bool]) -> None:
    reference = Attention()
    sch = make_schedule(reference)
    fuse(sch, scale=1.01, **options)
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.step is not None
    assert report.blame.step.startswith("2: sch.replace(")
    assert [each.what for each in report.differences][:1] == (["weight of 'query.weight'"] if options else ["output"])


def test_what_is_gone_without_anything_new_in_its_place_is_a_difference() -> None:
    reference = Attention()
    sch = make_schedule(reference)
    with torch.no_grad():
        for each in (reference, sch.mod):
            each.first.bias.zero_()
    bare = nn.Linear(8, 8, bias=False)
    bare.weight = sch["first"].mod.weight
    sch["first"].replace(bare)
    report = verify(reference, sch)
    assert (
        report.differences[0].message == "weight of 'first.bias': after has no parameter of this original name, 1 are missing"
    )


def test_what_a_trace_for_another_mode_runs_is_not_looked_at() -> None:
    reference = Attention()
    sch = make_schedule(reference)
    sch.trace()  # in training; evaluation traces again
    (found,) = sch.find(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v))
    sch.replace(lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v) * 1.5, [found])
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.module is None
