"""Attention masks of stages: those that the unmodified model makes for each batch, and no others."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from slapo_core import Program, TraceError, build, build_program, create_schedule
from slapo_pipeline.partition import for_any_values
from slapo_pipeline.pipe import pipeline
from slapo_testing import run_distributed

from ..stage_comparison import assert_same, cut, expected_of, loss_of

LENGTH = 12
KEPT = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": LENGTH}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 3, "n_positions": LENGTH}


class Handwritten(nn.Module):
    """Makes a mask if something is padded, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        mask = None
        if attention_mask is not None and not attention_mask.all():
            causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            mask = (causal & (attention_mask[:, None, :] > 0)) | torch.eye(LENGTH, dtype=torch.bool)
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        heads = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mask = None if mask is None else mask[:, None]
        found = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        return x + found.transpose(1, 2).flatten(2)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**KEPT, num_key_value_heads=1, use_cache=False))


def qwen2() -> nn.Module:
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**KEPT, **sliding, num_key_value_heads=1, use_cache=False))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**KEPT, **BERT))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0, use_cache=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "transformer.h.1"),
    "llama": (llama, "model.layers.1"),
    "qwen2": (qwen2, "model.layers.0"),
    "bert": (bert, "bert.encoder.layer.1"),
    "t5": (t5, "encoder.block.0"),
    "handwritten": (Handwritten, "blocks.1"),
}


def batch(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    ids = torch.randint(1, 32, (2, LENGTH), generator=generator)
    found = {"input_ids": ids, "labels": torch.randint(1, 32, (2, LENGTH), generator=generator)}
    if kind == "nothing":
        return found
    mask = torch.ones_like(ids)
    if kind != "ones":
        mask[0, slice(9, None) if kind == "right" else slice(3)] = 0
    return {**found, "attention_mask": mask}


class Kernels(TorchFunctionMode):
    """Records the shape of the mask of each attention, and whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            self.calls.append((None if mask is None else tuple(mask.shape), kwargs.get("is_causal", False)))
        return func(*args, **kwargs)


@contextmanager
def recorded() -> Iterator[list[tuple[Any, bool]]]:
    with Kernels() as kernels:
        yield kernels.calls


def assert_as_the_model(model: nn.Module, program: Program, given: dict[str, torch.Tensor]) -> None:
    """Outputs, gradients and kernels are those of the model."""
    assert program.replan is not None
    program.replan(True, given)
    with recorded() as kernels:
        expected = expected_of(model, given)
    with recorded() as found_kernels:
        found = program(**given)
    assert found_kernels == kernels
    assert_same(found, expected.outputs, "outputs")
    loss_of(found).backward()
    assert_same({name: each.grad for name, each in model.named_parameters()}, expected.gradients, "gradients")
    model.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_stages_make_the_masks_of_the_model(name: str) -> None:
    make, path = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    program = build_program(cut(model, batch("ones"), path))
    assert [len(stage.inputs) for stage in program.stages[1:]] == [1]
    for kind in ("ones", "right", "left", "nothing", "ones"):
        assert_as_the_model(model, program, batch(kind))


def test_a_stage_for_unpadded_batches_refuses_a_padded_one() -> None:
    model = llama()
    first = build_program(cut(model, batch("ones"), "model.layers.1")).stages[0]
    given = {name: batch("right")[name] for name in first.batch_inputs}
    with pytest.raises(TraceError, match="the forward asks for __bool__, which is False in this call, traced as True"):
        first.module(**given)


def test_stages_for_any_values_serve_padded_batches() -> None:
    model = llama()
    program = build_program(cut(model, batch("ones"), "model.layers.1"))
    general = for_any_values(program, batch("ones"))
    for kind in ("ones", "right"):
        given, values = batch(kind), ()
        for stage in general.stages:
            values = stage.module(*values, **{name: given[name] for name in stage.batch_inputs})
        torch.testing.assert_close(values["loss"], model(**given).loss)
    assert for_any_values(general, batch("ones")) is general


def test_stages_of_a_pipe_serve_padded_batches() -> None:
    from torch.distributed.pipelining import SplitPoint

    model = llama()
    pipe = pipeline(model, (), batch("ones"), split_spec={"model.layers.1": SplitPoint.END})
    first, given = pipe.get_stage_module(0), batch("right")
    assert first(**{name: given[name] for name in pipe.program.stages[0].batch_inputs}) is not None
    torch.testing.assert_close(pipe(**given).loss, model(**given).loss)


def test_blocks_that_receive_values_are_run_once() -> None:
    """Position ids and masks have values in a trace; blocks that receive the same ones are equal calls."""
    calls = itertools.count()

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            next(calls)
            return super().forward(x)

    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Counted(16, 16)
    build_program(cut(model, batch("right"), "model.layers.1"))
    assert next(calls) == 1


def _train_on_some_padded(rank: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = llama().train()
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = create_schedule(model, mesh=mesh, example_inputs={name: each[:1] for name, each in batch("ones").items()})
    schedule["model.layers.1"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=lambda each: torch.optim.SGD(each, lr=0.5), microbatches=2)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.5), []
    for kind in ("ones", "right", "left", "ones"):
        loss = plain(**batch(kind)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(engine.train_batch(**batch(kind))), float(loss)))
    engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.multiproc
def test_an_engine_trains_on_padded_and_unpadded_micro_batches() -> None:
    """In the padded batches one of two micro-batches is padded."""
    for losses in run_distributed(_train_on_some_padded, 2):
        for found, expected in losses:
            assert found == pytest.approx(expected, abs=1e-5)
