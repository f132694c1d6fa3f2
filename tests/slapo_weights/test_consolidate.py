"""``consolidate_model``: meta parameters get the numbers that ``build`` would give them, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo
from slapo_core import BuildError, UnknownNameError
from slapo_testing import run_distributed
from tests.engine_models import batches, small
from tests.slapo_torch.layouts import adamw, mesh_of, message_of, put_together


def empty(name: str = "gpt2") -> Any:
    with slapo.init_empty_weights():
        return small(name)


def filled(module: nn.Module) -> None:
    """Another initialiser than the model's own."""
    for parameter in module.parameters(recurse=False):
        parameter.normal_() if parameter.dim() > 1 else parameter.fill_(parameter.numel())


@pytest.mark.parametrize("given", [{}, {"seed": 7}, {"param_init_fn": filled}], ids=["own", "seed", "fn"])
def test_it_gives_what_build_gives(given: dict[str, Any]) -> None:
    built = slapo.build(slapo.create_schedule(empty()), **given).module.state_dict()
    sch = slapo.create_schedule(empty())
    assert slapo.consolidate_model(sch, None, **given) is sch
    found = sch.mod.state_dict()
    assert found.keys() == built.keys()
    assert [name for name in built if not torch.equal(found[name], built[name])] == []
    assert sch["lm_head"].mod.weight is sch["transformer.wte"].mod.weight
    assert torch.equal(slapo.build(sch).module.lm_head.weight, built["lm_head.weight"])


def test_what_has_values_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = model[0].weight
    model[1].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    sch = slapo.create_schedule(model)
    slapo.consolidate_model(sch, None, lambda module: [each.fill_(3) for each in module.parameters(recurse=False)])
    assert sch["0"].mod.weight is kept
    assert bool((sch["1"].mod.weight == 3).all())
    assert not bool((kept == 3).any())


def consolidated(rank: int, layout: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, str]:
    """Pieces of engines with and without, how many numbers this rank had in between, and what a second time says."""
    mesh, batch = mesh_of(**layout), batches(1)[0]
    found = []
    held = 0
    for is_before in (False, True):
        sch = slapo.create_schedule(empty(), mesh=mesh, example_inputs=batch)
        if layout.get("tp", 1) > 1:
            sch.tensor_parallel()
        if layout.get("pp", 1) > 1:
            sch.pipeline(2)
        if is_before:
            slapo.consolidate_model(sch, "torch", seed=3, microbatches=2)
            held = sum(parameter.numel() for parameter in sch.mod.parameters() if not parameter.is_meta)
        engine = slapo.build(sch, "torch", optimizer=adamw, microbatches=2, seed=3)
        found.append(put_together(engine, mesh))
        engine.close()
    said = message_of(lambda: slapo.consolidate_model(sch, "torch"))
    return found[0], found[1], held, said


@pytest.mark.multiproc
@pytest.mark.parametrize("layout", [pytest.param({"tp": 2}, marks=pytest.mark.slow), {"pp": 2}], ids=str)
def test_each_rank_gets_its_part_of_the_same_numbers(layout: dict[str, int]) -> None:
    expected = slapo.build(slapo.create_schedule(empty()), seed=3).module.state_dict()
    total = sum(parameter.numel() for parameter in small("gpt2").parameters())
    for built, consolidated_before, held, said in run_distributed(consolidated, 2, layout):
        assert built.keys() == consolidated_before.keys()
        assert [name for name in built if not torch.equal(built[name], expected[name])] == []
        assert [name for name in built if not torch.equal(consolidated_before[name], expected[name])] == []
        assert held < 0.7 * total
        assert said == "BuildError: consolidate_model: the schedule was built for 'torch' already; call it before build"


def without_a_mesh(rank: int) -> list[torch.Tensor]:
    """The parameters of a sharded layer, whatever will build it."""
    found = []
    for target in (None, "torch", "deepspeed"):
        with slapo.init_empty_weights():
            sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        sch["0"].shard(["weight", "bias"], axis=0)
        assert slapo.consolidate_model(sch, target, filled) is sch
        found.append(sch["0"].mod.weight.detach())
        assert sch["1"].mod.weight.shape == (4, 8)
    with pytest.raises(UnknownNameError, match="no dialect 'tensorflow'"):
        slapo.consolidate_model(slapo.create_schedule(nn.Linear(2, 2)), "tensorflow")
    return found


@pytest.mark.multiproc
@pytest.mark.needs("deepspeed")
def test_shards_without_a_mesh_do_not_depend_on_the_target() -> None:
    (plain, *others), second = run_distributed(without_a_mesh, 2)
    assert plain.shape == (4, 4)
    assert all(torch.equal(other, plain) for other in others)
    assert not torch.equal(second[0], plain)


def stage_values(rank: int, target: str) -> dict[str, torch.Tensor]:
    """Return the parameters with values on this rank after ``consolidate_model``."""
    sch = slapo.create_schedule(empty(), mesh=mesh_of(pp=2), example_inputs=batches(1)[0])
    sch.pipeline(2)
    slapo.consolidate_model(sch, target, optimizer=adamw, microbatches=2, check=False)
    return {name: parameter.detach() for name, parameter in sch.mod.named_parameters() if not parameter.is_meta}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "target",
    [
        "torch",
        pytest.param("deepspeed", marks=[pytest.mark.needs("deepspeed"), pytest.mark.slow]),
        pytest.param("megatron", marks=[pytest.mark.needs("megatron-core"), pytest.mark.slow]),
    ],
)
def test_each_stage_gets_its_own_for_any_target_with_the_options_of_the_build(target: str) -> None:
    expected = dict(slapo.build(slapo.create_schedule(empty())).module.named_parameters())
    first, second = run_distributed(stage_values, 2, target)
    assert first.keys() | second.keys() == expected.keys()
    assert first.keys() != second.keys()
    for name, value in [*first.items(), *second.items()]:
        assert torch.equal(value, expected[name])


def test_values_from_files(tmp_path: Path) -> None:
    trained = small("gpt2")
    trained.save_pretrained(tmp_path)
    sch = slapo.create_schedule(empty())
    slapo.consolidate_model(sch, "torch", weights=tmp_path)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in sch.mod.state_dict().items())


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        (None, {"microbatches": 2}, "target=None gives a plain module and has no use for microbatches"),
        (None, {"zero": 1}, "target=None gives a plain module and has no use for zero"),
        ("torch", {"zero": 1}, "no option 'zero' of target 'torch'"),
    ],
)
def test_an_option_without_use_is_an_error(target: str | None, option: dict[str, Any], message: str) -> None:
    sch = slapo.create_schedule(empty())
    with pytest.raises(BuildError, match=message):
        slapo.consolidate_model(sch, target, **option)
    assert sch["lm_head"].mod.weight.is_meta


def failing_on_one(rank: int) -> tuple[str, bool]:
    sch = slapo.create_schedule(empty(), mesh=mesh_of(tp=2))

    def initialise(module: nn.Module) -> None:
        if rank:
            raise ValueError("no numbers left")

    return message_of(lambda: slapo.consolidate_model(sch, None, initialise if rank else filled)), sch[
        "lm_head"
    ].mod.weight.is_meta


@pytest.mark.multiproc
def test_a_rank_that_fails_is_told_on_all() -> None:
    (first, _), (second, is_meta) = run_distributed(failing_on_one, 2)
    assert first == "BuildError: rank 1 failed: ValueError: no numbers left"
    assert second == "ValueError: no numbers left"
    assert is_meta


def test_what_it_cannot_do() -> None:
    with pytest.raises(BuildError, match="cannot give values to a Linear; give what create_schedule returned"):
        slapo.consolidate_model(nn.Linear(2, 2), None)
    sch = slapo.create_schedule(empty())
    with pytest.raises(UnknownNameError, match="no dialect 'tensorflow'"):
        slapo.consolidate_model(sch, "tensorflow")
    with pytest.raises(BuildError, match="the initialiser leaves transformer.wte.weight = lm_head.weight, or a part of it"):
        slapo.consolidate_model(sch, None, lambda module: None)
    assert sch["lm_head"].mod.weight.is_meta
