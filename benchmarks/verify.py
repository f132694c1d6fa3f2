"""Cost of ``verify`` of a model of 24 layers on two tensor-parallel ranks, in training steps of the unmodified model.

Run ``python -m benchmarks.verify``; it prints a section for ``benchmarks/README.md``. The peer is one step in plain torch,
forward, backward and SGD, in one process that has the machine for itself. The ranks are two gloo processes, or two threads of
one. What is looked at once, when a schedule runs for the first time, is start-up, and is told apart: it is what the first
verification takes longer than the later ones. Seconds are on the wall; of rounds in turn the median.
"""

from __future__ import annotations

import copy
import os
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import create_schedule, set_random_seed
from slapo_testing import run_distributed
from slapo_verify import run_as_threads, verify

LAYERS, HIDDEN, ROWS, LENGTH, ROUNDS = 24, 256, 4, 128, 5
LEVELS = ("outputs", "grads", "step")


def model() -> nn.Module:
    """A Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS, **sizes))


def inputs() -> dict[str, torch.Tensor]:
    """One batch."""
    ids = torch.randint(1024, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def plain_step() -> float:
    """Seconds of a step, after one that is not timed."""
    trained, batch, seconds = model(), inputs(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        trained(**batch).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def verified(rank: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds of the schedule, and of each level's verifications, of which the first is that of a new schedule."""
    set_random_seed(0, tp_rank=rank)
    reference, batch = model(), inputs()
    found: dict[str, list[float]] = {}
    making = []
    for level in LEVELS:
        dist.barrier()
        start = time.perf_counter()
        sch: Any = create_schedule(copy.deepcopy(reference), example_inputs=batch)
        sch.tensor_parallel()
        making.append(time.perf_counter() - start)
        for _ in range(ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            verify(reference, sch, level=level).check()
            found.setdefault(level, []).append(time.perf_counter() - start)
    return median(making), found


def main() -> None:
    """Print the section."""
    step = [plain_step()]
    kinds = {
        "processes": run_distributed(verified, 2, timeout=600.0),
        "threads": run_as_threads(lambda: verified(dist.get_rank()), 2),
    }
    step.append(plain_step())
    peer = sum(step) / 2
    print(f"\n## Verify: a Llama of {LAYERS} layers, hidden size {HIDDEN}, {ROWS} x {LENGTH} tokens, tp 2, fp32\n")
    print("| ranks | level | a plain step (ms) | verify (ms) | verify / step | start-up (ms) |")
    print("|---|---|---|---|---|---|")
    for kind, ranks in kinds.items():
        for level in LEVELS:
            first, *later = ranks[0][1][level]
            again = median(later)
            print(
                f"| {kind} | {level} | {peer * 1e3:.0f} | {again * 1e3:.0f} | **{again / peer:.2f}** "
                f"| {max(first - again, 0) * 1e3:.0f} |"
            )
    print(
        "\nOn 2 cores: what two ranks do in processes is done at once, in threads one after the other, with one run of the\n"
        "unmodified model for both. Start-up is what the first run of a new schedule looks at besides. Making the\n"
        "schedule, which is not part of it, takes "
        f"{kinds['processes'][0][0]:.1f} s."
    )


if __name__ == "__main__":
    main()
