"""Rank functions of the tests of losses: an engine beside the unmodified model with the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from tests.slapo_torch.layouts import mesh_of, message_of

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
        slapo_deepspeed.plugin,
        slapo_megatron.plugin,
    ]
)
STEPS, ROWS = 3, 8
"""Steps of a case, and rows of its batch on all replicas."""

Batch = dict[str, Any]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Adds gradients to the weights, some of those before too."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


@dataclass(frozen=True)
class Case:
    """A model, its loss and its options.

    Args:
        model: Makes it.
        batch: Makes the batch of a step.
        options: Of ``build``.
        cut: The module that the first of two stages ends with.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    options: Mapping[str, Any]
    cut: str = "first"


# ---- losses of several terms

CLASSES, WIDTH, LENGTH = 7, 8, 6


def uneven(step: int, seed: int = 0) -> torch.Tensor:
    """Labels of which each row has another number; in the second step two rows have none."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    if step == 1:
        lengths[:2] = 0
    return labels.masked_fill(torch.arange(LENGTH) >= lengths, -100)


def ids(step: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


class Heads(nn.Module):
    """Predicts the next token and the one after it, with a loss of the size of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.later = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, later_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(self.first(self.table(ids)).tanh()).tanh()
        logits = self.head(hidden)
        lm = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        mtp = 0.3 * F.cross_entropy(self.later(hidden).flatten(0, 1), later_labels.flatten())
        z = 0.1 * logits.logsumexp(-1).square().mean()
        return {"loss": lm + mtp + z, "lm": lm, "mtp": mtp, "z": z, "logits": logits}


def of_heads(step: int) -> Batch:
    return {"ids": ids(step), "labels": uneven(step), "later_labels": uneven(step, 1)}


class Masked(nn.Module):
    """A loss by hand, a mean over what a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.second(self.first(x).tanh()).squeeze(-1)
        return {"loss": ((found - y).square() * mask).sum() / mask.sum(), "found": found}


def of_masked(step: int, dtype: torch.dtype = torch.bool) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, LENGTH, WIDTH, generator=generator), torch.randn(ROWS, LENGTH, generator=generator)
    return {"x": x, "y": y, "mask": (uneven(step) != -100).to(dtype)}


class Tagger(nn.Module):
    """Gives logits of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.table(ids)).tanh()).mT


CLASS_WEIGHTS = torch.arange(1.0, CLASSES + 1)


def weighed(labels: torch.Tensor) -> torch.Tensor:
    """The weights of the classes of labels, over which a weighted cross entropy is a mean."""
    return torch.cat([CLASS_WEIGHTS, torch.zeros(1)])[labels.clamp(min=-1)].sum()


def with_size(output: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """A cross entropy, and the size of the logits of the labels that count."""
    mask = labels != -100
    size = (output.logsumexp(1).square() * mask).sum() / mask.sum()
    return {"ce": F.cross_entropy(output, labels, label_smoothing=0.1), "size": 0.1 * size, "rows": output.square().mean()}


def of_tagger(step: int) -> Batch:
    return {"ids": ids(step), "labels": uneven(step)}


WEIGHED = {
    "heads": Case(
        Heads,
        of_heads,
        {"loss_weights": {"lm": "labels", "mtp": "later_labels", "z": lambda ids: ids.numel()}},
    ),
    "mask": Case(Masked, of_masked, {"loss_weights": "mask"}),
    "numbers": Case(Masked, partial(of_masked, dtype=torch.int64), {"loss_weights": "mask"}),
    "soft": Case(Masked, partial(of_masked, dtype=torch.float32), {"loss_weights": lambda mask, **others: mask.sum()}),
    "terms": Case(
        Tagger,
        of_tagger,
        {"loss_fn": with_size, "loss_weights": {"ce": "labels", "size": "labels", "rows": lambda: 1}},
    ),
    "classes": Case(Tagger, of_tagger, {"loss_fn": nn.CrossEntropyLoss(CLASS_WEIGHTS), "loss_weights": weighed}),
}

# ---- losses over all replicas


class Halves(nn.Module):
    """Its first half can be split over tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.down(self.first(x).relu()))


def near(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Finds the class of each row among the other rows."""
    rows = F.normalize(output, dim=-1)
    return F.cross_entropy(5 * rows @ rows.T, labels.flip(0).argsort())


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, scale: float | list[float] = 1.0) -> None:
        super().__init__()
        self.first, self.image = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.text, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.logit_scale = nn.Parameter(torch.tensor(scale))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        image = self.image(self.dropout(self.norm(self.first(image)).tanh()))
        image, text = F.normalize(image, dim=-1), F.normalize(self.text(text), dim=-1)
        return {"image": image, "text": text, "scale": self.logit_scale.exp()}


def contrast(output: dict[str, torch.Tensor], labels: Any) -> torch.Tensor:
    """The loss of CLIP."""
    logits = output["scale"] * output["image"] @ output["text"].T
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def of_towers(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("image", "text")}


@dataclass
class Embedded:
    """The output of ``Encoder``."""

    embedding: torch.Tensor
    scores: tuple[torch.Tensor, torch.Tensor]
    note: str = "embedded"


class Encoder(nn.Module):
    """Gives each row an embedding in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Embedded:
        embedding = self.second(self.first(x).tanh())
        return Embedded(embedding, (embedding.sum(-1), embedding.square().sum(-1)))


class WithMean(Encoder):
    """Returns a number of its micro-batch alone, too."""

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return {"scores": found.scores, "mean": found.embedding.mean()}


def supervised(output: Embedded, labels: torch.Tensor) -> torch.Tensor:
    """Pulls rows of one class together, and their scores' statistics over the batch."""
    near = F.normalize(output.embedding, dim=-1) @ F.normalize(output.embedding, dim=-1).T
    same = (labels[:, None] == labels[None]).float()
    return -(near.log_softmax(-1) * same).sum() / same.sum() + output.scores[0].std() + output.scores[1].sum().sqrt()


def of_encoder(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "labels": torch.arange(ROWS) % 3}


OVER = {
    "clip": Case(Towers, of_towers, {"loss_fn": contrast, "loss_over": "replicas"}),
    "clip with a vector": Case(partial(Towers, scale=[1.0]), of_towers, {"loss_fn": contrast, "loss_over": "replicas"}),
    "classes": Case(Encoder, of_encoder, {"loss_fn": supervised, "loss_over": "replicas"}),
    "split": Case(Halves, of_encoder, {"loss_fn": near, "loss_over": "replicas"}, cut="down"),
    "sum": Case(Tagger, of_tagger, {"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "loss_over": "replicas"}),
}
_SIZES = {"lm": "labels", "mtp": "later_labels", "z": lambda ids: ids.numel()}
REFUSED: dict[str, tuple[Case, str]] = {
    "no argument": (
        Case(Masked, of_masked, {"loss_weights": "masks"}),
        "loss_weights is 'masks', which is not a tensor of the batch; it has x, y, mask",
    ),
    "no argument of a function": (
        Case(Heads, of_heads, {"loss_weights": {**_SIZES, "z": lambda lengths: lengths.sum()}}),
        "the function of loss_weights['z'] takes 'lengths', which is not in the batch; it has ids, labels, later_labels",
    ),
    "less than nothing": (
        Case(Masked, of_masked, {"loss_weights": lambda mask, x: -1 if dist.get_rank() else mask.sum()}),
        "loss_weights counts -1.0; a count is a number from 0 on",
    ),
    "no number": (
        Case(Masked, of_masked, {"loss_weights": lambda mask: mask.sum(1)}),
        "the function of loss_weights gives a tensor of shape (2,); it has to give one number",
    ),
    "unclear integers": (
        Case(
            Masked, lambda step: {**of_masked(step), "kinds": torch.ones(ROWS, 1, dtype=torch.int64)}, {"loss_weights": "kinds"}
        ),
        "loss_weights is 'kinds', whose integers are all 0 or 1: a mask, or labels of two classes; make a mask bool",
    ),
    "no term": (
        Case(Heads, of_heads, {"loss_weights": {**_SIZES, "aux": lambda: 1}}),
        "loss_weights has the term 'aux', and the model's output, which has loss, lm, mtp, z, logits, has no such number",
    ),
    "no term of loss_fn": (
        Case(Tagger, of_tagger, {"loss_fn": with_size, "loss_weights": {"ce": "labels", "kl": "labels", "rows": lambda: 1}}),
        "loss_weights has the term 'kl', and the result of loss_fn, which has ce, size, rows, has no such number",
    ),
    "no sum": (
        Case(Heads, of_heads, {"loss_weights": {"lm": "labels", "mtp": "later_labels"}}),
        "and its terms lm, mtp add up to",
    ),
    "other labels": (
        Case(Heads, of_heads, {"loss_weights": {**_SIZES, "lm": "later_labels"}}),
        "loss_weights['lm'] counts",
    ),
    "over what differs": (
        Case(WithMean, of_encoder, {"loss_fn": lambda output, labels: output["scores"][0].std(), "loss_over": "replicas"}),
        "output 'mean' has shape (), which has no row for each row of the micro-batch, and differs between "
        "micro-batches or replicas",
    ),
    "over each part": (
        Case(partial(Towers, scale=[1.0]), of_towers, {"loss_fn": contrast}),
        "pass labels=, or build with loss_over='replicas' where the loss is made of the outputs alone",
    ),
    "over no loss": (
        Case(
            partial(Towers, scale=[1.0]),
            of_towers,
            {"loss_fn": lambda output, labels: output["image"], "loss_over": "replicas"},
        ),
        "the loss is not one number but (8, 8)",
    ),
    "over a model's own": (
        Case(Masked, of_masked, {"loss_over": "replicas"}),
        "let it return what the loss is made of, and give loss_fn=, a function of (outputs, labels)",
    ),
    "over and weights": (
        Case(Towers, of_towers, {"loss_fn": contrast, "loss_over": "replicas", "loss_weights": lambda: 1}),
        "no term needs a weight; leave out loss_weights=",
    ),
    "over what": (
        Case(Towers, of_towers, {"loss_fn": contrast, "loss_over": "batch"}),
        "loss_over is 'batch'; give 'replicas'",
    ),
}
"""Cases that all ranks refuse before the first step, with their messages."""
CASES = {**{f"weighed {name}": case for name, case in WEIGHED.items()}, **{f"over {name}": case for name, case in OVER.items()}}


# ---- running them


def in_one_process(case: Case) -> tuple[list[float], list[dict[str, torch.Tensor]], float]:
    """Losses and weights of each step of the unmodified model on whole batches, and the loss of an evaluation after them."""
    torch.manual_seed(0)
    model = case.model()
    optimizer, losses, weights = sgd(model.parameters()), [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(case, model, case.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
    model.eval()
    return losses, weights, loss_of(case, model, case.batch(0)).item()


def loss_of(case: Case, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The unmodified model's loss."""
    loss_fn = case.options.get("loss_fn")
    labels = batch.pop("labels", None) if loss_fn is not None else None
    output = model(**batch)
    found = loss_fn(output, labels) if loss_fn is not None else output["loss"]
    return sum(found.values()) if isinstance(found, dict) else found


def shares(batch: Batch, mesh: Any) -> Batch:
    """This replica's rows."""
    size, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    return {name: value.chunk(size)[rank] for name, value in batch.items()}


def engine_of(case: Case, mesh: Any, target: str, **options: Any) -> tuple[Any, Any]:
    """An engine, and its schedule."""
    torch.manual_seed(0)
    model = case.model()
    example = shares(case.batch(0), mesh)
    parts = options.get("microbatches", 1)
    example = {
        name: value.chunk(parts)[0] for name, value in example.items() if name != "labels" or "loss_fn" not in case.options
    }
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel({"first": "colwise", "down": "rowwise"})
    if mesh["pp"].size() > 1:
        schedule[case.cut].cut_pipeline_stage()
    return build(schedule, target, **{"optimizer": sgd, **case.options, **options}), schedule


def differences(target: str, case: Case, mesh: Any, **options: Any) -> float:
    """The largest of losses, weights and an evaluation from those in one process."""
    losses, weights, evaluated = in_one_process(case)
    engine, schedule = engine_of(case, mesh, target, **options)
    worst = 0.0
    for step in range(STEPS):
        worst = max(worst, abs(engine.train_batch(**shares(case.batch(step), mesh)).item() - losses[step]))
        with engine.whole_parameters() if target == "deepspeed" else nullcontext():
            found = schedule.full_state()
            worst = max(worst, *(float((found[name] - value).abs().max()) for name, value in weights[step].items()))
    worst = max(worst, abs(engine.eval_batch(**shares(case.batch(0), mesh)).item() - evaluated))
    engine.close()
    return worst if worst == worst else float("inf")


def refusals(rank: int, target: str, layout: dict[str, int]) -> dict[str, str]:
    """Error message of each refused case, from its build or first step."""
    found, mesh = {}, mesh_of(**layout)
    for name, (case, _) in REFUSED.items():

        def run(case: Case = case) -> None:
            engine, _ = engine_of(case, mesh, target, microbatches=2)
            try:
                engine.train_batch(**shares(case.batch(0), mesh))
            finally:
                engine.close()

        found[name] = message_of(run)
    return found


def all_differences(
    rank: int, target: str, layout: dict[str, int], options: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Those of several cases, or what their errors say."""
    found: dict[str, Any] = {}
    mesh = mesh_of(**layout)
    for name in names:

        def run(name: str = name) -> None:
            found[name] = differences(target, CASES[name], mesh, **options)

        if (message := message_of(run)) != "no error":
            found[name] = message
    return found
