"""Random orders of primitives on three models, and what must hold of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import slapo
from tests.zoo.families import FAMILIES

WIDTH, VOCABULARY = 16, 64


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Takes sizes from its input, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / (width // 4) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """A language model that nobody but its author has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


PARTS = {
    "plain": ("layers", "attn", "mlp", "up", "act", nn.GELU()),
    "gpt2": ("transformer.h", "attn", "mlp", "c_fc", "act", slapo.make(nn.GELU, approximate="tanh")),
    "llama": ("model.layers", "self_attn", "mlp", "up_proj", "act_fn", nn.SiLU()),
}
"""Path of the blocks, and names inside: attention, MLP, its first layer, its activation; and a module equal to that."""


def make(name: str) -> nn.Module:
    """A model of three blocks."""
    torch.manual_seed(0)
    if name == "plain":
        return Plain()
    model = FAMILIES[name].model(depth=3)
    model.config.use_cache = False
    return model


def batch(seed: int = 0, rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Keyword arguments of one call."""
    ids = torch.randint(5, 60, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Order:
    """A random order of two to five primitives on one of the models.

    Args:
        seed: Of the order.
        cuts: Whether the model is cut into stages.

    Attributes:
        steps: What is applied, by name.
    """

    def __init__(self, seed: int, cuts: bool = True) -> None:
        self.draw = random.Random(seed)
        self.model = self.draw.choice(sorted(PARTS))
        self.blocks, self.attention, self.mlp, self.layer, self.act, self.same_act = PARTS[self.model]
        self.place = 0
        known = [name for name in STEPS if cuts or "cut" not in name and name != "pipeline"]
        self.steps = [self.draw.choice(known) for _ in range(self.draw.randint(2, 5))]
        if "cut_inside" in self.steps:  # a block that is wrapped runs as one piece
            self.steps = [name for name in self.steps if name not in ("checkpoint", "offload")]

    def block(self) -> str:
        """Path of one of the blocks."""
        self.place = self.draw.randrange(3)
        return f"{self.blocks}.{self.place}"

    def apply(self, sch: slapo.Schedule) -> list[str]:
        """Take the steps, and return the refusals but for those that no trace is the reason of."""
        refused = []
        for name in self.steps:
            try:
                STEPS[name](self, sch)
            except slapo.ScheduleError as err:
                refused.append(str(err))
        return [why for why in refused if not any(words in why for words in EXPECTED)]


def _trace(self: Order, sch: slapo.Schedule) -> None:
    flat = {"flatten": True, "leaf_modules": [f"{self.blocks}.*"]}
    sch.trace(**self.draw.choice([{}, {}, {"recursive": False}, flat]))


STEPS: dict[str, Callable[[Order, slapo.Schedule], Any]] = {
    "trace": _trace,
    "trace_until": lambda self, sch: sch.trace_until(
        self.draw.choice([self.blocks, f"{self.blocks}.*", "", f"{self.blocks}.1"])
    ),
    "trace_block": lambda self, sch: sch[self.block()].trace(flatten=self.draw.random() < 0.5),
    "trace_mlp": lambda self, sch: sch[f"{self.block()}.{self.mlp}"].trace(),
    "trace_attention": lambda self, sch: sch[f"{self.block()}.{self.attention}"].trace(),
    "checkpoint": lambda self, sch: sch[self.block()].checkpoint(),
    "checkpoint_mlp": lambda self, sch: sch[f"{self.block()}.{self.mlp}"].checkpoint(),
    "offload": lambda self, sch: sch[self.block()].offload(),
    "use_kernels": lambda self, sch: sch.use_kernels(),
    "cut": lambda self, sch: sch[f"{self.blocks}.{self.draw.randrange(2)}"].cut_pipeline_stage(),
    "cut_inside": lambda self, sch: sch[f"{self.block()}.{self.attention}"].cut_pipeline_stage(),
    "pipeline": lambda self, sch: sch.pipeline(2),
    "tensor_parallel": lambda self, sch: sch.tensor_parallel(),
    "decompose": lambda self, sch: sch[f"{self.block()}.{self.mlp}.{self.layer}"].decompose(),
    "annotate": lambda self, sch: sch[f"{self.block()}.{self.mlp}.{self.layer}"].annotate("weight", "note", 1),
    "replace": lambda self, sch: sch[f"{self.block()}.{self.mlp}.{self.act}"].replace(self.same_act),
}
"""Name to what applies a primitive to a part that the order draws."""

EXPECTED = (
    "has no bias",
    "is checkpointed already",
    "is offloaded already",
    "a stage ends after this module already",
    "the model is cut already",
    "is already sharded",
    "which hide its layers",
    "runs as one piece",
)
"""Words of refusals that no trace is the reason of."""


def gradients(
    call: Callable[..., Any], owner: nn.Module, inputs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of one call, and the gradients of the owner's parameters."""
    owner.zero_grad()
    torch.manual_seed(1)
    loss: torch.Tensor = call(**inputs)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}


def plain_losses(model: nn.Module, batches: Iterable[dict[str, torch.Tensor]]) -> list[float]:
    """Train the unmodified model by SGD, one step a batch, and return its losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for each in batches:
        optimizer.zero_grad()
        loss = model(**each)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
