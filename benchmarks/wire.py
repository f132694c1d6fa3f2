"""Bytes that cross the boundaries of four pipeline stages with each micro-batch, against those of torch's own ``pipeline()``.

Run ``python -m benchmarks.wire``; it prints a section for ``benchmarks/README.md``. Both sides train one batch of two
micro-batches in train mode on four gloo processes through GPipe, with the same cuts, on torch's runtime; what each process
gives ``isend`` is counted. A send past a stage counts at every boundary that it crosses.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule
from slapo_testing import DistributedError, run_distributed

STAGES, MICROBATCHES, ROWS, LENGTH, WIDTH = 4, 2, 2, 32, 64
VOCABULARY = 128

Sent = list[tuple[int, int, int]]
"""Rank from, rank to, bytes."""


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"num_layers": 2, "d_model": WIDTH, "d_ff": 128, "num_heads": 4, "d_kv": 16}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **sizes))


CASES = {
    gpt2: [f"transformer.h.{layer}" for layer in range(3)],
    llama: [f"model.layers.{layer}" for layer in range(3)],
    bert: [f"bert.encoder.layer.{layer}" for layer in range(3)],
    t5: ["encoder.block.0", "encoder.block.1", "decoder.block.0"],
}
"""Models, and after which modules they are cut."""


def batch(name: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**found, "decoder_input_ids": ids} if name == "t5" else found


def loss_of(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """torch's runtime gives the last stage no labels, so the loss is taken outside of the model."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def ours(name: str, cuts: list[str]) -> None:
    """One step."""
    mesh = init_device_mesh("cpu", (STAGES,), mesh_dim_names=("pp",))
    model = globals()[name]()
    model.config.use_cache = False
    part = {key: value[:ROWS] for key, value in batch(name).items()}
    schedule = create_schedule(model.train(), mesh=mesh, example_inputs=part)
    for path in cuts:
        schedule[path].cut_pipeline_stage()
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "pipeline_schedule": "gpipe", "loss_fn": loss_of}
    engine: Any = build(schedule, "torch", optimizer=adamw, **options)
    whole = batch(name)
    engine.train_batch(**whole, labels=whole["input_ids"])


def torchs(name: str, cuts: list[str]) -> None:
    """The forward and backward of one step."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    model = globals()[name]()
    model.config.use_cache = False
    whole = batch(name)
    part = {key: value[:ROWS] for key, value in whole.items()}
    pipe = pipeline(model.train(), (), part, split_spec=dict.fromkeys(cuts, SplitPoint.END))
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)
    taken = [node.name for node in pipe.get_stage_module(rank).graph.nodes if node.op == "placeholder"]
    given = {key: value for key, value in whole.items() if key in taken}
    schedule.step(**given, target=whole["input_ids"] if rank == STAGES - 1 else None)


def measure(rank: int, side: str, name: str, cuts: list[str]) -> Sent:
    """Measure the bytes that this rank sends."""
    torch.set_num_threads(1)
    sent: Sent = []
    init = dist.P2POp.__init__

    def noted(self: Any, op: Any, tensor: torch.Tensor, peer: int | None = None, *args: Any, **kwargs: Any) -> None:
        init(self, op, tensor, peer, *args, **kwargs)
        by_runtime = sys._getframe(1).f_globals["__name__"].startswith("torch.distributed.pipelining")
        if op is dist.isend and by_runtime:  # not the gradients of ties, which are sent once in a step
            sent.append((rank, int(peer or 0), tensor.nbytes))

    dist.P2POp.__init__ = noted  # type: ignore[method-assign, assignment]
    try:
        (ours if side == "slapo" else torchs)(name, cuts)
    finally:
        dist.P2POp.__init__ = init  # type: ignore[method-assign]
    return sent


def crossed(sent: Sent, backward: bool) -> list[int]:
    """Bytes that cross each boundary with one micro-batch."""
    way = [(to, frm, size) if backward else (frm, to, size) for frm, to, size in sent if (to < frm) is backward]
    return [sum(size for low, high, size in way if low <= cut < high) // MICROBATCHES for cut in range(STAGES - 1)]


def main() -> None:
    """Print the section."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    hidden = ROWS * LENGTH * WIDTH * 4
    print(f"\n## Bytes between {STAGES} stages, in units of the hidden states of a micro-batch ({hidden:,} B)\n")
    print("| model | slapo, forward | backward | torch's pipeline(), forward | backward |")
    print("|---|---|---|---|---|")
    for make, cuts in CASES.items():
        cells = []
        for side in ("slapo", "torch"):
            try:
                sent = [
                    each for rank in run_distributed(measure, STAGES, side, make.__name__, cuts, timeout=300) for each in rank
                ]
            except DistributedError as error:
                cells += ["fails: " + str(error).splitlines()[0].split(": ", 2)[-1], ""]
                continue
            cells += [" / ".join(f"{size / hidden:.3g}" for size in crossed(sent, way)) for way in (False, True)]
        print(f"| {make.__name__} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
