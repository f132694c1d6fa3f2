"""Ways in which people's models return their loss and take their batch: an engine beside the unmodified model on each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from slapo_core import build, create_schedule
from tests.loss_cases import CLASSES, LENGTH, PLUGINS, ROWS, WIDTH, ids, sgd
from tests.slapo_torch.layouts import mesh_of, message_of

IGNORED = -1
"""Label that the models leave out, as nanoGPT does."""


@dataclass
class Named:
    """An output whose loss has that name."""

    logits: torch.Tensor
    loss: torch.Tensor


@dataclass
class Cost:
    """An output whose loss has another name."""

    scores: torch.Tensor
    cost: torch.Tensor


class Pair(NamedTuple):
    """An output with places and names."""

    logits: torch.Tensor
    cost: torch.Tensor


def accuracy(logits: torch.Tensor) -> torch.Tensor:
    """A number without a gradient."""
    return (logits.argmax(-1) == 1).float().mean()


def size(logits: torch.Tensor) -> torch.Tensor:
    """A second number with a gradient."""
    return logits.square().mean()


@dataclass(frozen=True)
class Way:
    """A way to return a loss.

    Args:
        output: Makes the output of logits and a loss.
        loss: Finds the loss in it.
        options: Of ``build``.
    """

    output: Callable[[torch.Tensor, torch.Tensor], Any]
    loss: Callable[[Any], torch.Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


def inner(output: Any) -> torch.Tensor:
    """The loss of an output that has it inside of another one."""
    found: torch.Tensor = output["parts"]["nll"]
    return found


def summed(output: Any) -> torch.Tensor:
    """The loss of an output that has its terms."""
    found: torch.Tensor = output["nll"] + 0.1 * output["size"]
    return found


RETURNS = {
    "logits, loss": Way(lambda logits, loss: (logits, loss), lambda out: out[1]),
    "loss, logits": Way(lambda logits, loss: (loss, logits), lambda out: out[0]),
    "a list": Way(lambda logits, loss: [logits, loss], lambda out: out[1]),
    "a number": Way(lambda logits, loss: loss, lambda out: out),
    "one row's logits": Way(lambda logits, loss: (logits[:1, 0, 0], loss), lambda out: out[1]),
    "dict": Way(lambda logits, loss: {"logits": logits, "loss": loss}, lambda out: out["loss"]),
    "dict of another name": Way(lambda logits, loss: {"logits": logits, "cost": loss}, lambda out: out["cost"]),
    "dict with a second loss": Way(
        lambda logits, loss: {"aux_loss": size(logits), "loss": loss, "logits": logits}, lambda out: out["loss"]
    ),
    "dataclass": Way(Named, lambda out: out.loss),
    "dataclass of another name": Way(Cost, lambda out: out.cost),
    "named tuple": Way(Pair, lambda out: out.cost),
    "object": Way(lambda logits, loss: SimpleNamespace(scores=logits, cost=loss), lambda out: out.cost),
    "loss, accuracy": Way(lambda logits, loss: (loss, accuracy(logits)), lambda out: out[0]),
    "accuracy, loss": Way(lambda logits, loss: (accuracy(logits), loss), lambda out: out[1]),
    "nested": Way(lambda logits, loss: (logits, {"accuracy": accuracy(logits), "nll": loss}), lambda out: out[1]["nll"]),
    "one element": Way(lambda logits, loss: (logits, loss.reshape(1)), lambda out: out[1][0]),
    "no optional fields": Way(lambda logits, loss: CausalLMOutput(loss=loss, logits=logits), lambda out: out.loss),
    "features with gradients": Way(lambda logits, loss: (loss, logits.mean(0), logits.square()), lambda out: out[0]),
    "loss and its log": Way(lambda logits, loss: (loss, loss.detach(), None, "nll"), lambda out: out[0]),
    "twice": Way(lambda logits, loss: (loss, {"nll": loss, "logits": logits}), lambda out: out[0]),
    "by position": Way(lambda logits, loss: (size(logits), loss), lambda out: out[1], {"loss": -1}),
    "by key": Way(lambda logits, loss: {"size": size(logits), "nll": loss}, lambda out: out["nll"], {"loss": "nll"}),
    "by field": Way(lambda logits, loss: SimpleNamespace(size=size(logits), nll=loss), lambda out: out.nll, {"loss": "nll"}),
    "by function": Way(lambda logits, loss: {"size": size(logits), "parts": {"nll": loss}}, inner, {"loss": inner}),
}
"""The one differentiable number, or the one that ``loss=`` names."""
SUM = Way(lambda logits, loss: {"size": size(logits), "nll": loss}, summed, {"loss": summed})
"""A loss of two terms, which is a mean over rows where these have as many labels."""
FEW_BITS = {
    "bfloat16": Way(lambda logits, loss: (logits, loss.bfloat16()), lambda out: out[1]),
    "float16": Way(lambda logits, loss: (logits, loss.half()), lambda out: out[1]),
}
"""Losses that are rounded: their means differ from that of all rows by as much."""
WAYS = {**RETURNS, **FEW_BITS, "a sum": SUM}


class GPT(nn.Module):
    """Takes a batch and returns a loss as nanoGPT does, but for the output."""

    def __init__(self, output: Callable[..., Any], ignored: int = IGNORED) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.output, self.ignored = output, ignored

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = self.head(self.down(self.first(self.table(idx)).relu()).tanh())
        if targets is None:
            return self.output(logits, None)
        return self.output(logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored))


def is_even(step: int) -> bool:
    """Return True if all rows of a step's batch have the same number of targets."""
    return step % 3 == 0


def batch_of(step: int, ignored: int = IGNORED) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, of which rows have different numbers, but in every third step all."""
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    return ids(step), targets if is_even(step) else targets.masked_fill(torch.arange(LENGTH) >= lengths, ignored)


def engine_of(model: nn.Module, mesh: Any, target: str, parts: int, example: Any, **options: Any) -> tuple[Any, Any]:
    """An engine of a ``GPT``, and its schedule."""
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh is not None and mesh["tp"].size() > 1:
        schedule.tensor_parallel({"first": "colwise", "down": "rowwise"})
    if mesh is not None and mesh["pp"].size() > 1:
        schedule["first"].cut_pipeline_stage()
    return build(schedule, target, optimizer=sgd, microbatches=parts, **options), schedule


def differences(
    target: str, mesh: Any, way: Way, steps: list[int], evaluates: bool = False, ignored: int = IGNORED, **options: Any
) -> list[float]:
    """How far each step's loss and weights are from those of one process; of evaluations before the steps, too."""
    torch.manual_seed(0)
    model, parts = GPT(way.output, ignored), options.pop("microbatches", 2)
    reference, dp = copy.deepcopy(model), mesh["dp"].size()
    mine = [[each.chunk(dp)[mesh["dp"].get_local_rank()] for each in batch_of(step, ignored)] for step in steps]
    example = tuple(each.chunk(parts)[0] for each in mine[0])
    engine, schedule = engine_of(model, mesh, target, parts, example, **way.options, **options)
    optimizer, found = sgd(reference.parameters()), []
    for step, (idx, targets) in zip(steps, mine, strict=True):
        loss = way.loss(reference(*batch_of(step, ignored)))
        if evaluates:
            found.append(abs(engine.eval_batch(idx, targets).item() - loss.item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(abs(engine.train_batch(idx=idx, targets=targets).item() - loss.item()))
        with engine.whole_parameters() if target == "deepspeed" else nullcontext():
            state = schedule.full_state()
        found += [float((state[name] - each.detach()).abs().max()) for name, each in reference.named_parameters()]
    engine.close()
    return found


def all_differences(
    rank: int, target: str, layout: dict[str, int], names: list[str], steps: list[int], evaluates: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """The largest difference of each way to return a loss, or what its error says."""
    mesh, found = mesh_of(**layout), dict[str, Any]()
    for name in names:

        def run(name: str = name) -> None:
            worst = max(differences(target, mesh, WAYS[name], steps, evaluates, **options))
            found[name] = worst if worst == worst else float("inf")

        if (message := message_of(run)) != "no error":
            found[name] = message
    return found


# ---- ways to pass a batch

PASSES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "by name": lambda x, y: ((), {"idx": x, "targets": y}),
    "by position": lambda x, y: ((x, y), {}),
    "one of each": lambda x, y: ((x,), {"targets": y}),
    "a tuple": lambda x, y: (((x, y),), {}),
    "a list": lambda x, y: (([x, y],), {}),
    "a dict": lambda x, y: (({"idx": x, "targets": y},), {}),
}
"""Arguments of ``train_batch`` and ``eval_batch``; a loss function's targets have the same names and places."""
OWN_LOSS = RETURNS["logits, loss"]


class Logits(GPT):
    """Leaves the loss to a loss function."""

    def forward(self, idx: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits, _ = super().forward(idx)
        return logits.mT  # type: ignore[no-any-return]


def _passed(target: str, mesh: Any, given: Callable[..., Any], steps: list[int], of_loss_fn: bool) -> float:
    """The largest difference of losses and weights from those of one process."""
    torch.manual_seed(0)
    options = {"loss_fn": nn.CrossEntropyLoss(ignore_index=IGNORED)} if of_loss_fn else {}
    model = Logits(OWN_LOSS.output) if of_loss_fn else GPT(OWN_LOSS.output)
    reference, dp = copy.deepcopy(model), mesh["dp"].size()
    mine = [[each.chunk(dp)[mesh["dp"].get_local_rank()] for each in batch_of(step)] for step in steps]
    example = tuple(each.chunk(2)[0] for each in mine[0])[: 1 if of_loss_fn else 2]
    engine, schedule = engine_of(model, mesh, target, 2, example, **options)
    optimizer, found = sgd(reference.parameters()), []
    for step, batch in zip(steps, mine, strict=True):
        idx, targets = batch_of(step)
        loss = options["loss_fn"](reference(idx), targets) if of_loss_fn else reference(idx, targets)[1]
        args, kwargs = given(*batch)
        found.append(abs(engine.eval_batch(*args, **kwargs).item() - loss.item()))
        found.append(abs(engine.train_batch(*args, **kwargs).item() - loss.item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = schedule.full_state()
        found += [float((state[name] - each.detach()).abs().max()) for name, each in reference.named_parameters()]
    engine.close()
    return max(found)


def passed(rank: int, target: str, layout: dict[str, int], steps: list[int], of_loss_fn: bool) -> dict[str, Any]:
    """The largest difference for each way to pass a batch, or what its error says."""
    mesh, found = mesh_of(**layout), dict[str, Any]()
    for name, given in PASSES.items():

        def run(name: str = name, given: Callable[..., Any] = given) -> None:
            found[name] = _passed(target, mesh, given, steps, of_loss_fn)

        if (message := message_of(run)) != "no error":
            found[name] = message
    return found


# ---- labels under any name


class Labelled(GPT):
    """Calls its targets labels; with ``masks`` it leaves out some of them itself."""

    masks = False

    def forward(self, idx: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(idx, labels.masked_fill(idx > 2, self.ignored) if self.masks else labels)


def of_labels(rank: int, target: str, layout: dict[str, int], steps: list[int], evaluates: bool) -> dict[str, Any]:
    """The largest difference of losses and weights from those of one process, by the name of labels and what is ignored."""
    mesh, found = mesh_of(**layout), dict[str, Any]()
    for name, make in (("targets", GPT), ("labels", Labelled)):
        for ignored in (-1, -100, 0):

            def run(name: str = name, make: Any = make, ignored: int = ignored) -> None:
                found[f"{name} but {ignored}"] = _labelled(target, mesh, name, make, ignored, steps, evaluates)

            if (message := message_of(run)) != "no error":
                found[f"{name} but {ignored}"] = message
    return found


def _labelled(target: str, mesh: Any, name: str, make: Any, ignored: int, steps: list[int], evaluates: bool) -> float:
    torch.manual_seed(0)
    model, dp = make(OWN_LOSS.output, ignored), mesh["dp"].size()
    reference, parts, rank = copy.deepcopy(model), 2, mesh["dp"].get_local_rank()
    batches = [dict(zip(("idx", name), batch_of(step, ignored), strict=True)) for step in steps]
    mine = [{key: value.chunk(dp)[rank] for key, value in batch.items()} for batch in batches]
    engine, schedule = engine_of(model, mesh, target, parts, {key: value.chunk(parts)[0] for key, value in mine[0].items()})
    optimizer, found = sgd(reference.parameters()), []
    for batch, own in zip(batches, mine, strict=True):
        loss = reference(**batch)[1]
        if evaluates:
            found.append(abs(engine.eval_batch(**own).item() - loss.item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(abs(engine.train_batch(**own).item() - loss.item()))
        state = schedule.full_state()
        found += [float((state[key] - each.detach()).abs().max()) for key, each in reference.named_parameters()]
    engine.close()
    return max(found)


def masked_later(rank: int, target: str) -> str:
    """Error message of an engine whose model ignores some labels from the second step on."""
    model, (idx, targets) = Labelled(OWN_LOSS.output), batch_of(0)
    engine, _ = engine_of(model, mesh_of(), target, 2, {"idx": idx[:4], "labels": targets[:4]}, check=False)
    engine.train_batch(idx=idx, labels=targets)
    model.masks = True
    message = message_of(lambda: engine.train_batch(idx=idx, labels=targets))
    engine.close()
    return message


# ---- outputs in which no number, or several, can be the loss


class Temperature(GPT):
    """Returns its temperature beside what a loss function takes."""

    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__(output)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        return self.head(self.first(self.table(idx))[..., :WIDTH]), self.scale.exp()


class Once(GPT):
    """Returns a second number from its second step on."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(idx, targets)
        self.calls = getattr(self, "calls", 0) + 1
        return (logits, loss) if self.calls < 2 else (logits, loss, size(logits))


def two(logits: torch.Tensor, loss: torch.Tensor) -> Any:
    """Two numbers with gradients."""
    return {"nll": loss, "size": size(logits), "logits": logits}


_SEVERAL = "the model returns several differentiable numbers, 'nll', 'size', and each may be its loss; say which is with loss="
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "two": (partial(GPT, two), {}, _SEVERAL),
    "logits": (
        partial(GPT, lambda logits, loss: (logits, None)),
        {},
        "the model returns no loss but '0' of shape (4, 6, 7); give the model labels",
    ),
    "none": (partial(GPT, lambda logits, loss: None), {}, "the model returns no loss but a NoneType; give the model labels"),
    "no loss": (
        partial(GPT, lambda logits, loss: {"loss": None, "size": size(logits)}),
        {},
        "the loss is not one number but None",
    ),
    "temperature": (
        partial(Temperature, two),
        {},
        "the model returns no loss but '0' of shape (4, 6, 7), '1' of shape (); give the model labels",
    ),
    "no key": (
        partial(GPT, two),
        {"loss": "cost"},
        "the model's output has no 'cost', which loss= names; it has 'nll', 'size'",
    ),
    "no number": (partial(GPT, two), {"loss": "logits"}, "loss='logits' is a tensor of shape (4, 6, 7) in the model's output"),
    "no tensor": (partial(GPT, two), {"loss": lambda output: 1.0}, "loss= gives a float in the model's output"),
    "no choice": (partial(GPT, two), {"loss": 1.5}, "loss is 1.5; give the key or position of the loss"),
    "both": (partial(GPT, two), {"loss": "nll", "loss_fn": F.mse_loss}, "and loss_fn= computes it; give one of them"),
    "terms": (partial(GPT, two), {"loss": "nll", "loss_weights": {"nll": "targets"}}, "leave out loss=, or give one count"),
}
"""Refused cases: model, options of ``build`` and message."""


def refusals(rank: int, target: str, layout: dict[str, int]) -> dict[str, str]:
    """Error message of each refused case, from its build or first step."""
    found, mesh = {}, mesh_of(**layout)
    for name, (make, options, _) in REFUSED.items():

        def run(make: Callable[[], nn.Module] = make, options: dict[str, Any] = options) -> None:
            idx, targets = batch_of(0)
            engine, _ = engine_of(make(), mesh, target, 2, (idx[:4], targets[:4]), **options)
            try:
                engine.train_batch(idx, targets)
            finally:
                engine.close()

        found[name] = message_of(run)
    return found
