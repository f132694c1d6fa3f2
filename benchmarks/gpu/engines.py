"""GPT-2 124M on one GPU through each engine, with one schedule: losses and tokens per second side by side.

Run ``make gpu``, or ``python -m benchmarks.gpu.engines``; with ``--cpu`` it trains a tiny model on the CPU, to see that all of
it runs. Every engine has a process of its own, and trains in bf16 as it understands that: the torch dialect casts within the
forward, the others keep bf16 weights beside those in fp32. The schedule recomputes every block in the backward.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.timing import Sizes, batch_of, gpt2
from slapo_core import Schedule, build, create_schedule

ENGINES = ("torch", "deepspeed", "megatron")
TINY = Sizes("cpu", vocabulary=64, hidden=32, heads=2, layers=2, batch=4, sequence=16, warm_up=1, rounds=2)
STEPS, MICROBATCHES, LIMIT = 5, 2, 1e-2
"""Steps whose losses are compared, parts of a batch, and by which share the losses may differ."""


class Trained(NamedTuple):
    """Measurements of one engine."""

    losses: list[float]
    tokens_per_second: float
    device: str


def scheduled(sizes: Sizes, batch: dict[str, Any]) -> Schedule:
    """The one schedule."""
    mesh = init_device_mesh(sizes.device, (1, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    sch = create_schedule(gpt2(sizes), mesh=mesh, example_inputs=batch)
    for block in sch.select("transformer.h.*"):
        block.checkpoint()
    return sch


def train(target: str, sizes: Sizes) -> Trained:
    """Some steps on one batch through one engine; the default process group is there, of this process alone."""
    torch.manual_seed(0)
    batch = batch_of(sizes)
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    engine: Any = build(scheduled(sizes, batch), target, optimizer=adamw, precision="bf16", microbatches=MICROBATCHES)
    losses = [float(engine.train_batch(**batch)) for _ in range(STEPS)]
    for _ in range(sizes.warm_up):
        engine.train_batch(**batch)
    _wait(sizes)
    start = time.perf_counter()
    for _ in range(sizes.rounds):
        engine.train_batch(**batch)
    _wait(sizes)
    seconds = (time.perf_counter() - start) / sizes.rounds
    device = torch.cuda.get_device_name() if sizes.device == "cuda" else sizes.device
    return Trained(losses, sizes.batch * sizes.sequence / seconds, device)


def _wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def report(found: dict[str, Trained], sizes: Sizes) -> str:
    """The table.

    Raises:
        AssertionError: an engine has other losses than the first one.
    """
    names = list(found)
    first = found[names[0]]
    what = f"{sizes.layers} layers of hidden size {sizes.hidden}, batch {sizes.batch} x {sizes.sequence}, bf16"
    lines = [f"{first.device}, torch {torch.__version__}, GPT-2 with {what}, AdamW, {MICROBATCHES} micro-batches", ""]
    lines += [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for step in range(STEPS):
        lines.append(f"| loss of step {step + 1} | {' | '.join(f'{one.losses[step]:.4f}' for one in found.values())} |")
    lines.append(f"| tokens/s | {' | '.join(f'{one.tokens_per_second:.0f}' for one in found.values())} |")
    for name, one in found.items():
        apart = max(abs(loss / other - 1) for loss, other in zip(one.losses, first.losses, strict=True))
        assert apart < LIMIT, f"losses of {name} differ from those of {names[0]} by {100 * apart:.1f} %:\n" + "\n".join(lines)
    return "\n".join(lines)


def _apart(target: str, *words: str) -> Trained | None:
    """The same in a process of its own; None where it fails, which it has said then."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.engines", "--engine", target, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return None if done.returncode else Trained(*json.loads(done.stdout.splitlines()[-1]))


def _alone(target: str, sizes: Sizes) -> Trained:
    dist.init_process_group("nccl" if sizes.device == "cuda" else "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    found = train(target, sizes)
    dist.destroy_process_group()
    return found


def main(*words: str) -> int:
    """Print the table of all engines, or with ``--engine`` what one of them did, in JSON."""
    sizes = TINY if "--cpu" in words else Sizes()
    if sizes.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible; --cpu runs a tiny model without one", file=sys.stderr)
        return 1
    if "--engine" in words:
        print(json.dumps(_alone(words[words.index("--engine") + 1], sizes)))
        return 0
    found = {name: one for name in ENGINES if (one := _apart(name, *words)) is not None}
    if found:
        print("\n" + report(found, sizes))
    if failed := [name for name in ENGINES if name not in found]:
        print(f"no figures of {', '.join(failed)}; see above", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
