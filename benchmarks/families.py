"""Gains of optional steps over the ready schedule of each family, by estimates on four tensor-parallel ranks.

``python -m benchmarks.families`` prints the table of docs/guides/models.md, ``python -m benchmarks.families NAME`` the data of
one family. Each has its published widths, four layers, and 8,192 tokens, in bf16.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
import transformers

from slapo_core import Schedule, SlapoError, create_schedule
from slapo_models import apply_schedule, get_schedule, published_sizes
from slapo_plan import estimate, fake_ranks
from tests.slapo_models.family_models import NanoGPT

RANKS, ROWS, LENGTH, LAYERS = 4, 4, 2048, 4
GIB = 2**30
_BERT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
CLASSIC: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AutoModelForMaskedLM", {**_BERT, "embedding_size": 128, "max_position_embeddings": LENGTH}),
    "bert": ("AutoModelForMaskedLM", {**_BERT, "max_position_embeddings": LENGTH}),
    "gpt2": ("AutoModelForCausalLM", {"n_embd": 1024, "n_head": 16, "n_positions": LENGTH}),
    "gpt_neo": (
        "AutoModelForCausalLM",
        {"hidden_size": 2560, "num_heads": 20, "attention_types": [[["global", "local"], LAYERS // 2]], "num_layers": LAYERS},
    ),
    "opt": (
        "AutoModelForCausalLM",
        {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "word_embed_proj_dim": 4096},
    ),
    "roberta": ("AutoModelForMaskedLM", {**_BERT, "vocab_size": 50265, "max_position_embeddings": LENGTH + 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "num_decoder_layers": LAYERS, "decoder_start_token_id": 0},
    ),
}
"""Head and sizes of the classic families, without those of depth."""
TODAY = (
    *("deepseek-v3", "falcon-40b", "gemma-2-9b", "gemma-3-1b", "gpt-neox-20b", "gpt-oss-20b", "llama-3-8b", "llama-4-scout"),
    *("mistral-7b", "mixtral-8x7b", "phi-2", "phi-3-mini", "phi-3.5-moe", "qwen2-7b", "qwen2-57b-a14b", "qwen3-8b"),
    *("qwen3-30b-a3b", "vit-large", "clip-vit-large", "whisper-large-v3", "llava-1.5-7b"),
)
PLAIN = "nanogpt"
"""A GPT of plain modules, with the sizes of GPT-2 medium."""
NAMES = (*CLASSIC, *TODAY, PLAIN)
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_parallel": {"sequence_parallel": True},
    "kernels": {"kernels": True},
    "parallel_loss": {"parallel_loss": True},
    'checkpoint="matmuls"': {"checkpoint": "matmuls"},
    "checkpoint=1.0": {"checkpoint": 1.0},
}
"""Options of ``apply_schedule``."""


def model_of(name: str) -> torch.nn.Module:
    """Return a model of a family with four layers, without weights."""
    if name == PLAIN:
        with torch.device("meta"):
            return NanoGPT(vocabulary=50304, width=1024, heads=16, layers=LAYERS, length=LENGTH).train()
    if name in CLASSIC:
        kind, (head, sizes) = name, CLASSIC[name]
    else:
        size = published_sizes()[name]
        kind, head, sizes = size.model_type, size.head, size.config
    parts = {key: _shallow(value) for key, value in sizes.items() if isinstance(value, dict) and key.endswith("_config")}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **parts})
    for each in DEPTHS:
        if hasattr(config, each) and kind != "gpt_neo":
            setattr(config, each, LAYERS)
    if isinstance(types := getattr(config, "layer_types", None), list):
        config.layer_types = types[:LAYERS]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        made: torch.nn.Module = getattr(transformers, head).from_config(config)
    return made.train()


def _shallow(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "num_hidden_layers": LAYERS}


def batch_of(name: str) -> dict[str, Any]:
    """Return a batch of ``ROWS`` rows; images and sound have a length of their own."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    if name == PLAIN:
        return {"idx": ids, "targets": ids}
    kind = name if name in CLASSIC else published_sizes()[name].model_type
    if kind == "whisper":
        ids = ids[:, :448]
        return {"input_features": torch.zeros(ROWS, 128, 3000), "decoder_input_ids": ids, "labels": ids}
    images = torch.zeros(8 * ROWS, 3, 224, 224)
    if kind == "vit":
        return {"pixel_values": images, "labels": torch.zeros(8 * ROWS, dtype=torch.long)}
    if kind == "clip":
        return {"input_ids": torch.zeros(8 * ROWS, 77, dtype=torch.long), "pixel_values": images, "return_loss": True}
    if kind == "llava":
        ids[:, 5 : 5 + 576] = published_sizes()[name].config["image_token_index"]
        return {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(ROWS, 3, 336, 336)}
    if kind == "t5":  # a plan is derived without labels, from which the model would make these
        return {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}
    return {"input_ids": ids, "labels": ids}


def figures(name: str, options: Mapping[str, Any], apply: Callable[..., Schedule] = apply_schedule) -> dict[str, Any]:
    """Return what a step needs beyond the memory held between steps, in GiB, what it sends, and its seconds on H100."""
    batch = batch_of(name)
    with fake_ranks(tp=RANKS) as mesh:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        sch = create_schedule(model_of(name), mesh=mesh, example_inputs=inputs)
        apply(sch, **options)
        if options.get("kernels") and "use_kernels" not in str(sch.journal):
            return {"error": "kernels find nothing"}
        found = estimate(sch, batch, hardware="h100", precision="bf16")
        if found.problems:
            return {"error": found.problems[0]}
        memory = found.ranks[0].memory
        return {
            "parameters": memory.kinds["parameters"] / GIB,
            "step": (memory.peak - memory.held) / GIB,
            "sent": sum(each.nbytes * each.count for each in found.collectives) / GIB,
            "seconds": found.step_seconds,
            "journal": str(sch.journal),
        }


def family(name: str) -> dict[str, Any]:
    """Return the figures of all variants; an error is its first sentence."""
    found: dict[str, Any] = {}
    for label, options in VARIANTS.items():
        try:
            found[label] = figures(name, options)
        except (SlapoError, RuntimeError, TypeError, ValueError) as err:
            found[label] = {"error": str(err)}
    if name in CLASSIC:
        own = found["checkpoint=1.0"].get("journal")
        found["as auto"] = own == figures(name, VARIANTS["checkpoint=1.0"], get_schedule("auto")).get("journal")
    for each in found.values():
        if isinstance(each, dict):
            each.pop("journal", None)
    return found


def row(name: str, found: Mapping[str, Any]) -> str:
    """Return a line of the table: the plain schedule, then what each step multiplies memory, traffic and time by."""
    plain = found["plain"]
    if "error" in plain:
        return f"| {name} | {plain['error']} |"
    cells = [name, f"{plain['step']:.2f}", f"{plain['sent']:.2f}"]
    for label in [*VARIANTS][1:]:
        each = found[label]
        cells.append(
            "–" if "error" in each else "{:.2f}, {:.2f}".format(*(each[key] / plain[key] for key in ("step", "seconds")))
        )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table; each family has a process of its own."""
    print(f"## Steps over the ready schedule, tp={RANKS}, {LAYERS} layers, {ROWS * LENGTH:,} tokens, bf16\n")
    print("| family | step (GiB) | sent (GiB) | " + " | ".join([*VARIANTS][1:]) + " |")
    print("|" + "---|" * (2 + len(VARIANTS)))
    for name in NAMES:
        ran = subprocess.run([sys.executable, "-m", "benchmarks.families", name], capture_output=True, text=True, check=False)
        print(row(name, json.loads(ran.stdout)) if not ran.returncode else f"| {name} | {ran.stderr[-200:]} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = family(sys.argv[1])
        print(json.dumps(data))
    else:
        main()
