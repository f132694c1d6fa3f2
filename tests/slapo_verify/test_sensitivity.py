"""Causes that hide a wrong step or make a right one look wrong: rounding, masks, types, containers, side effects."""

from __future__ import annotations

import copy
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import VerifyError, create_schedule
from slapo_tracing.nodes import wrap_forward
from slapo_verify import Report, Verify, verify
from slapo_verify.comparison import Tolerance
from slapo_verify.comparison.equivalence import typical_size

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Formed(nn.Module):
    """A layer, an activation, and a form in which the result is given."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.act, self.post, self.form = nn.Linear(8, 8), nn.GELU(), nn.Identity(), form

    def forward(self, x: Any) -> Any:
        return self.form(self.post(self.act(self.lin(x))))


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def checked(reference: nn.Module, change: Callable[[Any], Any], inputs: Any = X, **options: Any) -> Report:
    sch = create_schedule(copy.deepcopy(reference), example_inputs=inputs)
    change(sch)
    return verify(reference, sch, **options)


def relu(sch: Any) -> None:
    sch["act"].replace(nn.ReLU())


def nothing(sch: Any) -> None:
    """Take no step."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.8, 0.9])
def test_a_kernel_that_is_wrong_in_half_precision_alone(dtype: torch.dtype, factor: float) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * (factor if x.dtype is dtype else 1)

    report = checked(Formed(lambda y: y).to(dtype), lambda sch: sch["act"].replace(Function(kernel)), X.to(dtype), level="step")
    assert not report.ok
    assert report.blame is not None
    assert report.blame.module == "act"


class Looked(nn.Module):
    """Few of many tokens are rare ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.out = nn.Embedding(100, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids))


def loses_a_row(sch: Any) -> None:
    lost = nn.Embedding(100, 16, padding_idx=3, _weight=sch["emb"].mod.weight, dtype=torch.bfloat16)
    sch["emb"].replace(lost)


def test_a_row_of_a_gradient_that_rounding_of_others_hides_in_half_precision() -> None:
    ids = torch.cat([torch.zeros(100, dtype=torch.long), torch.tensor([3, 5, 7])])[None]
    report = checked(Looked().bfloat16(), loses_a_row, ids, level="step", loss=lambda out: out.float().square().mean())
    assert report.differences[0].what == "gradient of 'emb.weight'"
    assert report.blame is not None
    assert (report.blame.step or "").startswith("1: sch['emb'].replace(")
    assert "rounding hides it; this is of both models in float32" in report.notes


def masked(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.masked_fill(torch.ones(4, 8, dtype=torch.bool).triu(1), by)


def shifted(by: float) -> Callable[[Any], Any]:
    return lambda sch: sch["post"].replace(Function(lambda y: y + by))


@pytest.mark.parametrize("by", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("change", [relu, shifted(1.0), shifted(0.01)], ids=["relu", "shift", "small"])
def test_finite_masks_do_not_widen_what_is_allowed(by: float, change: Any) -> None:
    assert not checked(Formed(masked(by)), change, level="outputs").ok
    assert checked(Formed(masked(by)), nothing, level="step").ok


def test_a_few_huge_numbers_do_not_either() -> None:
    assert not checked(Formed(lambda y: torch.cat([y[:, :7], y[:, 7:] * 0 + 1e6], 1)), shifted(0.5), level="outputs").ok
    numbers = torch.tensor([1.0, -1.0, 2.0, 1e6])
    assert typical_size(numbers) == 30.0
    assert typical_size(torch.tensor([3.0, 4.0, -torch.inf])) == pytest.approx(12.5**0.5)
    assert typical_size(torch.tensor([3.0, 4.0, -1e9, -1e9])) == pytest.approx(12.5**0.5)
    assert typical_size(torch.zeros(3)) == typical_size(torch.empty(0)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [100, 30000])
def test_integers_are_equal_or_not(dtype: torch.dtype, start: int) -> None:
    reference = Formed(lambda y: (y, torch.arange(start, start + 9))).to(dtype)

    def change(sch: Any) -> None:
        wrap_forward(sch.mod, lambda call, x: (lambda found: (found[0], found[1] + 1))(call(x)))

    assert checked(reference, change, X.to(dtype)).differences[0].what == "output[1]"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_types_that_torch_stores_alone_are_compared(dtype: torch.dtype) -> None:
    def form(y: torch.Tensor) -> Any:
        return y, (y.detach().abs() * 100).to(dtype)

    assert checked(Formed(form), nothing).ok
    assert not checked(Formed(lambda y: (y.detach() * 0, form(y)[1])), relu).ok


def test_tiny_numbers_are_compared_by_their_size() -> None:
    assert not checked(Formed(lambda y: y * 1e-9), relu).ok
    assert checked(Formed(lambda y: y * 1e-9), nothing).ok


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


OPENED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda y: (y.detach() * 0, y.detach().numpy()),
    "slots": lambda y: (y.detach() * 0, Slotted(y)),
    "deque": lambda y: (y.detach() * 0, deque([y])),
    "set": lambda y: (y.detach() * 0, {y}),
    "ordered": lambda y: (y.detach() * 0, OrderedDict(a=y)),
    "object": lambda y: (y.detach() * 0, types.SimpleNamespace(a=[y])),
}


@pytest.mark.parametrize("kind", OPENED)
def test_what_outputs_hold_is_looked_at(kind: str) -> None:
    assert checked(Formed(OPENED[kind]), nothing).ok
    assert not checked(Formed(OPENED[kind]), relu, level="outputs").ok


def test_what_cannot_be_looked_into_is_named() -> None:
    report = checked(Formed(lambda y: (y, iter([y]))), nothing).check()
    assert "output[1] is not looked into" in report.notes


def test_infinities_of_both_signs_in_an_output_are_no_difference() -> None:
    def form(y: torch.Tensor) -> torch.Tensor:
        return y.masked_fill(torch.eye(4, 8, dtype=torch.bool), -torch.inf)

    assert checked(Formed(form), nothing, level="step").ok
    assert not checked(Formed(form), relu).ok


def test_an_output_that_stands_in_two_places_is_one_in_any_form() -> None:
    def form(y: torch.Tensor) -> Any:
        both = (y, y)
        return {"a": both, "b": both}

    assert checked(Formed(form).eval(), lambda sch: sch.trace()).ok


def test_complex_weights_and_outputs_of_less_precision() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(self.w.dtype) @ self.w).abs()

    def otherwise(sch: Any) -> None:
        wrap_forward(sch.mod, lambda call, x: call(x.flip(0)).flip(0) * (1 + 1e-7))

    assert checked(Complex(), otherwise).ok


class Cached(nn.Module):
    """Writes into what it is given."""

    def forward(self, cache: Any) -> torch.Tensor:
        cache["count"] = cache.get("count", 0) + 1
        return cache["x"] * cache["count"]


def test_each_run_has_its_own_inputs_of_any_kind() -> None:
    model = nn.Sequential(Cached(), nn.Linear(8, 8))
    x = X.clone().requires_grad_()
    given = OrderedDict(x=x)
    assert checked(model, nothing, (given,)).ok
    assert list(given) == ["x"]
    assert x.grad is None


def test_a_step_that_overwrites_what_the_caller_gave_is_found() -> None:
    reference = nn.Sequential(OrderedDict(first=nn.ReLU(), act=nn.Linear(8, 8)))
    report = checked(reference, lambda sch: sch["first"].replace(nn.ReLU(inplace=True)))
    assert report.differences[0].what == "what the forward left of input[0]"


def test_numbers_of_python_and_numpy_are_the_same_in_both() -> None:
    def form(y: torch.Tensor) -> torch.Tensor:
        return y * random.random() * float(numpy.random.rand())

    random.seed(1)
    following = random.random()
    random.seed(1)
    assert checked(Formed(form), nothing).ok
    assert random.random() == following
    assert not checked(Formed(form), relu).ok


class Keeps(nn.Module):
    """Leaves things behind: a loss in an attribute, a buffer made late, one of another size, weights of bounded norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.act = nn.Embedding(10, 8, max_norm=0.5), nn.GELU()
        self.register_buffer("grows", torch.zeros(1))
        self.aux: torch.Tensor | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.act(self.emb(ids))
        self.aux = y.square().mean()
        self.register_buffer("late", torch.ones(2))
        self.grows.resize_(3).fill_(1)
        return y


def test_what_a_forward_leaves_behind_is_taken_back() -> None:
    model, ids = Keeps(), torch.tensor([[1, 2, 3]])
    before = copy.deepcopy(model.state_dict())
    assert checked(model, nothing, ids).ok
    assert not checked(model, relu, ids).ok
    assert model.aux is None
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_forward_that_writes_into_its_weights_is_refused() -> None:
    def grow(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(1.1)

    model = nn.Linear(8, 8)
    model.register_forward_pre_hook(grow)
    with pytest.raises(VerifyError, match="the forward writes into the parameter 'weight', which is changed now"):
        checked(model, nothing)


def test_what_one_model_alone_has_is_named() -> None:
    reference = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))

    def more(sch: Any) -> None:
        biased = nn.Linear(8, 8)
        biased.weight = sch["0"].mod.weight
        nn.init.zeros_(biased.bias)
        sch["0"].replace(biased)

    report = checked(reference, more, eval_mode=False)
    assert "the scheduled model trains '0.bias' besides, which the unmodified one has not" in report.notes

    def stateless(sch: Any) -> None:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        norm.weight, norm.bias = sch["1"].mod.weight, sch["1"].mod.bias
        sch["1"].replace(norm)

    report = checked(reference, stateless, eval_mode=False)
    assert "the scheduled model has no buffer '1.running_mean' and 2 more" in report.notes


def layers() -> nn.Module:
    torch.manual_seed(0)
    layer = OrderedDict(lin=nn.Linear(8, 8), act=nn.GELU(), n=nn.LayerNorm(8))
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*(copy.deepcopy(nn.Sequential(layer)) for _ in range(4)))))


def test_the_first_of_two_wrong_steps_is_blamed() -> None:
    def change(sch: Any) -> None:
        sch["layers.3.n"].replace(copy.deepcopy(sch["layers.3.n"].mod))
        sch["layers.1.act"].replace(nn.ReLU())
        sch["layers.3.act"].replace(nn.ReLU())

    blame = checked(layers(), change).blame
    assert blame is not None
    assert (blame.step or "").startswith("2: sch['layers.1.act']")
    assert blame.module == "layers.1.act"


class Mark(nn.GELU):
    """Stands for one that a later step finds."""


def test_a_step_on_the_whole_model_that_needs_another_is_not_blamed_for_a_third() -> None:
    def change(sch: Any) -> None:
        sch["layers.1.act"].replace(Mark())
        sch.replace_all(Mark, lambda module: nn.GELU())
        sch["layers.2.act"].replace(nn.ReLU())

    blame = checked(layers(), change).blame
    assert blame is not None
    assert (blame.step or "").startswith("3: sch['layers.2.act']")


def test_steps_are_taken_again_in_the_mode_they_were_taken_in() -> None:
    def change(sch: Any) -> None:
        sch.mod.eval()
        sch["layers.0"].trace(example_inputs=(X,))
        sch["layers.3.act"].replace(nn.ReLU())

    blame = checked(layers(), change).blame
    assert blame is not None
    assert (blame.step or "").startswith("2: sch['layers.3.act']")


def test_a_step_from_before_that_is_undone_within() -> None:
    sch: Any = create_schedule(layers(), example_inputs=X)
    sch["layers.0.act"].replace(nn.GELU())

    def within(block: Verify) -> None:
        with block:
            sch.undo()
            sch["layers.1.act"].replace(nn.ReLU())
            sch["layers.2.act"].replace(nn.GELU())

    with pytest.raises(VerifyError, match="not known: a step from before the block was undone in it"):
        within(Verify(sch))


def test_one_verify_is_not_nested_in_itself() -> None:
    block = Verify(create_schedule(layers(), example_inputs=X))
    with block, pytest.raises(VerifyError, match="this Verify is entered already"), block:
        pass


def test_an_error_without_a_number_is_null_in_json() -> None:
    report = checked(Formed(lambda y: y.masked_fill(y > -9, torch.inf)), shifted(-torch.inf), tolerance=Tolerance(0.0, 0.0))
    assert '"ok": false' in report.as_json()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["coo", "csr", "nested"])
def test_inputs_of_other_layouts(kind: str) -> None:
    inputs = {"coo": X.to_sparse, "csr": X.to_sparse_csr, "nested": lambda: torch.nested.nested_tensor([X[0], X[1]])}

    def first(x: torch.Tensor) -> torch.Tensor:
        return x.unbind()[0][None] if x.is_nested else x.to_dense()

    model = nn.Sequential(OrderedDict(first=Function(first), act=nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    assert checked(model, nothing, (inputs[kind](),)).ok
    assert not checked(model, lambda sch: sch["act.1"].replace(nn.ReLU()), (inputs[kind](),)).ok


@pytest.mark.parametrize("factor", [1e4, 1e6])
def test_a_large_channel_hides_no_other(factor: float) -> None:
    scale = torch.ones(8)
    scale[0] = factor

    def change(sch: Any) -> None:
        sch["post"].replace(Function(lambda y: y * torch.tensor([1.0, *[1.01] * 7])))

    assert not checked(Formed(lambda y: y * scale), change, level="outputs").ok
    assert checked(Formed(lambda y: y * scale), nothing, level="step").ok


@pytest.mark.parametrize("rows", [4096, 5000, 8192])
def test_the_size_of_a_tensor_is_of_all_its_columns(rows: int) -> None:
    numbers = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    expected = typical_size(numbers)
    numbers[:, 0] *= 1e5
    assert typical_size(numbers) < 30 * expected
    numbers[:, 0] = 1e-6
    assert typical_size(numbers) > 0.9 * expected


@pytest.mark.parametrize("by", [torch.finfo(torch.bfloat16).min, -torch.inf])
def test_masks_do_not_widen_what_rounding_may_do_in_half_precision(by: float) -> None:
    def form(y: torch.Tensor) -> torch.Tensor:
        smallest = torch.finfo(y.dtype).min if by > -torch.inf else by
        return y.masked_fill(torch.eye(4, 8, dtype=torch.bool), smallest)

    def kernel(y: torch.Tensor) -> torch.Tensor:
        return y * (1.5 if y.dtype is torch.bfloat16 else 1)

    x = X.bfloat16()
    assert not checked(Formed(form).bfloat16(), lambda sch: sch["post"].replace(Function(kernel)), x, level="outputs").ok
    assert checked(Formed(form).bfloat16(), nothing, x, level="outputs").ok


class Rotated(nn.Module):
    """Has complex numbers in a buffer, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.act = nn.Linear(8, 8), nn.GELU()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.linspace(0, 3, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.lin(x))
        turned = torch.view_as_complex(y.float().view(-1, 4, 2)) * self.turns
        return torch.view_as_real(turned).flatten(1).to(y.dtype)


def test_complex_buffers_stay_complex_in_any_precision() -> None:
    x = X.bfloat16()
    report = checked(Rotated().bfloat16(), nothing, x).check()
    assert "the models do not both run in float32, where rounding would hide less" not in report.notes

    def change(sch: Any) -> None:
        sch["act"].replace(Function(lambda y: F.gelu(y) * (1.5 if y.dtype is torch.bfloat16 else 1)))

    report = checked(Rotated().bfloat16(), change, x)
    assert not report.ok
    assert report.blame is not None
    assert report.blame.step is not None


class Fixed(nn.Module):
    """Runs in bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x.bfloat16()))


def test_a_model_that_runs_in_half_precision_alone() -> None:
    report = checked(Fixed().bfloat16(), nothing).check()
    assert "the models do not both run in float32, where rounding would hide less" in report.notes
    assert not checked(Fixed().bfloat16(), relu).ok


def test_buffers_made_in_inference_mode_and_weights_that_are_only_stored() -> None:
    model = Formed(lambda y: y)
    with torch.inference_mode():
        model.register_buffer("seen", torch.ones(3))
    model.register_parameter("stored", nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False))
    torch.manual_seed(5)
    following = torch.rand(1)
    torch.manual_seed(5)
    assert verify(model, create_schedule(copy.deepcopy(model), example_inputs=X), level="step").ok
    assert torch.equal(torch.rand(1), following)
