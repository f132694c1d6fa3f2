"""``use_kernels("linear_cross_entropy")``: the loss of the unmodified model, whose logits nobody had to compute."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import ScheduleError, SlapoError, create_schedule
from slapo_kernels.lazy.logits import LazyLogits
from slapo_verify.comparison import assert_equivalent
from tests.slapo_kernels.kernel_calls import COUNTED, Counted, counted_kernels
from tests.zoo.families import FAMILIES


@pytest.fixture
def counted() -> Iterator[Counted]:
    with counted_kernels() as found:
        yield found


@pytest.mark.parametrize(
    "name", ["gpt2", "llama:mask", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bert", "t5", "opt", "mixtral"))]
)
@pytest.mark.parametrize("choice", ["counted", "native"])
def test_losses(name: str, choice: str, counted: Counted) -> None:
    model, batch = FAMILIES[name].model(dropout=0.1), FAMILIES[name].batch()
    before, names = copy.deepcopy(model), list(model.state_dict())
    create_schedule(model, plugins=counted.plugins).use_kernels("linear_cross_entropy", {"linear_cross_entropy": choice})
    outputs = model(**batch)
    outputs.loss.backward()
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits.materialized is None
    assert counted.calls == ({"linear_cross_entropy": 1} if choice == "counted" else {})
    assert_equivalent(before, model, **batch, loss=lambda found: found.loss)
    assert_equivalent(before, model, **batch)
    assert list(model.state_dict()) == names


LABELS = torch.tensor([[1, 2, -100, 4], [5, 6, 0, -100]])
LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "flat": (lambda x: F.cross_entropy(x.view(-1, 9), LABELS.view(-1)), True),
    "shifted": (lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, 9), LABELS[:, 1:].reshape(-1)), True),
    "flattened": (lambda x: F.cross_entropy(x.float().flatten(0, 1), LABELS.flatten(), reduction="sum"), True),
    "of each token": (lambda x: F.cross_entropy(x.reshape(8, -1), LABELS.flatten(), reduction="none").square().sum(), True),
    "some": (lambda x: nn.CrossEntropyLoss(ignore_index=6)(x[LABELS >= 0], LABELS[LABELS >= 0]), True),
    "smoothed": (lambda x: F.cross_entropy(x.view(-1, 9), LABELS.view(-1), label_smoothing=0.1), False),
    "weighted": (lambda x: F.cross_entropy(x.view(-1, 9), LABELS.view(-1), weight=torch.linspace(1, 2, 9).to(x)), False),
    "transposed": (lambda x: F.cross_entropy(x.transpose(1, 2), LABELS), False),
    "of fewer classes": (lambda x: F.cross_entropy(x[..., :7].reshape(-1, 7), LABELS.view(-1)), False),
    "of other rows": (lambda x: F.cross_entropy(x.view(-1, 18)[:, :9], LABELS.view(-1)[:4]), False),
    "of probabilities": (lambda x: F.cross_entropy(x.view(-1, 9), torch.full((8, 9), 1 / 9)), False),
    "scaled": (lambda x: F.cross_entropy((x * 0.5).view(-1, 9), LABELS.view(-1)), False),
    "with more": (lambda x: F.cross_entropy(x.view(-1, 9), LABELS.view(-1)) + x.logsumexp(-1).square().mean(), True),
    "no loss": (lambda x: x.softmax(-1)[..., 3].sum() + x[:, -1].sum() + x[1, :, 2].sum(), False),
    "in doubles": (lambda x: x.double().square().mean(), False),
    "by a function of one's own": (lambda x: _Square.apply(x).sum(), False),  # type: ignore[no-untyped-call]
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_of_them(name: str, dtype: torch.dtype, counted: Counted) -> None:
    loss, by_kernel = LOSSES[name]
    head = nn.Linear(6, 9, dtype=dtype)
    before, x = copy.deepcopy(head), torch.randn(2, 4, 6, dtype=dtype, requires_grad=True)
    schedule = create_schedule(head, plugins=counted.plugins)
    schedule.use_kernels("linear_cross_entropy", force=COUNTED)
    found = []
    for module in (before, schedule.mod):
        value = loss(module(x))
        found.append([value.detach(), *torch.autograd.grad(value, [x, *module.parameters()])])
    tolerance = 2e-6 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance)
    assert bool(counted.calls) is by_kernel


def test_they_are_tensors(counted: Counted) -> None:
    head, x = nn.Linear(6, 9), torch.randn(2, 4, 6)
    expected = head(x)
    schedule = create_schedule(head, plugins=counted.plugins)
    schedule.use_kernels("linear_cross_entropy")
    logits = schedule.mod(x)
    assert (logits.shape, logits.dtype, logits.requires_grad) == (expected.shape, expected.dtype, True)
    assert logits.materialized is None
    assert torch.equal(logits, expected)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert logits.tolist() == expected.tolist()
    assert torch.equal(logits[0, 1:], expected[0, 1:])
    assert logits.detach().numpy().shape == (2, 4, 9)
    assert repr(logits)[:10] == "tensor([[["
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    assert torch.equal(torch.load(file), expected)
    logits = schedule.mod(x)
    flat = logits.view(-1, 9)
    changes: list[Callable[[torch.Tensor], Any]] = [lambda x: x.mul_(2), lambda x: x.__setitem__(0, 0), lambda x: x.__iadd__(1)]
    for change in changes:
        for each in (logits, flat):
            with pytest.raises(SlapoError, match=r"changes logits in place that use_kernels.*; change a clone\(\)"):
                change(each)
    logits.detach()[0, 0, 0] = 7
    assert flat[0, 0] == 7
    with torch.no_grad():
        assert type(schedule.mod(x)) is torch.Tensor


def test_autocast(counted: Counted) -> None:
    model, batch = FAMILIES["llama"].model(), FAMILIES["llama"].batch()
    before = copy.deepcopy(model)
    create_schedule(model, plugins=counted.plugins).use_kernels("linear_cross_entropy", force=COUNTED)
    found = []
    for each in (before, model):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = each(**batch)
        outputs.loss.backward()
        found.append((outputs.loss, outputs.logits.dtype, each.lm_head.weight.grad))
    assert counted.calls == {"linear_cross_entropy": 1}
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found[1][2], found[0][2], atol=1e-3, rtol=3e-2)


def test_where_there_is_no_head(counted: Counted) -> None:
    schedule = create_schedule(nn.Sequential(nn.Linear(4, 4)), plugins=counted.plugins)
    with pytest.raises(ScheduleError, match="nothing from here down computes 'linear_cross_entropy'"):
        schedule.use_kernels("linear_cross_entropy")
    schedule["0"].mod.register_forward_hook(lambda *_: None)
    with pytest.raises(ScheduleError, match=r"use_kernels\('0'\): '0' has a hook or wrapper that a kernel would bypass"):
        schedule["0"].use_kernels("linear_cross_entropy")
