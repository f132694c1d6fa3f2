"""Lazy logits are those of the head's call, or an error: not those of what the weights have become."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import SlapoError, create_schedule
from slapo_kernels.lazy.head_inputs import MutationCheck
from slapo_kernels.lazy.logits import LazyLogits
from tests.zoo.families import FAMILIES

LABELS = torch.tensor([1, 2, -100, 4, 5, 6, 0, 8])
LOST = r"logits that use_kernels\('linear_cross_entropy'\) left to .* lost: somebody {} since the head ran; look at them"


def heads() -> tuple[nn.Linear, nn.Module, torch.Tensor]:
    """One as it was, one with the kernel, and hidden states, which are no leaf."""
    head = nn.Linear(6, 9)
    served = copy.deepcopy(head)
    schedule = create_schedule(served)
    schedule.use_kernels("linear_cross_entropy")
    return head, schedule.mod, torch.randn(2, 4, 6, requires_grad=True) * 1


def _step(head: nn.Module, hidden: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    sum(parameter.sum() for parameter in head.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()


def _free(head: nn.Module, hidden: torch.Tensor) -> None:
    head.weight.untyped_storage().resize_(0)  # type: ignore[operator,union-attr]


CHANGES: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "step": (_step, "changed the head's weight in place"),
    "hidden": (lambda head, hidden: hidden.detach().zero_(), "changed the hidden states in place"),
    "bias": (lambda head, hidden: head.bias.detach().add_(1), "changed the head's bias in place"),  # type: ignore[operator,union-attr]
    "data": (lambda head, hidden: head.weight.data.mul_(2), "changed the head's weight in place"),  # type: ignore[operator,union-attr]
    "other data": (lambda head, hidden: setattr(head.weight, "data", torch.ones(9, 6)), "changed the head's weight in place"),
    "partition": (lambda head, hidden: setattr(head.weight, "data", torch.empty(0)), "freed the head's weight"),
    "free": (_free, "freed the head's weight"),
}
LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "look": lambda logits: logits.argmax(-1),
    "view": lambda logits: logits.float()[:, 1:].sum(),
    "loss": lambda logits: F.cross_entropy(logits.view(-1, 9), LABELS),
    "other loss": lambda logits: F.cross_entropy(logits.view(-1, 9), LABELS, label_smoothing=0.1),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("views_first", [False, True])
def test_what_they_are_computed_of_has_changed(change: str, look: str, views_first: bool) -> None:
    _, head, hidden = heads()
    (act, what), looked = CHANGES[change], LOOKS[look]
    logits = head(hidden)
    seen = logits.view(-1, 9).float() if views_first else logits
    act(head, hidden)
    with pytest.raises(SlapoError, match=LOST.format(what)):
        looked(seen.view(2, 4, 9))


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_looked_at_before_stays_right(change: str) -> None:
    before, head, hidden = heads()
    logits = head(hidden)
    flat, expected = logits.view(-1, 9), before(hidden).detach()
    loss, of_loss = F.cross_entropy(flat, LABELS), F.cross_entropy(expected.view(-1, 9), LABELS)
    assert logits.materialized is None
    assert torch.equal(logits.detach(), expected)
    CHANGES[change][0](head, hidden)
    assert torch.equal(logits, expected)
    assert torch.equal(flat[3:].detach(), expected.view(-1, 9)[3:])
    torch.testing.assert_close(loss.detach(), of_loss)
    torch.testing.assert_close(F.cross_entropy(flat, LABELS).detach(), of_loss)


def test_a_step_of_training_and_then_the_accuracy() -> None:
    model, batch = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].batch()
    create_schedule(model).use_kernels("linear_cross_entropy")
    optimizer = torch.optim.AdamW(model.parameters())
    for looks_first in (True, False):
        outputs = model(**batch)
        outputs.loss.backward()
        best = outputs.logits.argmax(-1) if looks_first else None
        optimizer.step()
        if looks_first:
            assert torch.equal(outputs.logits.argmax(-1), best)
        else:
            with pytest.raises(SlapoError, match="somebody changed the head's weight in place since the head ran"):
                outputs.logits.argmax(-1)


def test_numbers_that_are_none_are_no_change() -> None:
    _, head, hidden = heads()
    logits = head(hidden * float("nan"))
    assert logits.isnan().all()


def test_tensors_of_inference_have_no_versions() -> None:
    _, head, hidden = heads()
    head.requires_grad_(False)
    with torch.inference_mode():
        hidden = hidden.detach() * 1
    logits = head(hidden)
    assert isinstance(logits, LazyLogits)
    with torch.inference_mode():
        hidden.zero_()
    with pytest.raises(SlapoError, match="changed the hidden states in place since the head ran"):
        logits.sum()
    logits = head(hidden)
    torch.testing.assert_close(logits, F.linear(hidden, head.weight, head.bias))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5000,), (70, 90), (3, 33, 129), (1, 1, 1, 7), (0, 4)], ids=str)
def test_the_sample_is_small_and_sees_a_change_of_all(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.bfloat16)
    unchanged = MutationCheck({"it": tensor, "nothing": None})
    assert unchanged.mutation() is None
    assert len(unchanged._samples[0]) <= 2 * 1024
    tensor.data.mul_(2)
    assert unchanged.mutation() == (None if 0 in shape else "changed it in place")


CHANGE_IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda logits: logits.mul_(2),
    "setitem": lambda logits: logits.__setitem__(0, 0),
    "iadd": lambda logits: logits.__iadd__(1),
    "out": torch.no_grad()(lambda logits: torch.add(torch.ones(2, 4, 9), 1, out=logits)),
    "data": lambda logits: setattr(logits, "data", torch.ones(2, 4, 9)),
    "relu": lambda logits: F.relu(logits, inplace=True),
}


@pytest.mark.parametrize("change", CHANGE_IN_PLACE)
def test_a_change_of_the_logits_themselves(change: str) -> None:
    _, head, hidden = heads()
    with pytest.raises(SlapoError, match=r"changes logits in place that use_kernels.*; change a clone\(\)$"):
        CHANGE_IN_PLACE[change](head(hidden))


READS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy": lambda total, logits: total.copy_(logits),
    "copy after a look": lambda total, logits: (logits.detach(), total.copy_(logits)),
    "setitem": lambda total, logits: total.__setitem__(slice(0, 1), logits[:1]),
    "iadd": lambda total, logits: total.__iadd__(logits),
    "add": lambda total, logits: total.add_(logits, alpha=0.5),
    "data": lambda total, logits: setattr(total, "data", logits.detach()),
    "out": torch.no_grad()(lambda total, logits: torch.add(logits, 1, out=total)),
}


@pytest.mark.parametrize("read", READS)
def test_what_others_are_made_of_in_place(read: str) -> None:
    plain, head, hidden = heads()
    found = []
    for module in (plain, head):
        total = torch.ones(2, 4, 9)
        READS[read](total, module(hidden))
        found.append([total.detach().clone()])
        if total.requires_grad:
            found[-1] += torch.autograd.grad(total.square().sum(), [module.weight, hidden])  # type: ignore[list-item]
    torch.testing.assert_close(*found)
