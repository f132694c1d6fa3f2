"""Steps timed in turns, and their ratios within each turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.sharding import compared

Step = Callable[[], object]


class Sizes(NamedTuple):
    """Sizes of the models, their batch and the measurement; the models' own sizes are those of GPT-2 124M."""

    device: str = "cuda"
    vocabulary: int = 50257
    hidden: int = 768
    heads: int = 12
    layers: int = 12
    batch: int = 8
    sequence: int = 1024
    warm_up: int = 5
    rounds: int = 30
    in_a_row: int = 5


def gpt2(sizes: Sizes) -> nn.Module:
    """Without dropout, on the device."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    own = {"vocab_size": sizes.vocabulary, "n_positions": sizes.sequence, "n_embd": sizes.hidden}
    torch.manual_seed(0)
    config = GPT2Config(
        **own, n_head=sizes.heads, n_layer=sizes.layers, **rates, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).to(sizes.device)


def batch_of(sizes: Sizes) -> dict[str, Any]:
    """Random tokens."""
    ids = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.sequence), device=sizes.device)
    return {"input_ids": ids, "labels": ids}


def step_of(model: Any, batch: dict[str, Any], sizes: Sizes) -> torch.Tensor:
    """Forward and backward under bf16 autocast; the loss."""
    with torch.autocast(sizes.device, torch.bfloat16):
        loss: torch.Tensor = model(**batch).loss
    loss.backward()
    return loss.detach()


def milliseconds(step: Step, sizes: Sizes) -> float:
    """Return the seconds of one of several steps in a row, by the clock: a wait for the GPU within a step delays the next."""
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(sizes.in_a_row):
        step()
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / sizes.in_a_row


def table(title: str, steps: Mapping[str, Step], sizes: Sizes) -> str:
    """Run the steps in turns: medians, and ratios to the first as in ``benchmarks/sharding.py``."""
    names = list(steps)
    for step in steps.values():
        for _ in range(sizes.warm_up):
            step()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(sizes.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(milliseconds(steps[name], sizes))
    where = torch.cuda.get_device_name() if sizes.device == "cuda" else sizes.device
    lines = [f"{where}, torch {torch.__version__}, {title}, batch {sizes.batch} x {sizes.sequence}", ""]
    lines += [f"| step | ms | / {names[0]} |", "|---|---|---|"]
    for name in names:
        ratio, spread = compared(times[name], times[names[0]])
        lines.append(f"| {name} | {statistics.median(times[name]):.2f} | {ratio:.3f} ± {spread:.3f} |")
    return "\n".join(lines)


def check_gradients(found: nn.Module, expected: nn.Module, name: str) -> None:
    """Raise ``AssertionError`` where a gradient is not that of the other model, as far as bf16 goes."""
    for (path, own), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (own.grad - other.grad).norm() < 2e-2 * other.grad.norm(), f"{name} has another gradient of {path}"
