"""Gradients of lazy logits, for who waits for them, as those of an unmodified head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slapo_core import create_schedule
from slapo_kernels.lazy.logits import LazyLogits
from tests.slapo_sharding.operators import Operators

LABELS = torch.tensor([1, 2, -100, 4, 5, 6, 0, 8])
Call = Callable[[nn.Module, torch.Tensor], Any]


def beside(call: Call, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return the results of a call on a head without and with the kernel; an error gives its message."""
    head, found = nn.Linear(6, 9, dtype=dtype), []
    hidden = torch.randn(2, 4, 6, dtype=dtype)
    for served in (False, True):
        module = copy.deepcopy(head)
        if served:
            schedule = create_schedule(module)
            schedule.use_kernels("linear_cross_entropy")
            module = schedule.mod  # type: ignore[assignment]
            assert isinstance(module(hidden), LazyLogits)
        try:
            found.append(call(module, hidden.clone().requires_grad_()))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]


def compare(found: Any, expected: Any) -> None:
    """Numbers closely, messages and others by equality."""
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def loss_of(logits: torch.Tensor, labels: Any = LABELS, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, 9), labels, **options)


def _waited(wait: Callable[[torch.Tensor, list[Any]], object], when: str) -> Call:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        logits, seen = head(hidden), list[Any]()
        if when == "before":
            wait(logits, seen)
        flat = logits.view(-1, 9)
        if when in ("between", "of the view"):
            wait(flat if when == "of the view" else logits, seen)
        loss = F.cross_entropy(flat, LABELS)
        if when == "after":
            wait(logits, seen)
        loss.backward()
        kept = [each.grad for each in (logits, flat) if each.retains_grad]
        return [seen, kept, hidden.grad, [parameter.grad for parameter in head.parameters()]]

    return call


WAITS: dict[str, Callable[[torch.Tensor, list[Any]], object]] = {
    "hook": lambda logits, seen: logits.register_hook(lambda grad: seen.append(grad.clone())),
    "hook that changes": lambda logits, seen: logits.register_hook(lambda grad: grad * 3),
    "retain_grad": lambda logits, seen: logits.retain_grad(),
    "hook of the node": lambda logits, seen: logits.grad_fn.register_prehook(lambda grads: seen.append(grads[0])),  # type: ignore[union-attr]
    "hook of several": lambda logits, seen: torch.autograd.graph.register_multi_grad_hook((logits,), seen.extend),
}


@pytest.mark.parametrize("when", ["before", "between", "of the view", "after"])
@pytest.mark.parametrize("wait", WAITS)
def test_who_waits_for_the_gradient_of_logits(wait: str, when: str) -> None:
    expected, found = beside(_waited(WAITS[wait], when))
    assert any(expected[:2]) or wait == "hook that changes"
    torch.testing.assert_close(found, expected)


def _of_logits_and_others(head: nn.Module, hidden: torch.Tensor) -> Any:
    logits = head(hidden)
    logits.retain_grad()
    return torch.autograd.grad(loss_of(logits), [logits, hidden, *head.parameters()])


def _many_times(head: nn.Module, hidden: torch.Tensor) -> Any:
    loss = loss_of(head(hidden))
    for _ in range(3):
        loss.backward(retain_graph=True)
    return [each.grad for each in (hidden, *head.parameters())]


def _of_gradients(head: nn.Module, hidden: torch.Tensor) -> Any:
    leaves = [hidden, *head.parameters()]
    first = torch.autograd.grad(loss_of(head(hidden)), leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)  # type: ignore[arg-type]
    return [each.detach() for each in (*first, *second)]


def _past_frozen(head: nn.Module, hidden: torch.Tensor) -> Any:
    head.requires_grad_(False)
    (found,) = torch.autograd.grad(loss_of(head(hidden)), hidden)
    return found


def _on_cpu(head: nn.Module, hidden: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(head(hidden))
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


def _without_gradients_between(head: nn.Module, hidden: torch.Tensor) -> Any:
    logits = head(hidden)
    with torch.no_grad():
        flat, some, doubles = logits.view(-1, 9), logits[:, :2], logits.double()
    return [each.requires_grad for each in (flat, some, doubles)], F.cross_entropy(flat, LABELS).requires_grad


def _forward(head: nn.Module, hidden: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(head(forward_ad.make_dual(hidden.detach(), hidden.detach())) * 2).tangent


def _ignored(head: nn.Module, hidden: torch.Tensor) -> Any:
    found = []
    for label in (3, 0, -100):
        loss = loss_of(head(hidden), torch.full((8,), label), ignore_index=label)
        found += [loss.isnan(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]
    return found


CALLS: dict[str, Call] = {
    "of logits alone": lambda head, hidden: torch.autograd.grad(loss_of(logits := head(hidden)), logits),
    "of logits and others": _of_logits_and_others,
    "many times": _many_times,
    "twice": lambda head, hidden: [(loss := loss_of(head(hidden))).backward(), loss.backward()],
    "of gradients": _of_gradients,
    "of gradients alone": lambda head, hidden: torch.autograd.functional.hessian(lambda x: loss_of(head(x)), hidden),
    "past a frozen head": _past_frozen,
    "saved on the CPU": _on_cpu,
    "checkpointed": lambda head, hidden: torch.autograd.grad(
        checkpoint(lambda x: loss_of(head(x)), hidden, use_reentrant=False), [hidden, *head.parameters()]
    ),
    "a checkpointed head": lambda head, hidden: torch.autograd.grad(
        loss_of(checkpoint(head, hidden, use_reentrant=False)), [hidden, *head.parameters()]
    ),
    "no gradients between": _without_gradients_between,
    "all ignored": _ignored,
    "torch.func": lambda head, hidden: torch.func.grad(lambda x: loss_of(head(x)))(hidden.detach()).detach(),
    "torch.vmap": lambda head, hidden: torch.vmap(lambda x: head(x).sum())(hidden),
    "forward mode": _forward,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of forward mode
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name: str) -> None:
    expected, found = beside(CALLS[name])
    compare(found, expected)


def _inference(head: nn.Module, hidden: torch.Tensor) -> Any:
    logits = head(hidden)
    with torch.inference_mode():
        logits.argmax(-1)
    return torch.autograd.grad(logits.square().sum(), hidden)


def test_who_looks_without_gradients_leaves_them_to_others() -> None:
    expected, found = beside(_inference)
    torch.testing.assert_close(found, expected)


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "no class": (LABELS + 9, {}),
    "below": (LABELS.clamp(max=3) - 4, {}),
    "int32": (LABELS.int(), {}),
    "floats": (LABELS.float(), {}),
    "few": (LABELS[:4], {}),
    "many": (torch.cat([LABELS, LABELS]), {}),
    "flat": (LABELS[None], {}),
    "list": (LABELS.tolist(), {}),
    "none": (None, {}),
    "reduction": (LABELS, {"reduction": "avg"}),
    "ignored": (LABELS, {"ignore_index": 5.0}),
    "smoothing": (LABELS, {"label_smoothing": 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_labels_are_told_as_torch_tells(name: str) -> None:
    labels, options = WRONG[name]
    expected, found = beside(lambda head, hidden: loss_of(head(hidden), labels, **options).item())
    assert isinstance(expected, str)
    assert found == expected


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no such dim": lambda x: x.flatten(0, 5),
    "the wrong way round": lambda x: x.flatten(1, 0),
    "names": lambda x: x.flatten("a"),  # type: ignore[call-overload]
    "no such size": lambda x: x.view(5, -1, 9),
    "two sizes": lambda x: x.view(-1, -1, 9),
    "negative": lambda x: x.view(-2, 9),
    "step of 0": lambda x: x[::0],
    "too many": lambda x: x[:, :, :, :],
    "a mask of others": lambda x: x[torch.ones(3, dtype=torch.bool)],
    "by keywords": lambda x: x.reshape(shape=(-1, 9)).contiguous(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
    "as int32": lambda x: x.view(torch.int32),
    "data": lambda x: x.data,
    "numpy": lambda x: x.numpy(),
    "address": lambda x: x.data_ptr() != 0,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_torchs(name: str) -> None:
    expected, found = beside(lambda head, hidden: VIEWS[name](head(hidden)))
    assert type(found) is type(expected)
    assert found == expected if not isinstance(expected, torch.Tensor) else torch.equal(found, expected)


@pytest.mark.parametrize("inside", [True, False])
def test_the_loss_is_of_the_dtype_that_autocast_gives_it(inside: bool) -> None:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            logits = head(hidden)
            if inside:
                return loss_of(logits).dtype
        return loss_of(logits).dtype

    expected, found = beside(call)
    assert found == expected


DTYPES = [torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("head_dtype", DTYPES, ids=str)
def test_dtypes_under_autocast(dtype: torch.dtype, head_dtype: torch.dtype) -> None:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return head.to(head_dtype)(hidden.detach().to(dtype)).detach()

    expected, found = beside(call)
    compare(found, expected)


def test_logits_that_autocast_did_not_round() -> None:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        logits = head(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(logits).detach()

    expected, found = beside(call)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_says_what_it_is_a_mean_over(reduction: str) -> None:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        loss: Any = loss_of(head(hidden), labels, reduction=reduction, ignore_index=5)
        return getattr(loss.grad_fn, "label_mean", ())

    labels = LABELS.clamp(min=0)
    _, found = beside(call)
    assert found is None if reduction == "sum" else (torch.equal(found[0], labels), found[1]) == (True, 5)


@pytest.mark.parametrize("waits", [False, True])
def test_the_kernel_makes_the_gradients_where_nobody_waits(waits: bool) -> None:
    def call(head: nn.Module, hidden: torch.Tensor) -> Any:
        logits = head(hidden)
        loss = loss_of(logits)
        if waits:
            logits.retain_grad()
        with Operators() as operations:
            loss.backward()
        return "_log_softmax" in operations.names, "mm" in operations.names

    _, found = beside(call)
    assert found == (waits, waits)
