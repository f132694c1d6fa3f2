"""Parameters that others replace: by FSDP2, and by assigned states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, ScheduleError, build, create_schedule, shard_spec
from slapo_sharding import plugin
from slapo_testing import run_distributed
from slapo_training.distributed import clip_grad_norm_

pytestmark = pytest.mark.multiproc

LENGTH, WIDTH = 4, 8


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))


def _split(model: nn.Sequential, mesh: DeviceMesh) -> Schedule:
    """Shard a model with a sharded sequence."""
    sch = create_schedule(model, mesh=mesh, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch["0"].sync("fwd_pre", "scatter", axis=1).sync("grad", "all_reduce")
    sch["1"].sync("fwd_pre", "all_gather", axis=1).shard("weight", axis=0)
    sch["3"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    build(sch)
    return sch


def _part(name: str, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's shard of a gradient."""
    dim = {"1.weight": 0, "1.bias": 0, "3.weight": 1}.get(name)
    return whole if dim is None else whole.chunk(2, dim)[mesh["tp"].get_local_rank()]


def _local(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _under_fsdp(rank: int, each: bool) -> None:
    model = _layers()
    before = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sch = _split(model, mesh)
    for module in [*(model if each else ()), model]:
        if list(module.parameters()):
            fully_shard(module, mesh=mesh["dp"])
    batch = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    share = batch.chunk(2)[mesh["dp"].get_local_rank()]
    for _ in range(3):
        for each_model in (model, before):
            each_model.zero_grad()
        model(share).pow(2).sum().backward()
        before(batch).pow(2).sum().div(2).backward()  # FSDP takes the mean
        for (name, parameter), whole in zip(model.named_parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(_local(parameter.grad), _part(name, _local(whole.grad), mesh), atol=1e-5, rtol=1e-5)
    for wrong in (lambda: clip_grad_norm_(model.parameters(), 1.0), sch.full_state):
        with pytest.raises(ScheduleError, match="has become a DTensor, as in FSDP2; leave that out"):
            wrong()


@pytest.mark.parametrize("each", [False, True], ids=["the model", "every layer"])
def test_fsdp_on_top_of_split_layers_sums_what_they_sum(each):
    run_distributed(_under_fsdp, 4, each)


def _assigned(rank: int) -> None:
    model, before = _layers(), _layers()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sch = _split(model, mesh)
    old = dict(model.named_parameters())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert all(parameter is not old[name] for name, parameter in model.named_parameters())
    assert [shard_spec(parameter) for parameter in model.parameters()] == [shard_spec(each) for each in old.values()]
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for each in (model, before):
        each(x).pow(2).sum().backward()
    full = sch.full_state("grad")
    torch.testing.assert_close(full, {name: each.grad for name, each in before.named_parameters()}, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), clip_grad_norm_(before.parameters(), 1.0))


def test_assigned_shards_keep_their_facts():
    run_distributed(_assigned, 2)


def _undone(rank: int) -> None:
    """After ``undo`` neither the replacing parameter nor a later one is reduced."""
    norm = nn.LayerNorm(WIDTH)
    sch = create_schedule(norm, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch.sync("grad", "all_reduce")
    for _ in range(2):
        norm.load_state_dict({name: value.clone() for name, value in norm.state_dict().items()}, assign=True)
        norm(torch.ones(1, WIDTH)).sum().backward()
        if len(sch.journal):
            assert norm.bias.grad.tolist() == [2.0] * WIDTH
            sch.undo()
            norm.zero_grad()
            norm(torch.ones(1, WIDTH)).sum().backward()
        assert norm.bias.grad.tolist() == [1.0] * WIDTH


def test_undo_removes_the_reductions_of_later_parameters():
    run_distributed(_undone, 2)


def _summed_first(rank: int) -> str:
    sch = create_schedule(nn.Linear(4, 4), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch.sync("grad", "all_reduce")
    with pytest.raises(ScheduleError) as caught:
        sch.shard("weight", axis=0)
    assert shard_spec(sch.mod.weight) is None
    return str(caught.value)


def test_gradients_of_different_shards_are_not_reduced():
    for message in run_distributed(_summed_first, 2):
        assert message.startswith("shard(''): the gradient of 'weight' is summed over the ranks, which would add up those of")


def _copies(rank: int) -> None:
    """One key head on two ranks: both hold it, and its gradients are reduced."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))
    before, ids = copy.deepcopy(model), torch.arange(8)[None]
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    sch.tensor_parallel()
    build(sch)
    key = model.model.layers[0].self_attn.k_proj
    key.weight = nn.Parameter(key.weight.detach().clone())
    for each in (model, before):
        each(ids, labels=ids).loss.backward()
    torch.testing.assert_close(key.weight.grad, before.model.layers[0].self_attn.k_proj.weight.grad, atol=1e-5, rtol=1e-5)


def test_replaced_copies_are_reduced():
    run_distributed(_copies, 2)
