"""Finding and swapping modules with ``use_kernels`` in deep models, and steps of blocks with kernels.

Run ``python -m benchmarks.kernels``; it prints a section for ``benchmarks/README.md``. ``--small`` takes one round of smaller
blocks, to see whether all runs. Figures of blocks are of new processes without torch's caches on disk. The peers are the
unmodified blocks of Transformers, eager and by ``torch.compile``.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.peers.rounds import in_new_processes, spread
from slapo_core import create_schedule

DEPTH = 48
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2 XL": ("GPT2Config", "AutoModelForCausalLM", {"n_layer": DEPTH, "n_embd": 1600, "n_head": 25}),
    "Llama 7B's layers": ("LlamaConfig", "AutoModelForCausalLM", {"num_hidden_layers": DEPTH}),
    "BERT-large's layers": (
        "BertConfig",
        "AutoModelForMaskedLM",
        {"num_hidden_layers": DEPTH, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    ),
    "T5-large's layers": (
        "T5Config",
        "AutoModelForSeq2SeqLM",
        {"num_layers": DEPTH // 2, "num_decoder_layers": DEPTH // 2, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
    ),
    "Mixtral 8x7B's layers": ("MixtralConfig", "AutoModelForCausalLM", {"num_hidden_layers": DEPTH}),
}
ROUNDS, TURNS = 3, 20
TOKENS = 256
BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2Model", {"n_layer": 2, "vocab_size": 64, "n_positions": TOKENS, "use_cache": False}),
    "BERT-base": ("BertConfig", "BertModel", {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": TOKENS}),
    "Llama": (
        "LlamaConfig",
        "LlamaModel",
        {
            "num_hidden_layers": 2,
            "vocab_size": 64,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_attention_heads": 12,
            "use_cache": False,
        },
    ),
}
"""Two layers each, with the dropout of the configuration."""
SIDES = ("eager", "use_kernels", "use_kernels, eager", "torch.compile")


def found(rank: int, name: str) -> tuple[float, float, int]:
    """Seconds of ``use_kernels`` on a model on the meta device, at first and again, and how many modules it swapped."""
    import transformers

    config, auto, sizes = FAMILIES[name]
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(getattr(transformers, config)(**sizes))
    schedule, times = create_schedule(model), []
    for _ in range(4):
        gc.collect()
        start = time.perf_counter()
        schedule.use_kernels()
        times.append(time.perf_counter() - start)
        count = sum(type(module).__name__.startswith("Kernel") for module in model.modules())
        schedule.undo()
    return times[0], median(times[1:]), count


def steps(rank: int, name: str, small: bool) -> list[list[float]]:
    """Milliseconds of a forward and a backward of each side, steps in turns, and MiB of tensors kept for the backward."""
    import transformers

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    config, kind, sizes = BLOCKS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()
    models = [copy.deepcopy(model) for _ in SIDES]
    create_schedule(models[1]).use_kernels()
    create_schedule(models[2]).use_kernels(force={"*": "eager", "attention": "native"})
    models[3] = torch.compile(models[3])  # type: ignore[assignment]
    ids = torch.randint(64, (1 if small else 4, TOKENS))
    kept = [_kept(each, ids) for each in models]
    times: list[list[float]] = [[] for _ in models]
    for turn in range(4 if small else TURNS + 3):
        for side, each in enumerate(models):
            start = time.perf_counter()
            each(input_ids=ids).last_hidden_state.sum().backward()
            if turn > 2:
                times[side].append((time.perf_counter() - start) * 1e3)
    return [[median(of) for of in times], kept]


def _kept(model: Callable[..., Any], ids: torch.Tensor) -> float:
    """MiB of what a forward keeps for the backward, parameters and what shares memory counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(input_ids=ids).last_hidden_state
    del result
    return sum(storages.values()) / 2**20


def main() -> None:
    """Print the section."""
    small = "--small" in sys.argv[1:]
    rounds = 1 if small else ROUNDS
    print(f"\n## Kernels: `use_kernels()` on models of {DEPTH} layers on meta\n")
    print("| model | modules swapped | at first (s) | again (s) |\n|---|---|---|---|")
    for name in FAMILIES:
        rows = [in_new_processes(found, 1, name)[0] for _ in range(rounds)]
        first, again = (median(row[column] for row in rows) for column in (0, 1))
        print(f"| {name} | {rows[0][2]} | {first:.2f} | {again:.2f} |", flush=True)
    print(f"\nTwo layers, hidden size 768, 4 x {TOKENS} tokens in fp32 with dropout, a forward and a backward on a CPU:\n")
    print(
        "| model | eager (ms) | use_kernels (ms) | eager / use_kernels | all eager | torch.compile / use_kernels | kept (MiB) |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in BLOCKS:
        taken = [in_new_processes(steps, 1, name, small)[0] for _ in range(rounds)]
        times, kept = [one[0] for one in taken], taken[0][1]
        eager, ours = (median(one[side] for one in times) for side in (0, 1))
        ratios = [spread([one[side] / one[1] for one in times]) for side in (0, 3)]
        plain = spread([one[0] / one[2] for one in times])
        columns = [f"{eager:.1f}", f"{ours:.1f}", ratios[0], plain, ratios[1], " / ".join(f"{each:.0f}" for each in kept)]
        print(f"| {name} | {' | '.join(columns)} |", flush=True)
    print("\n*All eager*: the unmodified model over the swapped one with each kernel's eager implementation. *Kept*: what a")
    print(f"forward keeps for its backward, by {', '.join(SIDES)}.")


if __name__ == "__main__":
    main()
