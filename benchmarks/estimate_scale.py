"""Seconds and memory of an estimate of a Llama 405B on many fake ranks, by part, in a process of its own for each case.

Run ``python -m benchmarks.estimate_scale``; it prints a section for ``benchmarks/README.md``. Each block is recomputed, values
between tensor-parallel layers are sharded along the sequence, and the hardware is ``h100``, so that the step is simulated too.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import create_schedule
from slapo_plan import estimate, fake_ranks

LAYERS, LENGTH = 126, 8192


class Case(NamedTuple):
    """One layout; each of its pipeline ranks has ``stages`` stages."""

    pp: int = 16
    dp: int = 128
    tp: int = 8
    stages: int = 1
    microbatches: int = 32


CASES = {
    "1F1B": Case(),
    "interleaved, 2 stages a rank": Case(stages=2),
    "1F1B, dp 1": Case(dp=1),
    "no pipeline": Case(pp=1, dp=2048, microbatches=4),
}


def seconds_of(case: Case) -> dict[str, float]:
    """Return the seconds of the processor in each part, and the peak memory of the process in MiB."""
    found: dict[str, float] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        found[name] = time.process_time() - start

    with fake_ranks(pp=case.pp, dp=case.dp, tp=case.tp) as mesh:
        with part("model on meta"), torch.device("meta"):
            sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256, "max_position_embeddings": LENGTH}
            heads = {"num_attention_heads": 128, "num_key_value_heads": 8, "use_cache": False}
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes, **heads))
        ids = torch.zeros(case.microbatches, LENGTH, dtype=torch.long)
        with part("create_schedule"):
            sch = create_schedule(model, mesh=mesh, example_inputs={"input_ids": ids[:1], "labels": ids[:1]})
        with part("tensor_parallel"):
            sch.tensor_parallel(sequence_parallel=True)
        with part("checkpoint"):
            for block in sch.select("model.layers.*"):
                block.checkpoint()
        stages = case.pp * case.stages
        with part("pipeline"):
            if stages > 1:
                ends = [index * LAYERS // stages for index in range(1, stages)]
                sch.pipeline(boundaries=[f"model.layers.{end - 1}" for end in ends])
        options: dict[str, Any] = {"pipeline_schedule": "interleaved"} if case.stages > 1 else {}
        with part("estimate"):
            batch = {"input_ids": ids, "labels": ids}
            made = estimate(sch, batch, microbatches=case.microbatches, precision="bf16", hardware="h100", **options)
        assert not made.problems, made.problems
    return {**found, "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main(*words: str) -> None:
    """Print the section, or, of the case in JSON, its figures in JSON."""
    if words:
        print(json.dumps(seconds_of(Case(*json.loads(words[0])))))
        return
    print(f"\n## Estimates of a Llama 405B on fake ranks, {LAYERS} layers, sequence {LENGTH}, bf16, seconds of the processor\n")
    for number, (name, case) in enumerate(CASES.items()):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.estimate_scale", json.dumps(case)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if not number:
            parts = [key for key in found if key != "MiB"]
            print(f"| layout | ranks | {' | '.join(f'{key} (s)' for key in parts)} | peak of the process (MiB) |")
            print("|---" * (len(parts) + 3) + "|")
        ranks = f"pp {case.pp} x dp {case.dp} x tp {case.tp}"
        values = " | ".join(f"{found[key]:.2f}" for key in parts)
        print(f"| {name} | {ranks} | {values} | {found['MiB']:.0f} |", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
