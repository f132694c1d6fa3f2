"""Runs of the tests on each rank: GPT-2 in some layout beside the unmodified model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule, gather_objects
from slapo_torch.engine import TorchEngine
from slapo_training.model.pieces import assemble

ROWS = 8
"""Rows of a batch per data-parallel rank."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests; its eps keeps rounding in tiny gradients from becoming steps."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def gpt2(dropout: float = 0.0, layers: int = 4) -> nn.Module:
    """A tied GPT-2, equal on every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, n_layer=layers, **rates, use_cache=False, loss_type="ForCausalLMLoss"))


def tokens(dp: int, steps: int = 3) -> list[torch.Tensor]:
    """Batches of all data-parallel ranks together."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (ROWS * dp, 16), generator=generator) for _ in range(steps)]


def mesh_of(pp: int = 1, dp: int = 1, tp: int = 1) -> DeviceMesh:
    """A CPU mesh of the three axes."""
    return init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def scheduled(model: nn.Module, mesh: DeviceMesh, example: dict[str, Any], per_rank: int = 1) -> Schedule:
    """GPT-2 sharded and cut evenly as the mesh wants, into so many stages for each rank."""
    plugins = Registry(
        [slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_sharding.plugin, slapo_torch.plugin]
    )
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=plugins)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    stages, layers = mesh["pp"].size() * per_rank, len(schedule["transformer.h"].mod._modules)
    for stage in range(1, stages):
        schedule[f"transformer.h.{stage * layers // stages - 1}"].cut_pipeline_stage()
    return schedule


def my_part(batch: torch.Tensor, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """This data-parallel rank's rows."""
    part = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return {"input_ids": part, "labels": part}


def train_beside_reference(rank: int, layout: dict[str, int], config: dict[str, Any], per_rank: int = 1) -> dict[str, float]:
    """Largest differences over three steps: losses, gradients and norms; after them: weights and the evaluation loss."""
    mesh = mesh_of(**layout)
    model = gpt2(layers=max(4, layout.get("pp", 1) * per_rank))
    reference = copy.deepcopy(model)
    data = tokens(layout.get("dp", 1))
    schedule = scheduled(model, mesh, my_part(data[0], mesh), per_rank)
    engine = build(schedule, "torch", optimizer=adamw, **config)
    assert isinstance(engine, TorchEngine)
    optimizer = adamw(reference.parameters())
    worst = dict.fromkeys(("loss", "gradient", "norm", "weight", "evaluation"), 0.0)

    def note(what: str, difference: float) -> None:
        worst[what] = max(worst[what], difference)

    for batch in data:
        loss = engine.train_batch(**my_part(batch, mesh))
        optimizer.zero_grad()
        expected = reference(input_ids=batch, labels=batch).loss
        expected.backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), config.get("clip", 0.0) or float("inf"))
        note("loss", abs(loss.item() - expected.item()))
        note("gradient", _largest(schedule.full_state("grad"), {n: p.grad for n, p in reference.named_parameters()}))
        if engine.grad_norm is not None:
            note("norm", abs(engine.grad_norm - norm.item()))
        optimizer.step()
    note("weight", _largest(schedule.full_state(), {n: p.detach() for n, p in reference.named_parameters()}))
    reference.eval()
    expected = reference(input_ids=data[0], labels=data[0]).loss
    note("evaluation", abs(engine.eval_batch(**my_part(data[0], mesh)).item() - expected.item()))
    engine.close()
    return worst


def _largest(found: Any, expected: Any) -> float:
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def losses(engine: Any, mesh: DeviceMesh, batches: list[torch.Tensor]) -> list[float]:
    """Losses of some steps."""
    return [engine.train_batch(**my_part(batch, mesh)).item() for batch in batches]


def message_of(call: Callable[[], Any]) -> str:
    """Return the message of a call's error."""
    try:
        call()
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    return "no error"


def put_together(engine: Any, mesh: Any) -> dict[str, torch.Tensor]:
    """Assemble the tensors from the pieces of all ranks."""
    held = gather_objects({name: piece._replace(tensor=piece.tensor.clone()) for name, piece in engine.pieces().items()}, mesh)
    names = {name for own in held for name in own}
    return {name: assemble(own[name] for own in held if name in own) for name in names}


def largest_difference(found: dict[str, torch.Tensor], model: nn.Module) -> float:
    """From the values of a model, whose names have to be the same ones."""
    expected = model.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(expected.items())}
    assert found.keys() == set(once.values())
    return max(float((found[name] - expected[name].detach()).abs().max()) for name in found)
