"""Losses that look like plain means over labels, and those that are: what an engine makes of each, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule
from tests.loss_cases import CLASSES, LENGTH, PLUGINS, ROWS, WIDTH, ids, sgd, shares, uneven
from tests.slapo_torch.layouts import mesh_of, message_of

Made = Callable[[torch.Tensor, torch.Tensor, nn.Module], Any]


def ce(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def logged_before(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    model.log = ce(logits, labels.masked_fill(labels == 1, -100))
    return ce(logits, labels)


def logged_behind(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    loss = ce(logits, labels)
    with torch.no_grad():
        model.log = ce(logits, labels), ce(logits[:1], labels[:1])
    model.log = loss.detach().clone().mul_(3)
    return loss


def two_heads(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    model.log = ce(torch.zeros_like(logits), labels.clamp(min=0))  # the first loss has this number too
    return ce(logits * model.zero, labels)


def hand_made(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    mask = labels != -100
    each = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    model.log = ce(logits, labels)
    return (each * mask).sum() / mask.sum()


def zero_at_first(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    return ce(logits, labels) + model.zero.square().sum() + (model.zero * logits).mean()


def later(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    """A plain mean, but for the steps of training from the second on."""
    model.calls += torch.is_grad_enabled() and model.training
    loss = ce(logits, labels)
    return loss + logits.square().mean() if model.calls > model.plain_calls else loss


def chunked(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    sums = [ce(*each, reduction="sum") for each in zip(logits.chunk(2), labels.chunk(2), strict=True)]
    return sum(sums) / (labels != -100).sum()


def token_by_token(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    return ce(logits, labels, reduction="none").sum() / (labels != -100).sum()


def twice(logits: torch.Tensor, labels: torch.Tensor, model: Any) -> Any:
    return {"loss": ce(logits, labels), "again": ce(logits, labels)}


class _Same(torch.autograd.Function):
    """Gives what it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Fused(torch.autograd.Function):
    """A cross entropy that says what it is a mean over."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.logits = logits.detach().requires_grad_()
            ctx.found = ce(ctx.logits, labels)
        ctx.label_mean = (labels, -100)
        return ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.autograd.grad(ctx.found, ctx.logits, gradient)[0], None


@dataclass
class Output:
    """The output of a model."""

    loss: torch.Tensor
    logits: torch.Tensor


PLAIN: dict[str, Made] = {
    "logged before": logged_before,
    "logged behind": logged_behind,
    "two heads": two_heads,
    "smoothed": lambda logits, labels, model: ce(logits, labels, label_smoothing=0.1),
    "copied": lambda logits, labels, model: ce(logits.clone().requires_grad_(), labels),
    "a field": lambda logits, labels, model: Output(ce(logits, labels).view(1)[0].double().float(), logits),
    "summed": lambda logits, labels, model: sum([torch.zeros(()) + ce(logits, labels) * 1.0]) / 1,
    "halved": lambda logits, labels, model: torch.stack([2 * ce(logits, labels)]).mean() / 2,
    "returned": lambda logits, labels, model: _Same.apply(ce(logits, labels)),
    "fused": lambda logits, labels, model: _Fused.apply(logits, labels),
    "twice": twice,
}
"""Losses that are means over labels: right, however these are spread."""
OTHERS: dict[str, Made] = {
    "zero at first": zero_at_first,
    "chunked": chunked,
    "token by token": token_by_token,
    "averaged": lambda logits, labels, model: (ce(logits, labels) + ce(logits, labels)) / 2,
    "with a term": lambda logits, labels, model: ce(logits, labels) + 0.1 * logits.square().mean(),
}
"""Losses that are more than that: right where all parts have as many labels, and refused elsewhere."""
BY_HAND: dict[str, Made] = {"hand-made": hand_made}
"""Losses of which only the batch shows that labels are uneven."""
MADE = {**PLAIN, **OTHERS, **BY_HAND, "later": later}


class Model(nn.Module):
    """Takes labels under another name than engines know, or makes them of a mask, which hides them."""

    def __init__(self, made: Made, plain_calls: int = 0) -> None:
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.zero = nn.Parameter(torch.zeros(CLASSES))
        self.made, self.log, self.calls, self.plain_calls = made, None, 0, plain_calls

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        labels = wanted if mask is None else wanted.masked_fill(~mask, -100)
        found = self.made(self.head(self.first(self.table(ids)).tanh()), labels, self)
        return {"loss": found} if isinstance(found, torch.Tensor) else found


def batch_of(step: int, is_hidden: bool, is_even: bool = False) -> dict[str, torch.Tensor]:
    labels = uneven(2 * step)  # no row is without labels
    if is_even:
        labels = labels.clamp(min=0).masked_fill(torch.arange(LENGTH) >= LENGTH - 2, -100)
    if is_hidden:
        return {"ids": ids(step), "wanted": labels.clamp(min=0), "mask": labels != -100}
    return {"ids": ids(step), "wanted": labels}


def _expected(name: str, data: list[dict[str, torch.Tensor]]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    model = Model(MADE[name], plain_calls=1)
    optimizer, found = sgd(model.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        output = model(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss.backward()
        optimizer.step()
        found.append((loss.item(), {key: value.detach().clone() for key, value in model.named_parameters()}))
    return found


def train(rank: int, target: str, layout: dict[str, int], names: list[str], is_hidden: bool, is_even: bool) -> dict[str, Any]:
    """For each loss how far the engine is from one process in each step, or what it said, as the last of these."""
    mesh, found = mesh_of(**layout), {}
    parts, data = 2, [batch_of(step, is_hidden, is_even) for step in range(3)]
    for name in names:
        torch.manual_seed(0)
        model = Model(MADE[name], plain_calls=parts)
        example = {key: value[: ROWS // 2 // parts] for key, value in data[0].items()}
        schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
        if layout.get("pp", 1) > 1:
            schedule["first"].cut_pipeline_stage()
        engine: Any = build(schedule, target, optimizer=sgd, microbatches=parts, check=False)  # it would refuse some before
        steps: list[Any] = []

        def step(
            batch: Any, loss: float, weights: Any, engine: Any = engine, schedule: Any = schedule, steps: Any = steps
        ) -> None:
            difference = abs(engine.train_batch(**shares(batch, mesh)).item() - loss)
            state = schedule.full_state()
            steps.append(max(difference, *(float((state[key] - value).abs().max()) for key, value in weights.items())))

        for batch, (loss, weights) in zip(data, _expected(name, data), strict=True):
            if (message := message_of(partial(step, batch, loss, weights))) != "no error":
                steps.append(message)
                break
        engine.close()
        found[name] = steps
    return found
