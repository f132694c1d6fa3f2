"""Tensor parallelism against hand-written code and DTensor: step time, memory, planning.

Run ``python -m benchmarks.sharding``; it prints a section for ``benchmarks/README.md``. Two gloo processes on this machine
train the same blocks in three ways, one after the other in every round, so that what else the machine does meets all alike:
ours, Megatron's two autograd functions written by hand, and torch's ``parallelize_module`` (DTensor).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from slapo_core import build, create_schedule
from slapo_core.testing import run_distributed

LAYERS, HEADS, BATCH, SEQUENCE = 4, 8, 4, 128
ROUNDS = {256: 60, 512: 30, 1024: 12}


class Block(nn.Module):
    """A GPT block; ``qkv`` makes the query, key and value of one head after the other, so a plain split deals out heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.head = hidden // HEADS
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.qkv(self.first(x))
        q, k, v = made.view(*made.shape[:2], -1, 3 * self.head).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def blocks(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden) for _ in range(LAYERS)))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Column(nn.Module):
    """Hand-written column-parallel layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight, self.bias = (nn.Parameter(t.detach().chunk(size)[rank].clone()) for t in (whole.weight, whole.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Copy.apply(x), self.weight, self.bias)


class Row(nn.Module):
    """Hand-written row-parallel layer."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(F.linear(x, self.weight)) + self.bias


def by_hand(model: nn.Module) -> nn.Module:
    for block in model:
        for name in ("qkv", "up"):
            setattr(block, name, Column(getattr(block, name)))
        for name in ("proj", "down"):
            setattr(block, name, Row(getattr(block, name)))
    return model


def ours(model: nn.Module, *, overlapped: bool = True) -> nn.Module:
    schedule = create_schedule(model)
    for block in schedule.select("*"):
        for name in ("qkv", "up"):
            block[name].shard("weight", axis=0, blocks=1).sync("bwd_post", "all_reduce")
            if not overlapped:
                del block[name].mod.forward  # torch's own has one backward for input and weight
        for name in ("proj", "down"):
            block[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return build(schedule).module


def dtensor(model: nn.Module) -> nn.Module:
    plan = {"*.qkv": ColwiseParallel(), "*.up": ColwiseParallel(), "*.proj": RowwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def compiled(model: nn.Module) -> nn.Module:
    for block in model:
        block.compile(fullgraph=True)
    return model


Way = Callable[[nn.Module], nn.Module]
WAYS: dict[str, Way] = {"slapo": ours, "hand-written": by_hand, "DTensor": dtensor}
VARIANTS: dict[str, Way] = {
    "hand-written": by_hand,
    "slapo": ours,
    "slapo, sums not overlapped": partial(ours, overlapped=False),
    "slapo, blocks compiled": lambda model: compiled(ours(model)),
    "hand-written, blocks compiled": lambda model: compiled(by_hand(model)),
}


def _step(model: nn.Module, x: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    model(x).square().mean().backward()
    getattr(model, "finish", lambda: None)()
    return time.perf_counter() - start


def _saved(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward keeps for its backward, weights apart; each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(x)
    total = sum(seen.values())
    del kept
    return total


def _memory(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of parameters, gradients and two moments per parameter, and of what the forward keeps."""
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return 4 * parameters + _saved(model, x)


def measure_steps(rank: int, hidden: int, ways: str) -> dict[str, tuple[float, int]]:
    """Median seconds of forward and backward, and bytes on this rank, of each way; ``ways`` is where they are listed."""
    torch.set_num_threads(1)
    whole = blocks(hidden)
    models = {name: way(copy.deepcopy(whole)) for name, way in resolve_name(ways).items()}
    x = torch.randn(BATCH, SEQUENCE, hidden, generator=torch.Generator().manual_seed(1))
    expected = whole(x)
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        for _ in range(3):  # the first run after build is looked at, the second may compile
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
            _step(model, x)
    names = list(models)
    for turn in range(ROUNDS[hidden]):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_step(models[name], x))
    memory = {name: _memory(model, x) for name, model in models.items() if name != "DTensor"}
    return {name: (statistics.median(times[name]), memory.get(name, 0)) for name in models}


def _report_steps() -> None:
    print("\n## Tensor parallelism: 2 gloo ranks, 4 GPT blocks, forward and backward\n")
    print(
        "| hidden | hand-written (ms) | slapo (ms) | slapo / hand-written | DTensor / hand-written | memory, slapo / by hand |"
    )
    print("|---|---|---|---|---|---|")
    for hidden in (256, 512, 1024):
        rank0 = run_distributed(measure_steps, 2, hidden, "benchmarks.sharding:WAYS", timeout=600)[0]
        (ours_s, ours_b), (hand_s, hand_b), (dtensor_s, _) = (rank0[name] for name in WAYS)
        print(
            f"| {hidden} | {hand_s * 1e3:.1f} | {ours_s * 1e3:.1f} | {ours_s / hand_s:.3f} | {dtensor_s / hand_s:.3f} "
            f"| {ours_b / hand_b:.3f} |",
            flush=True,
        )


def _report_variants() -> None:
    rank0 = run_distributed(measure_steps, 2, 512, "benchmarks.sharding:VARIANTS", timeout=600)[0]
    base = rank0["hand-written"][0]
    print("\n| hidden 512 | ms | / hand-written |\n|---|---|---|")
    for name, (seconds, _) in rank0.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / base:.3f} |", flush=True)


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


COLUMNS, ROWS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    (
        "self_attn.o_proj",
        "mlp.down_proj",
    ),
)


def _plan_ours(model: nn.Module, mesh: Any) -> None:
    schedule = create_schedule(model, mesh=mesh)
    for layer in schedule.select("model.layers.*"):
        for name in COLUMNS:
            layer[name].shard("weight", axis=0)
        layer["self_attn"].sync("bwd_post", "all_reduce", of=["q_proj", "k_proj", "v_proj"])
        layer["mlp"].sync("bwd_post", "all_reduce", of=["gate_proj", "up_proj"])
        for name in ROWS:
            layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def _plan_dtensor(model: nn.Module, mesh: Any) -> None:
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan.update({f"model.layers.*.{name}": RowwiseParallel() for name in ROWS})
    parallelize_module(model, mesh, plan)


def measure_planning(layers: int) -> tuple[float, float]:
    """Seconds to plan all linear layers of a Llama on meta, ours and DTensor's; the least of three."""
    found = []
    for plan in (_plan_ours, _plan_dtensor):
        times = []
        for _ in range(3):
            model = llama(layers)
            mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
            start = time.perf_counter()
            plan(model, mesh)
            times.append(time.perf_counter() - start)
        found.append(min(times))
    return found[0], found[1]


def _report_planning() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    print("\n## Planning all linear layers of a Llama 405B on meta, 8 fake ranks\n")
    print("| layers | slapo (s) | parallelize_module (s) | ratio |\n|---|---|---|---|")
    for layers in (126, 500, 1000):
        mine, peer = measure_planning(layers)
        print(f"| {layers} | {mine:.3f} | {peer:.3f} | {mine / peer:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the sections."""
    _report_steps()
    _report_variants()
    _report_planning()


if __name__ == "__main__":
    main()
