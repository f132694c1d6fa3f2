"""Pipes under torch's own schedules, on processes: loss and gradients are those of the unmodified model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from slapo.pipeline import MultiUseParameterConfig, SplitPoint, TrivialLossWrapper, annotate_split_points, pipe_split, pipeline
from slapo_testing import run_distributed

ROWS, PARTS, WIDTH, VOCABULARY = 8, 4, 8, 32
RANKS = 2
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")
"""Those with one stage per rank."""

SPLITS = {
    "gpt2": [("transformer.h.1", "END"), ("transformer.h.0", "END"), ("transformer.h.2", "END")],
    "llama": [("model.layers.1", "END"), ("model.layers.1", "BEGINNING"), ("model.layers.3", "BEGINNING")],
    "t5": [("encoder", "END"), ("encoder.block.1", "BEGINNING"), ("decoder.block.0", "END")],
    "marks": [],
}


class Marked(nn.Module):
    """Marks in its forward, a tie across them, a skip, and arguments of several kinds that later stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, /, scales: dict[str, torch.Tensor], power: int = 1, *, labels: torch.Tensor) -> Any:
        first = self.embedding(ids)
        x = torch.tanh(self.blocks[0](first))
        pipe_split()
        x = torch.tanh(self.blocks[1](x * scales["inner"]))
        pipe_split()
        x = torch.tanh(self.blocks[2](x) ** power)
        pipe_split()
        logits = self.head(x + first) * scales["last"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model with tied weights, and the arguments of a batch."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, VOCABULARY, (ROWS, 6), generator=generator)
    labels = torch.randint(1, VOCABULARY, (ROWS, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, 4:] = 0
    sizes = {"vocab_size": VOCABULARY, "use_cache": False}
    if name == "gpt2":
        config = GPT2Config(n_layer=4, n_embd=16, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0, **sizes)
        return GPT2LMHeadModel(config).eval(), (), {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name == "llama":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
        config = LlamaConfig(hidden_size=16, intermediate_size=32, tie_word_embeddings=True, **heads, **sizes)  # type: ignore[arg-type]
        return LlamaForCausalLM(config), (ids, mask), {"labels": labels}
    if name == "t5":
        config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **sizes)  # type: ignore[arg-type]
        return T5ForConditionalGeneration(config).eval(), (ids,), {"attention_mask": mask, "labels": labels}
    scales = {key: torch.rand(ROWS, 1, 1, generator=generator) for key in ("inner", "last")}
    return Marked(), (ids,), {"scales": scales, "power": 2, "labels": labels}


def rows(value: Any, count: int) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:count], value)


def loss_of(output: Any, _: Any) -> torch.Tensor:
    return output[0]


def trained(rank: int, name: str, kind: str, how: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and gradients of this rank's stages after two steps, of which each begins anew."""
    model, args, kwargs = made(name)
    stages = RANKS if kind in SINGLE else 2 * RANKS
    points = SPLITS[name][: stages - 1]
    spec = {path: SplitPoint[point] for path, point in points if (path, "END") not in points or point == "END"}
    both = [(path, point) for path, point in points if path not in spec or SplitPoint[point] is not spec[path]]
    options: dict[str, Any] = {"multi_use_param_spec": MultiUseParameterConfig[how]}
    if both:
        annotate_split_points(model, {path: SplitPoint[point] for path, point in both})
    pipe = pipeline(model, *rows((args, kwargs), ROWS // PARTS), split_spec=spec or None, **options)
    assert pipe.num_stages == max(stages, 4 * (name == "marks"))
    mine = [rank, pipe.num_stages - 1 - rank] if kind == "zbv" else [*range(rank, pipe.num_stages, RANKS)]
    has_loss = pipe.num_stages - 1 in mine
    built = [pipe.build_stage(index, torch.device("cpu"), dist.group.WORLD) for index in mine]
    schedule = SCHEDULES[kind](built[0] if kind in SINGLE else built, PARTS, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        for stage in built:  # an optimizer of this rank has no other parameters
            stage.submod.zero_grad()
        losses.clear()
        given = (args, kwargs) if rank == 0 else ((), {})
        schedule.step(*given[0], **given[1], target=kwargs["labels"] if has_loss else None, losses=losses, return_outputs=False)
    gradients = {
        parameter_name: parameter.grad
        for index in mine
        for parameter_name, parameter in pipe.get_stage_module(index).named_parameters()
        if parameter.grad is not None
    }
    return losses, gradients


CASES = [(name, kind, how) for name in SPLITS for kind in SCHEDULES for how in ("REPLICATE", "TRANSMIT")]
CASES = [case for case in CASES if case[0] != "marks" or case[1] not in SINGLE]
FAST = {
    ("gpt2", "1f1b", "REPLICATE"),
    ("gpt2", "zbv", "REPLICATE"),
    ("llama", "zero bubble", "REPLICATE"),
    ("t5", "gpipe", "TRANSMIT"),
    ("marks", "interleaved", "TRANSMIT"),
}


@pytest.mark.sampled(3)
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "kind", "how"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES]
)
def test_a_pipe_trains_as_the_model(name: str, kind: str, how: str) -> None:
    plain, args, kwargs = made(name)
    parts = []
    for index in range(PARTS):  # the mean over micro-batches, as the schedules take it
        part = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor, i=index: tensor.chunk(PARTS)[i], (args, kwargs))
        parts.append(plain(*part[0], **part[1])[0] / PARTS)
        parts[-1].backward()
    found = run_distributed(trained, RANKS, name, kind, how)
    (losses,) = (losses for losses, _ in found if losses)
    torch.testing.assert_close(torch.stack(losses).sum() / PARTS, torch.stack(parts).sum().detach())
    expected = dict(plain.named_parameters(remove_duplicate=False))
    seen: set[str] = set()
    for _, gradients in found:
        for parameter_name, gradient in gradients.items():
            what = expected[parameter_name]
            torch.testing.assert_close(gradient, what.grad, msg=lambda text, n=parameter_name: f"{n}: {text}")
            seen |= {each for each, parameter in expected.items() if parameter is what}
    assert seen == {each for each, parameter in expected.items() if parameter.grad is not None}


class Perceptron(nn.Module):
    """No loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def wrapped(rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A loss wrapper in two stages, whose schedule is evaluated and stepped."""
    torch.manual_seed(1)
    model = TrivialLossWrapper(Perceptron(), F.mse_loss)
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    pipe = pipeline(model, (x[: ROWS // PARTS], y[: ROWS // PARTS, :1]), split_spec={"module.a": SplitPoint.END})
    assert (pipe.loss_spec, pipe.has_loss_and_backward) == (True, True)
    stage = pipe.build_stage(rank, "cpu", output=lambda loss: loss.reshape(1))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=lambda loss, _: loss.mean())
    given = (x, y[:, :1]) if rank == 0 else ()
    schedule.step(*given, target=None if rank == 0 else y)
    evaluated = schedule.eval(*given, target=None if rank == 0 else y)
    return evaluated, {name: parameter.grad for name, parameter in pipe.get_stage_module(rank).named_parameters()}


@pytest.mark.multiproc
def test_a_loss_wrapper() -> None:
    torch.manual_seed(1)
    model = TrivialLossWrapper(Perceptron(), F.mse_loss)
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    loss = model(x, y[:, :1])
    loss.backward()
    (_, first), (evaluated, last) = run_distributed(wrapped, RANKS)
    torch.testing.assert_close(evaluated.mean(), loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close({**first, **last}[name], parameter.grad)
