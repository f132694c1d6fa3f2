"""``print(program)`` and ``print(engine)``: stages, what crosses between them, and what an engine was built with."""

from __future__ import annotations

from functools import partial
from inspect import cleandoc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import slapo
from slapo_core import Engine, build_program, create_schedule
from slapo_testing import run_distributed
from tests.slapo.rendering.small_models import Block, Tied, rendering_plugins

BATCH = torch.zeros(2, 3, dtype=torch.long)
sgd = partial(torch.optim.SGD, lr=0.1)


def cut(model: nn.Module) -> slapo.Schedule:
    sch = create_schedule(model, example_inputs=BATCH)
    sch["h.0"].cut_pipeline_stage()
    return sch


def test_a_program_shows_its_stages() -> None:
    program = build_program(cut(Tied(2)))
    assert repr(program) == "Program(Tied: 2 stages)"
    assert str(program) == cleandoc("""
        Program of Tied
        stages  2
        tied    emb.weight = head.weight of stages 0, 1

        stage 0
        runs            emb, h.0
        from the batch  ids
        parameters      112; float32 on cpu

        112  TracedTied
         40    emb: Embedding(10, 4)  weight [10, 4]
         72    h: ModuleList
         72      0: Block
         40        fc: Linear(in_features=4, out_features=8, bias=True)  weight [8, 4], bias [8]
                   act: GELU(approximate='none')
         32        proj: Linear(in_features=8, out_features=4, bias=False)  weight [4, 8]

        stage 1
        runs        h.1, head
        receives    h_0 [2, 3, 4] float32
        parameters  112; float32 on cpu

        112  TracedTied
         72    h: ModuleList
         72      1: Block
         40        fc: Linear(in_features=4, out_features=8, bias=True)  weight [8, 4], bias [8]
                   act: GELU(approximate='none')
         32        proj: Linear(in_features=8, out_features=4, bias=False)  weight [4, 8]
         40    head: Linear(in_features=4, out_features=10, bias=False)  weight [10, 4]
    """)


def test_a_program_of_one_stage_shows_the_model() -> None:
    program = build_program(create_schedule(Block()))
    assert repr(program) == "Program(Block: 1 stage)"
    lines = str(program).splitlines()
    assert lines[:5] == ["Program of Block", "stages  1", "", "parameters  72; float32 on cpu", ""]
    assert lines[5:7] == ["72  Block", "40    fc: Linear(in_features=4, out_features=8, bias=True)  weight [8, 4], bias [8]"]


def test_an_engine_shows_what_it_was_built_with() -> None:
    engine = slapo.build(create_schedule(Block()), "torch", optimizer=sgd, microbatches=2, loss_fn=nn.MSELoss())
    engine.train_batch(torch.zeros(2, 4), labels=torch.zeros(2, 4))
    assert str(engine).splitlines()[:7] == [
        "TorchEngine",
        "target     torch",
        "options    optimizer=SGD(lr=0.1), loss_fn=MSELoss(), microbatches=2",
        "optimizer  SGD: 3 parameters in 1 group, lr 0.1",
        "steps      1",
        "",
        "parameters  72; float32 on cpu",
    ]
    assert repr(engine).count("\n") == 0


def test_an_engine_of_a_plain_module_or_a_stranger_has_the_module_alone() -> None:
    class Strange(Engine):
        module, optimizer = nn.ReLU(), object()  # type: ignore[assignment]
        train_batch = eval_batch = save = load = lambda self: None  # type: ignore[assignment]

    assert str(Strange()) == "Strange\noptimizer  object\n\nparameters  none\n\nReLU"
    assert str(slapo.build(create_schedule(Block()))).startswith("PlainEngine\noptimizer  none\n\nparameters  72")


def on_two_ranks(rank: int, layout: dict[str, int], options: dict[str, Any], target: str = "torch") -> list[str]:
    with rendering_plugins():
        mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
        sch = create_schedule(Tied(2), mesh=mesh, example_inputs=BATCH)
        if "pp" in layout:
            sch["h.0"].cut_pipeline_stage()
        engine = slapo.build(sch, target, optimizer=sgd, loss_fn=nn.NLLLoss(), **options)
        return [str(subject) for subject in (sch, engine, sch.program) if rank == 1]  # the other does not print


@pytest.mark.multiproc
def test_an_engine_shows_the_stages_of_its_rank_and_what_other_ranks_hold_is_not_counted() -> None:
    _, (schedule, engine, program) = run_distributed(on_two_ranks, 2, {"pp": 2}, {}, timeout=60)
    assert "parameters  184, of which 112 on this rank; float32 on cpu, float32 on meta" in schedule
    assert "stages here  1 of 2" in engine
    assert "mesh pp 2 on cpu; this is rank 1 (pp 1)" in engine
    assert "stage 0" not in engine.partition("\n\n")[2]
    assert "stage 0 on rank 0 along pp" in program
    assert "parameters      112, of which 40 on this rank; float32 on cpu, float32 on meta" in program


@pytest.mark.multiproc
def test_rows_of_fsdp_are_parts() -> None:
    _, (schedule, engine, _) = run_distributed(on_two_ranks, 2, {"dp": 2}, {"data_parallel": "fsdp"}, timeout=60)
    for text in (schedule, engine):
        assert "weight [4 of 8, 4] dp 2, bias [4 of 8] dp 2" in text
        assert "parameters  184, of which 92 on this rank; float32 on cpu" in text
    assert "data_parallel=fsdp" in engine


@pytest.mark.multiproc
def test_parameters_of_zero_3_are_ranges_of_flat_tensors() -> None:
    options = {"config": {"zero_optimization": {"stage": 3}}}
    _, (schedule, engine, _) = run_distributed(on_two_ranks, 2, {"dp": 2}, options, "deepspeed", timeout=100)
    for text in (schedule, engine):
        assert "weight [16] of [8, 4] ZeRO-3, bias [4 of 8] ZeRO-3" in text
        assert "parameters  184, of which 92 on this rank; float32 on cpu" in text
    assert "target     deepspeed" in engine
    assert "config={zero_optimization: {stage: 3}}" in engine


@pytest.mark.multiproc
def test_an_engine_of_megatron_is_shown_alike() -> None:
    _, (_, engine, _) = run_distributed(on_two_ranks, 2, {"dp": 2}, {}, "megatron", timeout=100)
    assert engine.startswith("MegatronEngine\ntarget     megatron\noptions    optimizer=SGD(lr=0.1), loss_fn=NLLLoss()\n")


def test_a_checkpoint_is_shown_without_a_journal() -> None:
    sch = slapo.create_schedule(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))))
    sch["1"].checkpoint()
    lines = str(slapo.build_program(sch)).splitlines()
    assert ["wrapped in CheckpointWrapper" in line for line in lines if ": Sequential" in line] == [False, True, False]
