"""Tracing against ``torch.export``; calls of traced modules against plain ones; subgraphs in large graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_tracing import trace, trace_module
from slapo_tracing.editing import subgraph
from slapo_tracing.graphs import TracedModule
from slapo_tracing.matching.matcher import find_subgraph
from slapo_tracing.matching.patterns import call_module

SEQ = 64


def gpt2(num_layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A Hugging Face GPT-2 of a given depth on the meta device, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=num_layers, vocab_size=1024, use_cache=False)).train()
    return model, {"input_ids": torch.zeros(2, SEQ, dtype=torch.long), "labels": torch.zeros(2, SEQ, dtype=torch.long)}


def is_layer(path: str, module: nn.Module) -> bool:
    """GPT-2's layers."""
    return type(module).__name__ == "GPT2Block"


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The least wall time: other load on the machine only adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


class Chain(nn.Module):
    """``width`` times linear, gelu, add, in a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(2, 2) for _ in range(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fc in self.fc:
            x = nn.functional.gelu(fc(x)) + x
        return x


def pattern(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(call_module(r"fc\.\d+", x)) + x


def chain(num_nodes: int) -> TracedModule:
    """A traced chain of about this many nodes."""
    return trace_module(Chain(num_nodes // 3), (torch.zeros(1, 2),), leaf=lambda path, module: isinstance(module, nn.Linear))


def small(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama's layer or a GPT-2 of four layers, so small that what Python does between the operators shows, and a call."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=64, use_cache=False)
        return GPT2LMHeadModel(config).train(), {"input_ids": torch.randint(5, 64, (2, 12))}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)).train().model
    x = torch.randn(2, 12, 32)
    rotary = model.rotary_emb(x, torch.arange(12)[None])
    return model.layers[0], {"hidden_states": x, "attention_mask": None, "position_embeddings": rotary}


def resized(call: dict[str, Any], rows: int) -> dict[str, Any]:
    """The call for another number of rows."""
    return {
        key: value[:1].expand(rows, *value.shape[1:]) if isinstance(value, torch.Tensor) else value
        for key, value in call.items()
    }


def calls() -> None:
    """Print what a call of a traced module costs beside one of the plain module, the first of each shape included."""
    print("\n## Calls of a traced module (forward, no gradients, hidden size 32)\n")
    print("| module | traced | modules with a graph | plain (us) | traced (us) | ratio | first of a shape (ms) |")
    print("|---|---|---|---|---|---|---|")
    for name in ("llama layer", "gpt2"):
        for how in ("one graph", "each module"):
            model, call = small(name)
            traced = trace(model, example_inputs=call, flatten=how == "one graph")
            with torch.no_grad():
                first = [seconds(lambda: traced(**resized(call, rows)), 1) for rows in (3, 4, 5)]  # noqa: B023
                both = [seconds(lambda: [each(**call) for _ in range(20)], 40) / 20 * 1e6 for each in (model, traced)]  # noqa: B023
            count = sum(isinstance(module, TracedModule) for module in traced.modules())
            ratio, new = both[1] / both[0], min(first) * 1e3
            print(f"| {name} | {how} | {count} | {both[0]:.0f} | {both[1]:.0f} | {ratio:.2f} | {new:.1f} |", flush=True)


def main() -> None:
    """Print the tables."""
    logging.disable(logging.WARNING)
    print("\n## Tracing (Hugging Face GPT-2, layers as leaves, weights on meta)\n")
    print("| layers | value trace (s) | torch.export (s) | ratio |\n|---|---|---|---|")
    for num_layers in (12, 48, 192, 768):
        model, batch = gpt2(num_layers)
        ours = seconds(lambda: trace_module(model, batch, leaf=is_layer))  # noqa: B023
        peer = None
        if num_layers == 48:
            small = {key: value.to("meta") for key, value in batch.items()}
            peer = seconds(lambda: torch.export.export(model, (), small, strict=False), repeats=1)  # noqa: B023
        print(
            f"| {num_layers} | {ours:.3f} | {f'{peer:.3f}' if peer else '-'} | {f'{ours / peer:.3f}' if peer else '-'} |",
            flush=True,
        )

    calls()

    print("\n## find of a 3-operation pattern\n")
    print("| nodes | matches | find (s) | microseconds per node |\n|---|---|---|---|")
    for num_nodes in (1_000, 10_000, 20_000):
        traced = chain(num_nodes)
        size = len(traced.graph.nodes)
        took = seconds(lambda: find_subgraph(traced, pattern))  # noqa: B023
        print(f"| {size} | {len(find_subgraph(traced, pattern))} | {took:.3f} | {took / size * 1e6:.1f} |", flush=True)

    print("\n## replace of 768 matched subgraphs\n")
    print("| nodes in the graph | replace all (s) | undo all (s) | stale handles |\n|---|---|---|---|")
    for num_nodes in (2_304, 10_500):
        traced = chain(num_nodes)
        before, size = str(traced.graph), len(traced.graph.nodes)
        sch = create_schedule(traced)
        matches = sch.find(pattern)[:768]
        start = time.perf_counter()
        for match in matches:
            sch.replace(nn.Identity(), match)
        middle = time.perf_counter()
        while len(sch.journal):
            sch.undo()
        end = time.perf_counter()
        stale = sum(len(subgraph.resolve_nodes(traced, match)) != len(match) for match in matches)
        assert str(traced.graph) == before
        print(f"| {size} | {middle - start:.3f} | {end - middle:.3f} | {stale} |", flush=True)


if __name__ == "__main__":
    main()
