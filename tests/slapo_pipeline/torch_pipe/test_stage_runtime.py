"""Stages of a program under torch's own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_core import BuildError, Program, Stage, build_program
from slapo_pipeline.torch_pipe import build_stage, sum_tied_gradients
from slapo_testing import run_distributed

from ..stage_comparison import cut
from ..toy_models import WIDTH, Skips

ROWS, PARTS = 8, 4


class Model(nn.Module):
    """Sends a value that is not contiguous, and another one for later; gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        turned = h.unflatten(1, (2, 4)).transpose(1, 2)
        return self.c(torch.tanh(self.b(turned.flatten(1)))) * scale + h


def data(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "scale", "target")}


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def trained(rank: int, kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Loss and gradients of this rank's stage under a schedule of torch's."""
    batch = data(ROWS)
    part = {name: tensor[: ROWS // PARTS] for name, tensor in batch.items() if name != "target"}
    program = build_program(cut(model(), part, "b"))
    stage = build_stage(program, rank, "cpu", dist.group.WORLD)
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, PARTS, loss_fn=F.mse_loss)
    losses: list[torch.Tensor] = []
    given = {name: batch[name] for name in program.stages[rank].batch_inputs}
    schedule.step(**given, target=batch["target"] if rank else None, losses=losses)
    module = program.stages[rank].module
    loss = torch.stack(losses).mean() if losses else None
    return loss, {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_torch_s_schedules_train_the_stages_as_the_model(kind: str) -> None:
    plain, batch = model(), data(ROWS)
    loss = F.mse_loss(plain(batch["x"], batch["scale"]), batch["target"])
    loss.backward()
    (_, first), (found, last) = run_distributed(trained, 2, kind)
    torch.testing.assert_close(found, loss.detach())
    grads = {**first, **last}
    assert grads.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**GPT2, use_cache=False, tie_word_embeddings=True)).eval()
    ids = torch.randint(0, 32, (ROWS, 8), generator=torch.Generator().manual_seed(2))
    return model, {"input_ids": ids, "labels": ids}


def trained_with_ties(rank: int) -> dict[str, torch.Tensor]:
    """The gradients of this rank's stage after those of ties were summed, twice to show that a step begins anew."""
    model, batch = gpt2()
    program = build_program(cut(model, {name: ids[: ROWS // PARTS] for name, ids in batch.items()}, "transformer.h.0"))
    stage = build_stage(program, rank, "cpu", output=lambda result: result.loss)
    schedule = Schedule1F1B(stage, PARTS, loss_fn=lambda loss, target: loss)
    for _ in range(2):
        model.zero_grad()
        given = {name: batch[name] for name in program.stages[rank].batch_inputs}
        schedule.step(**given, target=batch["labels"] if rank else None, return_outputs=False)
        sum_tied_gradients(program)
    module = program.stages[rank].module
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.multiproc
def test_ties_are_summed_for_torch_s_schedules() -> None:
    model, batch = gpt2()
    model(**batch).loss.backward()
    first, last = run_distributed(trained_with_ties, 2)
    for name, parameter in model.named_parameters():
        for found in (first, last):
            if name in found:
                torch.testing.assert_close(found[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert "transformer.wte.weight" in first
    assert torch.equal(first["transformer.wte.weight"], last["lm_head.weight"])


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_result_of_a_model_in_a_record(capfd: pytest.CaptureFixture[str]) -> None:
    model, batch = gpt2()
    program = build_program(cut(model, batch, "transformer.h.0"))
    with pytest.raises(
        BuildError, match="the last stage gives a CausalLMOutputWithCrossAttentions, but a schedule takes a tensor"
    ):
        build_stage(program, 1, "cpu")
    last = build_stage(program, 1, "cpu", output=lambda result: result.loss)
    assert isinstance(last, PipelineStage)
    warning = "stage 1 shares 'transformer.wte.weight' with other stages; call slapo.pipeline.sum_tied_gradients"
    assert warning in capfd.readouterr().err
    (sent,) = build_stage(program, 0, "cpu").submod(input_ids=batch["input_ids"])
    torch.testing.assert_close(last.submod(sent, labels=batch["labels"]), model(**batch).loss)


@pytest.mark.usefixtures("alone")
def test_the_result_of_a_model_in_a_dict() -> None:
    batch = {"x": torch.randn(4, WIDTH), "labels": torch.randn(4, 1)}
    program = build_program(cut(Skips(), batch, "a"))
    with pytest.raises(BuildError, match="the last stage gives a dict, but a schedule takes a tensor"):
        build_stage(program, 1, "cpu")
    assert build_stage(program, 1, "cpu", output=lambda result: (result["loss"], result["out"])).is_last


class Answer:
    """An object of a model's own."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Answers(nn.Module):
    """Gives an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor) -> Answer:
        return Answer(self.linear(input).mean())


def test_a_result_that_only_a_whole_module_makes() -> None:
    program = build_program(cut(nn.Sequential(nn.Linear(WIDTH, WIDTH), Answers()), {"input": torch.randn(4, WIDTH)}, "0"))
    with pytest.raises(BuildError, match="the model's result comes from '1', which gives no tensor; cut inside that module"):
        build_stage(program, 1, "cpu", output=lambda result: result.loss)


def test_no_such_stage() -> None:
    program = Program(model := nn.Linear(2, 2), (Stage(0, model),))
    with pytest.raises(BuildError, match="no stage 1; the program has stages 0 to 0"):
        build_stage(program, 1, "cpu")
    with pytest.raises(BuildError, match="the last stage is a Linear that was not traced here; let what made it build its"):
        build_stage(program, 0, "cpu")
