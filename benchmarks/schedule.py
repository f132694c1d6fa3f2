"""Cost of scheduling itself: starting a schedule, and one primitive through the whole apply path.

Run ``python benchmarks/schedule.py``; it prints rows for ``benchmarks/README.md``. The peer is a plain walk over the same
model in the same run, ``list(named_modules())`` and ``list(named_parameters())``. Times are medians; a schedule is started
on a model that has never been scheduled, after a garbage collection: else the copies of models made here, and not what is
measured, decide which call Python collects in.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import Primitive, create_schedule, default_registry, hookimpl
from slapo_testing import isolated_plugins


class NothingPrimitive(Primitive):
    """Changes nothing."""

    name = "nothing"

    @staticmethod
    def apply(schedule: Any) -> None: ...


class Plugin:
    @hookimpl
    def slapo_primitives(self) -> dict[str, type[Primitive]]:
        return {"nothing": NothingPrimitive}


def llama_405b() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16384,
                intermediate_size=53248,
                num_hidden_layers=126,
                num_attention_heads=128,
                num_key_value_heads=8,
                vocab_size=128256,
            )
        )


def blocks(num_modules: int) -> nn.Module:
    """A model of about ``num_modules`` modules, three levels deep, half of them with parameters."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)) for _ in range(num_modules // 4)))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def walk(model: nn.Module) -> object:
    return list(model.named_modules()), list(model.named_parameters())


def measure_start(label: str, model: nn.Module, target: str) -> tuple[float, float]:
    """Print a row for starting a schedule on copies of ``model``; returns milliseconds per module, ours and the walk's."""
    ours, peer = [], []
    for _ in range(5):
        fresh = copy.deepcopy(model)
        gc.collect()
        peer.append(seconds(partial(walk, fresh)) * 1e3)
        ours.append(seconds(partial(create_schedule, fresh)) * 1e3)
    found, walked = statistics.median(ours), statistics.median(peer)
    count = sum(1 for _ in model.modules())
    print(
        f"| `create_schedule`, {label}, {count:,} modules | {found:.1f} ms | {target} | {found / walked:.2f} x the walk |",
        flush=True,
    )
    return found / count, walked / count


def measure_step(label: str, schedule: Any, target: str, repeat: int = 300) -> None:
    peer = seconds(lambda: [walk(schedule.mod) for _ in range(repeat)]) / repeat * 1e6
    times = [seconds(schedule.nothing) * 1e6 for _ in range(repeat)]
    found = statistics.median(times)
    print(f"| no-op primitive, {label} | {found:.0f} us | {target} | {found / peer:.1f} x the walk |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    default_registry()  # plugins are loaded once per process, which benchmarks/plugins.py measures
    print("## Scheduling\n\n| what | time | target | ratio |\n|---|---|---|---|")
    llama = llama_405b()
    measure_start("126-layer Llama 405B on meta", llama, "20 ms")
    costs = [measure_start("small blocks", blocks(size), "150 ms" if size == 12000 else "") for size in (3000, 12000, 48000)]
    ours, peer = (costs[-1][which] / costs[0][which] for which in (0, 1))
    what = "`create_schedule`, cost of one module in 48,000 / in 3,000"
    print(f"| {what} | {ours:.2f} x | as the walk | {ours / peer:.2f} x the walk's |")
    with isolated_plugins(Plugin()) as registry:
        schedule = create_schedule(llama, plugins=registry)
        measure_step("leaf module of Llama 405B", schedule["model.layers.60.mlp.act_fn"], "50 us")
        measure_step("Linear of Llama 405B", schedule["model.layers.60.mlp.up_proj"], "")
        measure_step("layer of Llama 405B, 15 modules", schedule["model.layers.60"], "")
        flat = create_schedule(blocks(12000), plugins=registry)
        measure_step("leaf among 12,000 modules", flat["1500.0"], "50 us")


if __name__ == "__main__":
    main()
