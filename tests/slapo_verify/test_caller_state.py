"""Circumstances of a caller, state of a model, wrong arguments: no false alarm, and no fault is missed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import VerifyError, create_schedule
from slapo_verify import Report, run_as_threads, verify, verify_engine
from slapo_verify.comparison import Tolerance

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def cut(sch: Any) -> None:
    sch["0"].shard("weight", 0)
    sch["0"].shard("bias", 0)
    sch["2"].shard("weight", 1)
    sch["0"].sync("bwd_post", "all_reduce")
    sch["2"].sync("fwd_post", "all_reduce")


def on_two_ranks(context: Callable[[], AbstractContextManager[Any]], **options: Any) -> Report:
    def work() -> Report:
        reference = model()
        sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
        cut(sch)
        with context():
            return verify(reference, sch, **options)

    return run_as_threads(work, 2)[0]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_the_caller_is_in_changes_nothing(context: Any) -> None:
    report = on_two_ranks(context, level="step").check()
    assert report.compared == {"weights": 6, "outputs": 1, "gradients": 6, "updates": 6}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_an_engine_likewise(context: Any) -> None:
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, labels)

    with context():
        verify_engine(model(), create_schedule, {"input": X, "labels": X}, loss_fn=loss, microbatches=2).check()


@pytest.mark.parametrize("batch", [(X, X), {"input": X, "target": X}, ((X,), {"target": X})])
def test_labels_are_found_as_engines_find_them(batch: Any) -> None:
    verify_engine(model(), create_schedule, batch, loss_fn=nn.functional.mse_loss, microbatches=2).check()


def test_autocast_is_told() -> None:
    report = on_two_ranks(lambda: torch.autocast("cpu", torch.bfloat16))
    assert "autocast is off in both models, for cpu" in report.notes


def test_an_optimizer_that_divides_by_the_gradient_makes_nothing_of_rounding() -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, eps=1e-30)

    on_two_ranks(torch.enable_grad, level="step", optimizer=adam).check()


def test_an_optimizer_that_looks_at_whole_matrices_is_found_on_their_parts() -> None:
    class ByNorm(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for each in self.param_groups[0]["params"]:
                each.data -= each.grad / each.grad.norm()

    report = on_two_ranks(torch.enable_grad, level="step", optimizer=lambda parameters: ByNorm(parameters, lr=1.0))
    assert {each.what for each in report.differences} == {f"update of {name!r}" for name in ("0.weight", "0.bias", "2.weight")}


def test_a_fault_of_one_ranks_part_is_found() -> None:
    def work() -> Report:
        reference = model()
        sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
        cut(sch)
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                sch.mod[0].weight[3, 2] += 1e-5
        return verify(reference, sch)

    one, other = run_as_threads(work, 2)
    assert one.differences[0].what == other.differences[0].what == "weight of '0.weight'"


class Counting(nn.Module):
    """Puts a new buffer in the place of the one before at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


def test_buffers_that_are_replaced_are_put_back() -> None:
    reference = Counting()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
    for _ in range(2):
        verify(reference, sch).check()
    assert reference.calls == sch.mod.calls == 1


class Odd(nn.Module):
    """Parameters of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(2.0))
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, self.order] * self.mask * self.scale


def test_parameters_that_are_no_floating_point_or_empty() -> None:
    reference = Odd()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
    assert verify(reference, sch, level="step").check().compared["updates"] == 6


def test_nothing_to_differentiate_is_told() -> None:
    reference = model().requires_grad_(False)
    report = verify(reference, create_schedule(copy.deepcopy(reference), example_inputs=X))
    assert "nothing that the unmodified model returns has gradients, of which none are compared; give loss=" in report.notes


def test_nan_of_the_unmodified_model_is_no_random_number() -> None:
    reference = model()
    with torch.no_grad():
        next(reference.parameters())[0, 0] = torch.nan
    report = verify(reference, create_schedule(copy.deepcopy(reference), example_inputs=X))
    assert report.blame is not None
    assert report.blame.unknown == "the unmodified model has NaN, which is equal to nothing"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": lambda outputs: 3}, "loss gave 3; let it return a tensor with one number, or None"),
        ({"loss": lambda outputs: outputs}, r"loss gave a tensor of shape \(4, 8\); let it return"),
        ({"optimizer": lambda parameters: None}, "optimizer gave None; let it return an optimizer"),
        ({"optimizer": torch.optim.SGD, "level": "grads"}, "an optimizer steps at level='step', and level is 'grads'; give"),
        ({"eval_mode": None}, "eval_mode is None; give True or False"),
        ({"optimizer": torch.optim.SGD(model().parameters())}, "optimizer is a SGD; give a function of the parameters"),
        ({"tolerance": Tolerance(-1.0, 0.0)}, "give numbers from 0 on"),
        ({"tolerance": Tolerance(0.0, float("nan"))}, "give numbers from 0 on"),
        ({"tolerance": Tolerance(float("inf"), 0.0)}, "give numbers from 0 on"),
    ],
    ids=["loss number", "loss tensor", "no optimizer", "wrong level", "mode", "made", "negative", "nan", "infinite"],
)
def test_what_is_given_wrongly(given: dict[str, Any], said: str) -> None:
    reference = model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
    with pytest.raises(VerifyError, match=said):
        verify(reference, sch, **{"level": "step", **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": True}, "steps is True; give a whole number from 1 on"),
        ({"tolerance": 0.1}, "tolerance is 0.1; give a Tolerance"),
        ({"against": 3}, "against is 3; give the name of an engine"),
        ({"loss_fn": 3}, "loss_fn is 3; give a function"),
        ({"optimizer": 3}, "optimizer is 3; give a function"),
        ({"loss_fn": nn.functional.mse_loss}, "give 'labels' in the batch, or loss_over='replicas'"),
    ],
    ids=["steps", "tolerance", "against", "loss", "optimizer", "no labels"],
)
def test_what_an_engine_is_given_wrongly(given: dict[str, Any], said: str) -> None:
    with pytest.raises(VerifyError, match=said):
        verify_engine(model(), create_schedule, **{"batch": {"input": X}, **given})


def test_models_that_share_parameters_are_refused() -> None:
    reference = model()
    sch = create_schedule(nn.Sequential(*reference), example_inputs=X)
    with pytest.raises(VerifyError, match=r"share '0.weight'; schedule a copy.deepcopy of the reference"):
        verify(reference, sch)


def test_a_model_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        reference = model()
    sch = create_schedule(model(), example_inputs=X)
    with pytest.raises(VerifyError, match="'0.weight' of the reference was made in inference mode"):
        verify(reference, sch)


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True])
def test_numbers_of_threads(size: Any) -> None:
    with pytest.raises(VerifyError, match="give a whole number from 1 on"):
        run_as_threads(lambda: None, size)


def test_a_rank_that_ends_itself_is_told() -> None:
    def work() -> None:
        raise SystemExit(3)

    with pytest.raises(VerifyError, match=r"rank [01] ended itself, by SystemExit\(3\)"):
        run_as_threads(work, 2)


def test_a_rank_that_is_interrupted_ends_all() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_as_threads(work, 2)


class Says(nn.Module):
    """A model that returns its result in a given form.

    Args:
        form: Makes the outputs of a tensor.
    """

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.form = nn.Linear(4, 4), nn.GELU(), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.act(self.up(x)))


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": lambda y: y > 0.2,
    "integers": lambda y: (y * 10).long(),
    "complex": lambda y: torch.complex(torch.ones_like(y), y),
    "number": lambda y: float(y.detach().sum()),
    "sparse": lambda y: y.to_sparse(),
    "jagged": lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]], layout=torch.jagged),
    "nested": lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]]),
    "nothing else": lambda y: {"a": None, "b": 3, "c": (True, [y.sum()])},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("level", ["outputs", "grads"])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_any_kind(form: str, level: str) -> None:
    for other, same in ((nn.GELU(), True), (nn.Tanh(), False)):
        model = Says(FORMS[form])
        sch = create_schedule(copy.deepcopy(model), example_inputs=torch.zeros(2, 4))
        sch["act"].replace(other)
        report = verify(model, sch, torch.linspace(-2, 2, 8).view(2, 4), level=level)
        assert report.ok is same, report
        assert same or "sch['act'].replace(" in str(report.blame)


def test_an_output_that_is_no_longer_sparse_is_another() -> None:
    reference = Says(lambda y: y.to_sparse())
    sch = create_schedule(copy.deepcopy(reference), example_inputs=torch.ones(2, 4))
    sch.mod.form = lambda y: y
    assert "the structure differs; missing ['.layout']" in verify(reference, sch).differences[0].message


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.01, False)])
def test_sparse_gradients(factor: float, same: bool) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found = super().forward(ids)
            return found + (factor - 1) * (found - found.detach())

    reference = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    sch = create_schedule(copy.deepcopy(reference), example_inputs=torch.tensor([1, 1, 3]))
    other = Scaled(6, 4, sparse=True)
    other.load_state_dict(sch["0"].mod.state_dict())
    sch["0"].replace(other)
    report = verify(reference, sch, level="step")
    assert report.ok is same, report
    assert same or report.differences[0].what == "gradient of '0.weight'"


@pytest.mark.parametrize(("momentum", "same"), [(0.1, True), (0.9, False)])
def test_what_training_leaves_in_buffers_is_compared(momentum: float, same: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU())
    sch = create_schedule(copy.deepcopy(model), example_inputs=torch.zeros(2, 4))
    sch["2"].replace(nn.GELU())
    sch["1"].replace(nn.BatchNorm1d(4, momentum=momentum))
    report = verify(model, sch, torch.randn(8, 4), eval_mode=False)
    assert report.compared["buffers"] == 3
    assert report.ok is same, report
    if not same:
        assert [each.what for each in report.differences] == ["buffer of '1.running_mean'", "buffer of '1.running_var'"]
        assert "2: sch['1'].replace(" in str(report.blame)
    assert verify(model, sch, torch.randn(8, 4)).ok


def test_a_step_that_keeps_the_model_from_running_is_named() -> None:
    reference = model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
    sch["1"].replace(nn.ReLU())
    sch["2"].replace(nn.Linear(16, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        verify(reference, sch)
    assert "step to blame: 2: sch['2'].replace(" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        verify(reference, sch, blame=False)
    assert not hasattr(raised.value, "__notes__")


def test_such_a_step_is_named_on_ranks() -> None:
    def work() -> None:
        reference = model()
        sch = create_schedule(copy.deepcopy(reference), example_inputs=X)
        sch["0"].shard("weight", 0)
        sch["0"].shard("bias", 0)
        sch["0"].sync("bwd_post", "all_reduce")
        verify(reference, sch)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        run_as_threads(work, 2)
    assert raised.value.__notes__ == ["step to blame: 1: sch['0'].shard('weight', 0)"]


def test_inputs_without_rows_prove_nothing_and_it_is_said() -> None:
    reference = model()
    sch = create_schedule(model(), example_inputs=X)
    sch["1"].replace(nn.Tanh())
    assert "no output has numbers in it" in str(verify(reference, sch, X[:0]))
