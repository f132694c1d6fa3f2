"""Models as users write them, by hand: losses in tuples, caches, masks, routing by data, frozen parts, recurrent layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, TOKENS, WIDTH = 2, 32, 256, 64


class Attention(nn.Module):
    """Attention by hand, with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (each.view(rows, length, 4, width // 4).transpose(1, 2) for each in self.qkv(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // 4)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Nano(nn.Module):
    """Decoder with a tied head that returns ``(logits, loss)``, and may recompute its blocks itself."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Language(nn.Module):
    """Embedding, some body and a head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return F.cross_entropy(self.head(self.body(self.tokens(ids))).flatten(0, 1), targets.flatten())


class Experts(Language):
    """Each token goes to two experts, which its router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.layers):
            rows, places = torch.where(chosen == index)
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return out.view(x.shape)


class Checked(Language):
    """Raises for values that are not finite."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = super().body(x)
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x


class MaskedLabels(Language):
    """Computes logits for some positions only, which the labels choose."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chosen = targets > TOKENS // 2
        return F.cross_entropy(self.head(self.body(self.tokens(ids))[chosen]), targets[chosen])


class Cached(Language):
    """Makes a table in the first forward, and keeps what a hook saw in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []
        self.layers[0].register_forward_hook(lambda _, args, output: self.seen.append(output.detach()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        if self.table is None:
            self.table = torch.outer(torch.arange(x.shape[1]).float(), torch.ones(WIDTH)).cos().to(x.device)
        return super().body(x * self.table)


class Recurrent(Language):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)  # type: ignore[assignment,call-arg]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]  # type: ignore[no-any-return,operator]


class FrozenBody(Language):
    """Trains its head alone, beside a branch without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.tokens.requires_grad_(False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher = super().body(x)
        return super().body(x) - teacher.mean()


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    hidden: Any = None


class Repeated(nn.Module):
    """One block that runs six times, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for _ in range(6):
            x = x + self.block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


class Siamese(nn.Module):
    """One network that runs on images and on their mirror images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(1024, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = self.net(x), self.net(x.flip(-1))
        return F.mse_loss(one, other) + F.cross_entropy(one + other, y)


class Lists(nn.Module):
    """Takes lists, dicts and plain values, works in place, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, parts: list[torch.Tensor], facts: dict[str, Any], mask: Any = None, scale: float = 1.0) -> Result:
        x = torch.stack(parts)
        for layer in self.layers:
            x = layer(x).mul_(0.5).relu_()
        x = x if mask is None else x * mask
        return Result((x * facts["weights"]).square().mean() * scale, x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.max_pool2d(self.stem(x), 2)
        for stage in self.stages:
            x = x + stage(x)
        logits = self.head(x.mean((2, 3)))
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


class Spectral(nn.Module):
    """Complex filters of a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        sizes = LENGTH // 2 + 1, WIDTH
        self.filters = nn.ParameterList(nn.Parameter(torch.randn(sizes, dtype=torch.cfloat)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.filters:
            x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * each, n=LENGTH, dim=1)
        return x.square().mean()


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight.t()
        ctx.gate = torch.sigmoid(y)
        ctx.save_for_backward(x, weight, y)
        return y * ctx.gate

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, y = ctx.saved_tensors
        inner = gradient * (ctx.gate + y * ctx.gate * (1 - ctx.gate))
        return inner @ weight, inner.t() @ x


class Gated(nn.Module):
    """Layers of an ``autograd.Function``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = Gate.apply(x, weight)
        return x.square().mean()


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def tokens(rows: int) -> dict[str, Any]:
    ids = torch.randint(3, TOKENS, (rows, LENGTH), generator=_numbers())
    return {"ids": ids, "targets": ids.clone()}


def vectors(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, WIDTH, generator=_numbers())}


def sequences(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, LENGTH, WIDTH, generator=_numbers())}


def lists(rows: int) -> dict[str, Any]:
    parts = [torch.randn(rows, WIDTH, generator=_numbers()) for _ in range(3)]
    return {"parts": parts, "facts": {"weights": torch.ones(rows, WIDTH)}, "mask": None, "scale": 2.0}


def images(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, 3, 16, 16, generator=_numbers()), "y": torch.randint(10, (rows,), generator=_numbers())}


class UserModel(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]] = tokens


USER_MODELS: dict[str, UserModel] = {
    "nano": UserModel(Nano),
    "nano-checkpoint": UserModel(lambda: Nano(reentrant=False)),
    "nano-reentrant": UserModel(lambda: Nano(reentrant=True)),
    "deep": UserModel(lambda: Language(layers=8)),
    "experts": UserModel(Experts),
    "checked": UserModel(Checked),
    "masked": UserModel(MaskedLabels),
    "cached": UserModel(Cached),
    "lstm": UserModel(lambda: Recurrent(nn.LSTM)),
    "gru": UserModel(lambda: Recurrent(nn.GRU)),
    "frozen": UserModel(FrozenBody),
    "repeated": UserModel(Repeated),
    "siamese": UserModel(Siamese, images),
    "lists": UserModel(Lists, lists),
    "images": UserModel(Images, images),
    "spectral": UserModel(Spectral, sequences),
    "gated": UserModel(Gated, vectors),
}
