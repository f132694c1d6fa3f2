"""Models of other shapes than a stack of layers: blocks called many times, teachers, caches, recurrences, other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, ROWS, LENGTH = 16, 24, 8, 6


class Attention(nn.Module):
    """Takes keys and values of the words before, and returns all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        B, T, C = x.shape
        q, k, v = (each.view(B, T, 4, C // 4).transpose(1, 2) for each in self.qkv(x).split(C, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), (k, v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, past: Any = None) -> Any:
        y, cache = self.attn(self.norm(x), past)
        x = x + y
        return x + self.mlp(x), cache


class Language(nn.Module):
    """Words in and out, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.between(self.words(ids))).flatten(0, 1), targets.flatten())


class Universal(Language):
    """One block, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, _ = self.block(x)
        return x


class Recurrent(Language):
    """An LSTM, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.block = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), Block()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x)
        return self.block(x)[0]


class Fourier(Language):
    """A filter with complex weights, kept as complex numbers and as pairs, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.pairs = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.5)
        self.mixer = nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=torch.complex64) * 0.2)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.pairs)
        return self.block(x + torch.fft.irfft(waves @ self.mixer, n=WIDTH, norm="ortho"))[0]


class Double(Universal):
    """All of it in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Distilled(nn.Module):
    """A student with its frozen teacher inside."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Universal(), Universal()
        self.teacher.requires_grad_(False).eval()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher.head(self.teacher.between(self.teacher.words(ids)))
        logits = self.student.head(self.student.between(self.student.words(ids)))
        divergence = F.kl_div(logits.log_softmax(-1).flatten(0, 1), wanted.softmax(-1).flatten(0, 1), reduction="batchmean")
        return divergence + F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WithCaches(nn.Module):
    """Returns logits and a cache for each block, which it takes too; the loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, pasts: Any = None) -> tuple[torch.Tensor, list[Any]]:
        x, caches = self.words(ids), []
        for block, past in zip(self.blocks, pasts or [None, None], strict=True):
            x, cache = block(x, past)
            caches.append(cache)
        return self.head(x), caches


class Deep(Language):
    """A ``Sequential`` of a hundred layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [each for _ in range(40) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))]
        self.layers = nn.Sequential(*layers)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "universal": Universal,
    "recurrent": Recurrent,
    "fourier": Fourier,
    "float64": Double,
    "teacher inside": Distilled,
    "teacher outside": WithCaches,
    "caches": WithCaches,
    "deep": Deep,
}


def made(name: str) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return SHAPES[name]()


def loss_of(name: str) -> Callable[..., torch.Tensor] | None:
    """Return a loss function of what the model returns and the targets; None for models that compute it."""
    if name == "caches":
        return lambda outputs, targets: F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())
    if name == "teacher outside":
        torch.manual_seed(1)
        teacher = WithCaches().requires_grad_(False)

        def distance(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(outputs[0], teacher(ids)[0])

        return distance
    return None


def batches(rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words and targets of three steps of all replicas."""
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(WORDS, (2, rows, LENGTH), generator=generator)) for _ in range(3)]
