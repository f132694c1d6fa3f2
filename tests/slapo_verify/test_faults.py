"""Faults put into a schedule on purpose: each is found, and the step that made it is blamed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_core import Step, create_schedule
from slapo_verify import verify
from slapo_verify.diagnosis.step_bisection import steps_to_blame


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale, self.causal = 8**-0.5, True

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.split(self.qkv(x)))
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> Any:
        return x.chunk(3, dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.act = nn.LayerNorm(16), Attention(), nn.GELU()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm(x), mask=mask)
        return x + self.drop(self.down(self.act(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


IDS = torch.arange(12).view(2, 6)
MASK = torch.zeros(2, 1, 1, 6)
MASK[1, ..., 4:] = -1e9
INPUTS = {"ids": IDS, "mask": MASK}


def changed(module: nn.Module, **settings: Any) -> nn.Module:
    new = copy.deepcopy(module)
    for name, value in settings.items():
        setattr(new, name, value)
    return new


class MixedSplit(Attention):
    def split(self, x: torch.Tensor) -> Any:
        q, k, v = x.chunk(3, dim=-1)
        return k, q, v


class NoMask(Attention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


class DropsInEval(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1, True)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.bias


class Detached(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight.detach(), self.bias)


class NoInputGradient(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.detach())


class FirstRowZeroed(nn.Embedding):
    """As where ids of another shard are told by ``<=``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (input % 8 != 0).unsqueeze(-1)


class ChangesItsInput(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        input.data.mul_(2)
        return out


class LosesKeywords(nn.Module):
    """Wrapper that passes only positional arguments on, as some activation checkpoints do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class FirstBranchForAll(Block):
    """Two branches are fed what the first one is."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.attn(normed, mask=mask) + self.drop(self.down(self.act(self.up(normed))))


class LosesTheResidual(Block):
    """A value that is used outside of what was replaced is another one there."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.attn(self.norm(x), mask=mask)
        return x + self.drop(self.down(self.act(self.up(x))))


class DefaultForTheMask(Attention):
    """A default of its own takes the place of what is not given by name."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | float | None = 0.0) -> torch.Tensor:
        return super().forward(x, MASK[0] if mask is None or isinstance(mask, float) else mask * 0)


def of_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    new = copy.deepcopy(module)
    new.__class__ = cls
    return new


Fault = Callable[[nn.Module], nn.Module]
FAULTS: dict[str, tuple[str, Fault, str | None]] = {
    "another activation": ("act", lambda old: nn.GELU(approximate="tanh"), None),
    "relu for gelu": ("act", lambda old: nn.ReLU(), None),
    "another epsilon": ("norm", lambda old: changed(old, eps=1e-3), None),
    "mask dropped": ("attn", lambda old: of_class(old, NoMask), None),
    "causality dropped": ("attn", lambda old: changed(old, causal=False), None),
    "another scale": ("attn", lambda old: changed(old, scale=1.0), None),
    "q and k mixed": ("attn", lambda old: of_class(old, MixedSplit), None),
    "dropout on in evaluation": ("drop", lambda old: DropsInEval(), None),
    "bias twice": ("down", lambda old: of_class(old, Doubled), "'layers.3.down.bias' is in it 2 times"),
    "weight frozen": ("up", lambda old: of_class(old, Detached), None),
    "no gradient through": ("up", lambda old: of_class(old, NoInputGradient), None),
    "keywords lost": ("", LosesKeywords, None),
    "first branch's input for all": ("", lambda old: of_class(old, FirstBranchForAll), None),
    "value used outside lost": ("", lambda old: of_class(old, LosesTheResidual), None),
    "a default for what is given": ("attn", lambda old: of_class(old, DefaultForTheMask), None),
    "another layer's module": ("up", lambda old: copy.deepcopy(OTHER), None),
    "other weights, same names": ("down", lambda old: nn.Linear(32, 16), None),
}


OTHER = Model().layers[2].up
"""As found where ``layers.2`` is taken for ``layers.3``."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_the_step_that_puts_a_fault_in_is_blamed(name: str) -> None:
    child, fault, hint = FAULTS[name]
    path = f"layers.3.{child}".rstrip(".")
    reference = Model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=INPUTS)
    for index in range(6):
        sch[f"layers.{index}.norm"].replace(copy.deepcopy(sch[f"layers.{index}.norm"].mod))
        sch[f"layers.{index}"].checkpoint()
        if index == 3:
            at = sch[path]
            at.replace(fault(at.mod))
    report = verify(reference, sch)
    assert not report
    assert report.blame is not None
    print(report)
    if name not in ("other weights, same names", "another layer's module"):
        assert report.blame.step is not None
        assert report.blame.step.split(": ")[1].startswith(f"sch['{path}'].replace(")
    if hint:
        assert report.blame.hint is not None
        assert hint in report.blame.hint


@pytest.mark.parametrize(("path", "cls"), [("embed", FirstRowZeroed), ("layers.3.norm", ChangesItsInput)])
def test_so_is_one_beside_steps_of_whole_lists(path: str, cls: type[nn.Module]) -> None:
    reference = Model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=INPUTS)
    sch["layers.0"].checkpoint()
    sch[path].replace(of_class(sch[path].mod, cls))
    sch["layers.5"].checkpoint()
    report = verify(reference, sch)
    assert not report
    assert report.blame is not None
    assert report.blame.step is not None
    assert report.blame.step.startswith(f"2: sch['{path}'].replace(")


class Labelled(nn.Module):
    """Gives its loss, of labels of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(32, 16), nn.Dropout(0.5), nn.Linear(16, 32)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.drop(self.embed(ids))).flatten(0, 1), labels.flatten())


class CountsAll(nn.CrossEntropyLoss):
    """Divides by the number of all labels, as where ``ignore_index`` is forgotten."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input, target) * (target != self.ignore_index).float().mean()


class OtherMasks(nn.Dropout):
    """Is recomputed without the random state it had."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, input, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize(
    ("path", "new"),
    [("loss", lambda: CountsAll(label_smoothing=0.1)), ("loss", nn.CrossEntropyLoss), ("drop", lambda: OtherMasks(0.5))],
    ids=["ignored labels counted", "label smoothing forgotten", "recomputed with other masks"],
)
def test_faults_of_a_loss_and_of_a_recompute(path: str, new: Callable[[], nn.Module]) -> None:
    """The recompute's is one of gradients in training mode alone."""
    reference, labels = Labelled(), IDS.clone()
    labels[0, :4] = -100
    inputs = {"ids": IDS, "labels": labels}
    for fault in (False, True):
        sch = create_schedule(copy.deepcopy(reference), example_inputs=inputs)
        sch["head"].replace(copy.deepcopy(sch["head"].mod))
        if fault:
            sch[path].replace(new())
        report = verify(reference, sch, level="grads", eval_mode=path != "drop")
        assert report.ok is not fault, report
    assert f"2: sch['{path}'].replace(" in str(report.blame)


def test_a_right_schedule_is_the_same() -> None:
    reference = Model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=INPUTS)
    sch["layers"].checkpoint()
    for level in ("outputs", "grads"):
        assert verify(reference, sch, level=level).check().largest is None
    with slapo.Verify(sch, INPUTS) as proof:
        sch["layers.0.up"].decompose()
    assert proof.report


def test_a_broken_tie_is_told() -> None:
    reference = Model()
    sch = create_schedule(copy.deepcopy(reference), example_inputs=INPUTS)
    sch["layers"].checkpoint()
    untied = nn.Linear(16, 32, bias=False)
    untied.weight = nn.Parameter(sch["head"].mod.weight.detach().clone())  # type: ignore[union-attr]
    sch["head"].replace(untied)
    report = verify(reference, sch)
    assert report.blame is not None
    assert report.blame.step is not None
    assert report.blame.step.startswith("2: sch['head'].replace(")
    assert report.blame.hint == "'embed.weight' and 'head.weight' are one parameter, and have become 2: the tie is broken"


@pytest.mark.parametrize("count", [1, 5, 24])
def test_the_journal_is_searched_by_blocks(count: int) -> None:
    steps = [Step(f"layers.{block}.{name}", "replace") for block in range(count) for name in ("a", "b", "c")]
    for wrong in range(len(steps)):
        asked = []

        def right(numbers: Sequence[int], wrong: int = wrong, asked: list[Any] = asked) -> bool:
            asked.append(numbers)
            halves = {number // 3 for number in numbers if number % 3 == 0} == {n // 3 for n in numbers if n % 3 == 1}
            return wrong not in numbers and halves  # a and b are right only together

        suspects, before = steps_to_blame(steps, right)
        start = wrong if wrong % 3 == 2 else wrong // 3 * 3
        assert (suspects[0], wrong in suspects) == (start, True)
        assert before == [*range(start)]
        assert len(asked) <= count.bit_length() + 3
