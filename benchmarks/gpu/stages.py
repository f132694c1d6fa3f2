"""Cost of cutting a model into pipeline stages, on one GPU: the stages in turn against the unmodified model.

Run ``make gpu``. GPT-2 124M and a Llama of about that size in four stages that one process runs one after the other, forward
and backward: nothing is sent and nothing waits, so what shows is the stages' own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.timing import Sizes, batch_of, check_gradients, gpt2, step_of, table
from slapo_core import build_program, create_schedule

STAGES = 4


def llama(sizes: Sizes) -> nn.Module:
    """With a gated feed-forward and rotary positions."""
    own = {"vocab_size": sizes.vocabulary, "hidden_size": sizes.hidden, "intermediate_size": 8 * sizes.hidden // 3}
    layers = {"num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads}
    torch.manual_seed(0)
    config = LlamaConfig(**own, **layers, max_position_embeddings=sizes.sequence, use_cache=False)
    return LlamaForCausalLM(config).to(sizes.device)


MODELS: dict[str, tuple[Callable[[Sizes], nn.Module], str]] = {
    "GPT-2 124M": (gpt2, "transformer.h"),
    "Llama of its size": (llama, "model.layers"),
}


def compare(name: str, sizes: Sizes) -> str:
    """The table of one model.

    Raises:
        AssertionError: the stages compute another loss or another gradient.
    """
    make, path = MODELS[name]
    plain, batch = make(sizes), batch_of(sizes)
    model = copy.deepcopy(plain)
    with torch.autocast(sizes.device, torch.bfloat16):
        sch = create_schedule(model, example_inputs=batch)
        for stage in range(1, STAGES):
            sch[f"{path}.{stage * sizes.layers // STAGES - 1}"].cut_pipeline_stage()
        program = build_program(sch)
    torch.testing.assert_close(step_of(program, batch, sizes), step_of(plain, batch, sizes), atol=1e-3, rtol=1e-3)
    check_gradients(model, plain, "the stages")
    steps = {
        "unmodified": partial(step_of, plain, batch, sizes),
        f"{len(program.stages)} stages": partial(step_of, program, batch, sizes),
    }
    return table(f"{name}, forward and backward, bf16", steps, sizes)


def main() -> None:
    """Print the tables."""
    for name in MODELS:
        print("\n" + compare(name, Sizes()), flush=True)


if __name__ == "__main__":
    main()
