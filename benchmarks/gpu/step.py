"""A training step through an engine against the same step written by hand, on one GPU.

Run ``make gpu``. GPT-2 124M with AdamW; both sides take their steps in turns, in one process.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.timing import Sizes, batch_of, gpt2, table
from slapo_core import build, create_schedule

adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class ByHand:
    """Training step by hand, against which the engine is measured."""

    def __init__(self, model: nn.Module, precision: str, microbatches: int, device: str) -> None:
        self.model, self.microbatches = model, microbatches
        self.optimizer = adamw(model.parameters())
        self.cast = partial(torch.autocast, device, torch.bfloat16) if precision == "bf16" else nullcontext

    def train_batch(self, **batch: torch.Tensor) -> torch.Tensor:
        """One step; the mean loss."""
        self.optimizer.zero_grad()
        losses = []
        for part in zip(*(tensor.chunk(self.microbatches) for tensor in batch.values()), strict=True):
            with self.cast():
                loss = self.model(**dict(zip(batch, part, strict=True))).loss / self.microbatches
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses).sum()


def compare(precision: str, microbatches: int, sizes: Sizes) -> str:
    """The table of one kind of step.

    Raises:
        AssertionError: the losses of the first step are not the same.
    """
    plain, batch = gpt2(sizes), batch_of(sizes)
    sch = create_schedule(copy.deepcopy(plain), example_inputs=batch)
    engine = build(sch, "torch", optimizer=adamw, precision=precision, microbatches=microbatches)
    hand = ByHand(plain, precision, microbatches, sizes.device)
    torch.testing.assert_close(engine.train_batch(**batch), hand.train_batch(**batch), atol=1e-3, rtol=1e-3)
    steps = {"by hand": partial(hand.train_batch, **batch), "engine of `slapo.build`": partial(engine.train_batch, **batch)}
    return table(f"GPT-2 124M, AdamW, {precision}, {microbatches} micro-batches", steps, sizes)


def main() -> None:
    """Print the tables."""
    for precision, microbatches in (("bf16", 1), ("bf16", 4), ("fp32", 1)):
        print("\n" + compare(precision, microbatches, Sizes()), flush=True)


if __name__ == "__main__":
    main()
