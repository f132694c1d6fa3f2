"""Losses and models for the first-step checks: which are means over rows, and which mix the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Loss = Callable[[Any, Any], torch.Tensor]
WIDTH, LABELS = 12, 5


def batch(rows: int = 8, seed: int = 1, even: bool = True) -> dict[str, torch.Tensor]:
    """Numbers and labels, for each row the same number of labels or not."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(LABELS, (rows, 6), generator=generator)
    if not even:
        labels[: rows // 2 : 2, 2:] = -100
        labels[rows // 2 :, :1] = -100
    return {"x": torch.randn(rows, 6, generator=generator), "labels": labels}


class Towers(nn.Module):
    """Gives two vectors of each row, and logits for each of its labels."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.middle = middle if middle is not None else nn.ReLU()
        self.one, self.other, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 6 * LABELS)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.middle(self.first(x))
        one, other = F.normalize(self.one(h), dim=-1), F.normalize(self.other(h), dim=-1)
        return {"one": one, "other": other, "logits": self.head(h).unflatten(-1, (6, LABELS))}


class WithLoss(nn.Module):
    """A model that makes its loss itself."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), labels)


def _cross_entropy(out: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten(), **options)


def _smoothed(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(out, labels, label_smoothing=0.1)


def _per_row(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return (out["one"] - out["other"]).square().mean(-1).mean()


def _pairs(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(3 * (out["one"].sum(-1) - out["other"].sum(-1)) - 0.1).mean()


def _in_row(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """The label's logit of each place against those of the other places of the same row."""
    scores = out["logits"][..., 0].unsqueeze(1) - out["logits"][..., 1].unsqueeze(2)
    return F.cross_entropy(scores, torch.arange(6).expand(len(scores), -1))


def _by_hand(out: Any, labels: torch.Tensor) -> torch.Tensor:
    mask = (labels != -100).float()
    each = F.cross_entropy(out["logits"].flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def _clip(out: Any, labels: torch.Tensor) -> torch.Tensor:
    logits, target = 5 * out["one"] @ out["other"].T, torch.arange(len(out["one"]))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _contrastive(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """Supervised: rows with the same first label are alike."""
    scores = (out["one"] @ out["one"].T) * 4 - 1e9 * torch.eye(len(out["one"]))
    alike = (labels[:, None, 0] == labels[None, :, 0]).float() - torch.eye(len(labels))
    return -((scores.log_softmax(-1) * alike).sum(-1) / alike.sum(-1).clamp(min=1)).mean()


def _spread(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(out, labels) + (1 - out["one"].std(0)).relu().mean()


def _sum(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return (out["one"] - out["other"]).square().sum()


def _root(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return (out["one"] - out["other"]).square().mean().sqrt()


def _by_root_of_rows(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(out, labels) / len(labels) ** 0.5


def _two_masks(out: Any, labels: torch.Tensor) -> torch.Tensor:
    later = labels.clone()
    later[:, 0] = -100
    later[::2, 3:] = -100
    return _cross_entropy(out, labels) + 0.3 * F.cross_entropy(-out["logits"].flatten(0, 1), later.flatten())


def _with_z(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(out, labels) + 0.1 * out["logits"].logsumexp(-1).square().mean()


MEANS: dict[str, Loss] = {
    "cross entropy": _cross_entropy,
    "smoothed": _smoothed,
    "per row": _per_row,
    "pairs": _pairs,
    "negatives in the row": _in_row,
    "masked by hand": _by_hand,
    "z-loss": _with_z,
}
"""Losses that are means over rows, where all have as many labels."""
UNEVEN = ("cross entropy", "smoothed", "per row")
"""Those that are so with other numbers of labels, too, as an engine weighs them, or that have no labels."""
NO_MEANS: dict[str, Loss] = {
    "clip": _clip,
    "supervised contrastive": _contrastive,
    "spread over the batch": _spread,
    "sum": _sum,
    "root": _root,
    "by the root of rows": _by_root_of_rows,
}


class Mixup(nn.Module):
    """Adds to each row some of another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))] if self.training else x


class Centred(nn.Module):
    """Subtracts the mean of all rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Experts(nn.Module):
    """Gives each row to one of two experts, which takes a limited number of rows, or any."""

    def __init__(self, capacity: float | None, noise: float = 0.0) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.capacity, self.noise = capacity, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x) + self.noise * torch.randn_like(x[:, :2])
        probs, index = scores.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero()[:, 0]
            if self.capacity is not None:
                rows = rows[: int(self.capacity * len(x) / 2)]
            out = out.index_add(0, rows, expert(x[rows]) * probs[rows, None])
        return x + out


class Balanced(nn.Module):
    """A router whose balance loss is of the statistics of a batch, and is kept for the model's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = self.gate(x).softmax(-1)
        return x * probs.max(-1, keepdim=True).values, (probs > 0.25).float().mean(0) @ probs.mean(0)


class Routed(nn.Module):
    """A model of such a router."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.head = nn.Linear(6, WIDTH), Balanced(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out, balance = self.router(self.first(x).tanh() * 3)
        return F.cross_entropy(self.head(out), labels[:, 0]) + balance


class Ghost(nn.Module):
    """Normalises by the statistics of two rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [(part - part.mean(0)) / (part.std(0, correction=0) + 0.1) for part in x.chunk(2)]
        return torch.cat(parts)


class DropPath(nn.Module):
    """Leaves out the block for some rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7 * x.tanh()


class Shaped(nn.Module):
    """A module on images or sequences, as a layer of vectors."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner, self.shape = inner, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.unflatten(-1, self.shape)).flatten(1)


class FunctionalDropout(nn.Module):
    """Drops out in ways that no module shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.3, self.training) * (torch.rand_like(x) > 0.2)
        q = x.unflatten(-1, (1, 3, 4))
        return x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0).flatten(1)


QUIET: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(3, WIDTH),
    "instance norm": lambda: Shaped(nn.InstanceNorm1d(3, affine=True, track_running_stats=True), 3, 4),
    "frozen batch norm": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.2)),
    "functional dropout": FunctionalDropout,
    "attention": lambda: Shaped(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True), 3, 4),
    "drop path": DropPath,
    "experts": lambda: Experts(None),
    "noisy experts": lambda: Experts(None, noise=1.0),
}
MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm 1d": (lambda: nn.BatchNorm1d(WIDTH), "BatchNorm1d 'model.middle'"),
    "batch norm 2d": (lambda: Shaped(nn.BatchNorm2d(3), 3, 2, 2), "BatchNorm2d 'model.middle.inner'"),
    "batch norm 3d": (lambda: Shaped(nn.BatchNorm3d(3), 3, 2, 2, 1), "BatchNorm3d 'model.middle.inner'"),
    "batch norm without running statistics": (
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
        "BatchNorm1d 'model.middle'",
    ),
    "mixup": (Mixup, "Mixup 'model.middle'"),
    "centred": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred()), "Centred 'model.middle.1'"),
    "capacity": (lambda: Experts(0.5), "Experts 'model.middle'"),
    "ghost batch": (Ghost, "Ghost 'model.middle'"),
}
