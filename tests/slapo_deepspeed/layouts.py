"""What the tests run on each rank: a model in some layout on DeepSpeed beside the unmodified model in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import slapo_deepspeed.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
from slapo_core.build import build
from slapo_core.registry import Registry
from slapo_core.schedule import Schedule, create_schedule
from tests.slapo_torch.layouts import adamw, mesh_of

STEPS = 5
ROWS = 4
"""Rows of a batch per data-parallel rank."""
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def small(name: str) -> nn.Module:
    """A model with tied embeddings, equal on every rank."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            **SIZES, n_positions=16, n_embd=32, n_head=2, n_layer=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(
            **SIZES,
            **heads,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            use_cache=False,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config)
    widths = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 4, "num_decoder_layers": 4}
    config = transformers.T5Config(**SIZES, **widths, dropout_rate=0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def batches(dp: int) -> list[dict[str, torch.Tensor]]:
    """Batches of all data-parallel ranks together."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 64, (ROWS * dp, 16), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": each, "labels": each} for each in ids]


def scheduled(model: nn.Module, mesh: DeviceMesh, example: dict[str, Any]) -> Schedule:
    """A model sharded and cut as the mesh wants."""
    plugins = Registry([slapo_pipeline.plugin, slapo_sharding.plugin, slapo_deepspeed.plugin])
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=plugins)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline()
    return schedule


def my_part(batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This data-parallel rank's rows."""
    return {name: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, value in batch.items()}


def train_beside_reference(
    rank: int, name: str, layout: dict[str, int], zeros: list[int], precision: str = "fp32", clip: float = 0.1
) -> dict[str, float]:
    """Largest differences over five steps, of the weights after them, and of an evaluation, for some stages of ZeRO."""
    mesh = mesh_of(**layout)
    reference = small(name)
    data = batches(layout.get("dp", 1))
    expected = [*in_one_process(reference, data, clip)]
    weights = {key: value.detach() for key, value in reference.named_parameters(remove_duplicate=False)}
    last = reference.eval()(**data[0]).loss.item()
    worst: dict[str, float] = {}

    def note(what: str, difference: float) -> None:
        worst[what] = max(worst.get(what, 0.0), difference)

    for zero in zeros:
        schedule = scheduled(small(name), mesh, my_part(data[0], mesh))
        options: dict[str, Any] = {"clip": clip, "precision": precision, "config": {"zero_optimization": {"stage": zero}}}
        engine: Any = build(schedule, "deepspeed", optimizer=adamw, microbatches=2, **options)
        for batch, (loss, norm) in zip(data, expected, strict=True):
            note(f"loss {zero}", abs(engine.train_batch(**my_part(batch, mesh)).item() - loss))
            if engine.grad_norm is not None:
                note(f"norm {zero}", abs(engine.grad_norm - norm))
        note(f"evaluation {zero}", abs(engine.eval_batch(**my_part(data[0], mesh)).item() - last))
        with engine.whole_parameters():
            for key, value in schedule.full_state().items():
                assert value is not None
                note(f"weight {zero}", float((value.float() - weights[key]).abs().max()))
        engine.close()
    return worst


def in_one_process(model: nn.Module, data: list[dict[str, torch.Tensor]], clip: float) -> Iterator[tuple[float, float]]:
    """Loss and norm of each step."""
    optimizer = adamw(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        yield loss.item(), norm.item()
