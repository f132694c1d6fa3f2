"""Time and memory to place the cuts of a large model and to take it apart, against torch's own.

Run ``python -m benchmarks.pipeline``; it prints a section for ``benchmarks/README.md``. Each line is measured in a process of
its own, after a first run on two layers: seconds are the processor's, which other load changes less than those of the wall,
and memory is by how much the process's peak grows. torch's ``pipeline()`` is told where to cut.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.planning import llama
from slapo_core import build_program, create_schedule

STAGES = 16
LARGE = {layers: ("parameters", "flops", "memory") if layers == 126 else ("parameters",) for layers in (126, 504)}
SMALL = (8, 32)
SEQ = 128


def small(layers: int) -> nn.Module:
    """A Llama with real weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=128, use_cache=False
    )
    return LlamaForCausalLM(config).eval()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(1, SEQ, dtype=torch.long)
    return {"input_ids": ids}


def ours(model: nn.Module, stages: int, balance: str) -> Mapping[str, float]:
    """Place the cuts and take the model apart."""
    model.config.use_cache = False
    schedule = create_schedule(model, example_inputs=batch())
    start = time.process_time()
    schedule.pipeline(stages, balance=balance)
    middle = time.process_time()
    program = build_program(schedule)
    assert len(program.stages) == stages
    return {"placing": middle - start, "taking apart": time.process_time() - middle}


def peer(model: nn.Module, stages: int) -> Mapping[str, float]:
    """torch.export and its splitter."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    layers = model.config.num_hidden_layers
    spec = {f"model.layers.{layers * stage // stages}": SplitPoint.BEGINNING for stage in range(1, stages)}
    start = time.process_time()
    pipe = pipeline(model, (), batch(), split_spec=spec)
    assert pipe.num_stages == stages
    return {"placing": 0.0, "taking apart": time.process_time() - start}


def measure(side: str, layers: int, stages: int, balance: str) -> Mapping[str, float]:
    """One line, in this process."""
    logging.disable(logging.WARNING)
    make: Callable[[int], nn.Module] = llama if side == "large" else small
    first = small(2)  # what is imported and compiled when first used
    peer(first, 2) if side == "peer" else ours(first, 2, balance)
    model = make(layers)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = peer(model, stages) if side == "peer" else ours(model, stages, balance)
    return {**found, "MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def _apart(*words: Any) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.pipeline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words} failed: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the section."""
    print(f"\n## Pipeline: cuts of a Llama 405B on meta placed, {STAGES} stages\n")
    print("| layers | balanced by | placing the cuts (s) | building the program (s) | together (s) | memory (MiB) |")
    print("|---|---|---|---|---|---|")
    for layers, balances in LARGE.items():
        for balance in balances:
            found = _apart("large", layers, STAGES, balance)
            placing, apart = found["placing"], found["taking apart"]
            print(
                f"| {layers} | {balance} | {placing:.2f} | {apart:.2f} | {placing + apart:.2f} | {found['MiB']:.0f} |",
                flush=True,
            )
    print("\n4 stages of a small Llama with real weights, in eval mode:\n")
    print("| layers | slapo, cuts placed (s) | torch's pipeline(), cuts given (s) | ratio | memory, slapo / torch (MiB) |")
    print("|---|---|---|---|---|")
    for layers in SMALL:
        mine, other = _apart("ours", layers, 4, "parameters"), _apart("peer", layers, 4, "-")
        seconds = mine["placing"] + mine["taking apart"], other["taking apart"]
        print(
            f"| {layers} | {seconds[0]:.2f} | {seconds[1]:.2f} | {seconds[0] / seconds[1]:.2f} | "
            f"{mine['MiB']:.0f} / {other['MiB']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    else:
        main()
