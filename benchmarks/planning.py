"""Time to plan a large model, against DTensor, and its growth with the number of layers.

Run ``python -m benchmarks.planning``; it prints a section for ``benchmarks/README.md``. Weights are on meta, and the group of
eight ranks is one of torch that sends nothing. The number of Python calls of a layer does not depend on the number of layers,
see ``tests/slapo_sharding/primitives/test_step_cost.py``. What grows is Python's garbage collection: a schedule keeps what
undoes its steps, and once what is new in a process is a quarter of what was there before, Python goes through all. Its
share is printed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import create_schedule

PAIRS = {126: 15, 500: 7, 1000: 5}
"""Layers: how often each side plans them, in turns."""
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def llama(layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def plan_ours(model: nn.Module, mesh: Any) -> None:
    schedule = create_schedule(model, mesh=mesh)
    for layer in schedule.select("model.layers.*"):
        for name in COLUMNS:
            layer[name].shard("weight", axis=0)
        layer["self_attn"].sync("bwd_post", "all_reduce", of=["q_proj", "k_proj", "v_proj"])
        layer["mlp"].sync("bwd_post", "all_reduce", of=["gate_proj", "up_proj"])
        for name in ROWS:
            layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def plan_dtensor(model: nn.Module, mesh: Any) -> None:
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan.update({f"model.layers.*.{name}": RowwiseParallel() for name in ROWS})
    parallelize_module(model, mesh, plan)


class Planned(NamedTuple):
    """Seconds a plan took, and how many of them Python collected garbage."""

    seconds: float
    collecting: float


class Compared(NamedTuple):
    """Medians over the pairs: of our plan, of DTensor's, and of the two's ratio.

    A machine's speed drifts by more than the two differ, so each plan of ours is compared with the one DTensor makes next.
    """

    ours: Planned
    peer: Planned
    ratio: float


def measure(layers: int) -> Compared:
    """Plan in turns; what the models before left is collected outside."""
    pairs = [(_once(plan_ours, layers), _once(plan_dtensor, layers)) for _ in range(PAIRS[layers])]
    mine, peer = (Planned(*map(median, zip(*side, strict=True))) for side in zip(*pairs, strict=True))
    return Compared(mine, peer, median(one.seconds / other.seconds for one, other in pairs))


def _once(plan: Callable[[nn.Module, Any], None], layers: int) -> Planned:
    model, mesh = llama(layers), init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    gc.collect()
    collecting = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal collecting
        collecting += -time.perf_counter() if phase == "start" else time.perf_counter()

    gc.callbacks.append(note)
    start = time.perf_counter()
    plan(model, mesh)
    seconds = time.perf_counter() - start
    gc.callbacks.remove(note)
    return Planned(seconds, collecting)


def main() -> None:
    """Print the section."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    plan_ours(llama(1), init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)))  # what is imported when first used
    print("\n## Planning all linear layers of a Llama 405B on meta, 8 fake ranks\n")
    print("| layers | slapo (s) | parallelize_module (s) | ratio", end="")
    print(" | slapo, ms a layer | of them garbage collection | parallelize_module, ms a layer |\n|---|---|---|---|---|---|---|")
    for layers in PAIRS:
        mine, peer, ratio = measure(layers)
        print(f"| {layers} | {mine.seconds:.3f} | {peer.seconds:.3f} | {ratio:.2f}", end="")
        one, collecting, other = (seconds * 1e3 / layers for seconds in (*mine, peer.seconds))
        print(f" | {one:.2f} | {collecting:.2f} | {other:.2f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
