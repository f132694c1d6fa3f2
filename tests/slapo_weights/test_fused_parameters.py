"""Modules that steps have put together of others, and the names by which they find their weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_core import BuildError, ScheduleError, ShardSpec, successor
from slapo_kernels.layers.fused import FusedQKV
from slapo_weights.export import export_weights
from slapo_weights.load import Weights, fill
from slapo_weights.tensor_views.fused_parameters import made_of


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


def fused_attention(declared: bool = True) -> Any:
    """A meta model whose projections a step has fused into one, rows by head, and its schedule."""
    with slapo.init_empty_weights():
        model = nn.Sequential(Attention(), nn.Linear(24, 2))
    sch = slapo.create_schedule(model)
    layers = [model[0].query, model[0].key, model[0].value]
    fused = FusedQKV.from_separate(*layers, num_heads=4)
    if not declared:
        with slapo.init_empty_weights():
            fused = FusedQKV(8, num_heads=4)
    sch["0"].replace(fused)
    return sch


def test_a_fused_module_loads_by_the_names_that_its_step_declares(tmp_path: Path) -> None:
    reference = nn.Sequential(Attention(), nn.Linear(24, 2))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    fused = slapo.build(fused_attention(), weights=tmp_path).module[0]
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.cat([each.flatten(-2) for each in fused(x)], -1), reference[0](x))


def test_a_part_of_a_fused_module_is_read_alone(tmp_path: Path) -> None:
    reference = nn.Sequential(Attention(), nn.Linear(24, 2))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    want = FusedQKV.from_separate(reference[0].query, reference[0].key, reference[0].value, 4).fused_linear.weight.detach()
    for rank in range(2):
        module = fused_attention().root_module
        linear = module[0].fused_linear
        spec = ShardSpec(0, (24, 8), rank, 2, (24,))
        linear.weight = successor(linear.weight, spec.local(linear.weight.detach()), spec=spec)
        others = sum(each.numel() for each in module.parameters()) - linear.weight.numel()
        assert fill(module, [module], Weights(tmp_path)) == (others + 12 * 8) * 4
        assert torch.equal(module[0].fused_linear.weight, spec.local(want))


def test_a_parameter_that_a_step_brought_in_without_a_word_is_told(tmp_path: Path) -> None:
    save_file(nn.Sequential(Attention(), nn.Linear(24, 2)).state_dict(), tmp_path / "model.safetensors")
    match = r"2 added by a step that does not declare its origin \(made_of\): 0.fused_linear.weight, 0.fused_linear.bias; 6"
    with pytest.raises(BuildError, match=match):
        slapo.build(fused_attention(declared=False), weights=tmp_path)
    weights = Weights(tmp_path, missing=("0.fused_linear.*",), unexpected=("0.*",))
    module = slapo.build(fused_attention(declared=False), weights=weights, param_init_fn=constant).module
    assert bool((module[0].fused_linear.weight == 7).all())
    assert not bool((module[1].weight == 7).any())


def constant(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.fill_(7)


def test_what_does_not_make_up_a_parameter_is_refused() -> None:
    model = nn.Sequential(Attention())
    with pytest.raises(ScheduleError, match="a part has no name in the unmodified model"):
        made_of(nn.Parameter(torch.empty(8, 8)), [model[0].query.weight])
    slapo.create_schedule(model)
    with pytest.raises(ScheduleError, match="parts of 8 along dimension 0 do not make up a parameter of 9"):
        made_of(nn.Parameter(torch.empty(9, 8)), [model[0].query.weight])
    with pytest.raises(ScheduleError, match="parts of 8 along dimension 0 do not make up a parameter of 7"):
        made_of(nn.Parameter(torch.empty(7, 8)), [model[0].query.weight], padded=True)
    for start, stop in ((4, 12), (-8, 0), (3, 3)):
        with pytest.raises(ScheduleError, match=rf"'0.query.weight' of shape \(8, 8\) has no range {start} to {stop} along"):
            made_of(nn.Parameter(torch.empty(8, 8)), [(model[0].query.weight, start, stop)])
    with pytest.raises(ScheduleError, match="dim is 2; give a dimension of a parameter that has 2"):
        made_of(nn.Parameter(torch.empty(8, 8)), [model[0].query.weight], dim=2)


def test_parts_may_lie_side_by_side_counted_from_the_end(tmp_path: Path) -> None:
    reference = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with slapo.init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        wide = nn.Linear(8, 4, bias=False)
    sch: Any = slapo.create_schedule(model)
    made_of(wide.weight, [model[0].weight, model[1].weight], dim=-1)
    sch["0"].replace(wide)
    sch["1"].replace(nn.Identity())
    found = slapo.build(sch, weights=tmp_path)
    assert torch.equal(found.module[0].weight, torch.cat([reference[0].weight, reference[1].weight], 1))
    export_weights(sch, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["1.weight"], reference[1].weight)


class Padded(nn.Module):
    """An embedding with rows that no token has, and the head of it, which gives no logits for them."""

    def __init__(self, embed: nn.Embedding, rows: int) -> None:
        super().__init__()
        self.tokens = embed.num_embeddings
        self.weight = nn.Parameter(torch.empty(rows, embed.embedding_dim, device="meta"))
        made_of(self.weight, [embed.weight], padded=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, self.weight), self.weight[: self.tokens])


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embed(ids), self.embed.weight)


def test_a_vocabulary_that_a_step_padded_has_zeros_behind_the_last_token_and_is_written_without_them(tmp_path: Path) -> None:
    reference, ids = Tokens(), torch.tensor([[1, 9, 3]])
    tensors = {f"all.{name}": tensor for name, tensor in reference.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with slapo.init_empty_weights():
        model = nn.ModuleDict({"all": Tokens()})
    sch: Any = slapo.create_schedule(model)
    sch["all"].replace(Padded(model["all"].embed, 16))
    found = slapo.build(sch, weights=tmp_path).module["all"]
    assert not found.weight[10:].any()
    expected = reference(ids)
    expected.square().sum().backward()
    output = found(ids)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found.weight.grad[:10], reference.embed.weight.grad)
    export_weights(sch, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert torch.equal(written["all.embed.weight"], reference.embed.weight)


def test_a_copy_of_a_model_keeps_what_was_declared(tmp_path: Path) -> None:
    save_file(nn.Sequential(Attention(), nn.Linear(24, 2)).state_dict(), tmp_path / "model.safetensors")
    module = copy.deepcopy(fused_attention()).root_module
    fill(module, [module], Weights(tmp_path))
    assert not module[0].fused_linear.weight.is_meta


def test_projections_that_a_step_took_apart_load_their_rows_of_the_fused_one(tmp_path: Path) -> None:
    reference = nn.Sequential(FusedQKV(16, 4))
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with slapo.init_empty_weights():
        sch: Any = slapo.create_schedule(nn.Sequential(FusedQKV(16, 4)))
    sch["0"].replace(nn.Sequential(*sch["0"].mod.to_separate()))
    found = slapo.build(sch, weights=tmp_path).module.parameters()
    expected = (each for layer in reference[0].to_separate() for each in layer.parameters())
    assert [*map(torch.equal, found, expected)] == [True] * 6
