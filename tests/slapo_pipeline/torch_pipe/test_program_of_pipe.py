"""A program from a ``Pipe`` that torch has made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline
from torch.nn import functional as F

import slapo_pipeline.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import BuildError, Program, Registry, Schedule, TraceError, build, build_program, create_schedule
from slapo_pipeline.analysis import analyze_pipeline_module
from slapo_pipeline.describe import describe
from slapo_pipeline.program_of_pipe import TorchPipeStage, program_of_pipe

from ..stage_comparison import assert_same, loss_of

WIDTH = 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning"
)  # of torch's own making of a Pipe


class Model(nn.Module):
    """Ties, a skip over stages, running statistics, dropout, a constant, a result in a dict, a part that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.spare = nn.Embedding(16, WIDTH), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        first = x = self.embedding(ids)
        for block in self.blocks:
            x = torch.relu(block(x)) * torch.tensor(1.5)
            pipe_split()
        x = self.drop(self.norm(x.flatten(0, 1)).view_as(x)) * self.scale + first
        out = self.head(x)
        return {"loss": F.cross_entropy(out.flatten(0, 1), labels.flatten()), "out": out}


def batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 16, (rows, 3)), "labels": torch.randint(0, 16, (rows, 3))}


def made(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Pipe, Schedule]:
    """A Pipe and a schedule of one model."""
    schedule = create_schedule(
        model, example_inputs=inputs, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin])
    )
    return pipeline(model, (), inputs, **options), schedule


def assert_is_model(program: Program, model: nn.Module, plain: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Two steps of the program are two of the model: results, gradients, buffers."""
    for _ in range(2):
        torch.manual_seed(0)
        expected = plain(**inputs)
        torch.manual_seed(0)
        found = program(**inputs)
        assert_same(found, expected, "outputs")
        loss_of(expected).backward()
        loss_of(found).backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "buffers")


@pytest.mark.parametrize("training", [True, False])
def test_the_program_is_the_model(training: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Model().train(training), batch()
    plain = copy.deepcopy(model)
    program = program_of_pipe(*made(model, inputs))
    assert len(program.stages) == 4
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "buffers")
    assert_is_model(program, model, plain, inputs)


def test_parameters_are_the_model_s_own() -> None:
    model = Model()
    program = program_of_pipe(*made(model, batch()))
    held = {name: parameter for stage in program.stages for name, parameter in stage.module.named_parameters()}
    assert all(parameter is model.get_parameter(name) for name, parameter in held.items())
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert {name for stage in program.stages for name, _ in stage.module.named_parameters(remove_duplicate=False)} == {*every}
    assert [tie.stages for tie in program.ties] == [(0, 3)]
    assert program.original_names["embedding.weight"] == ("embedding.weight", "head.weight")
    assert [*program.stages[3].module.state_dict()] == [
        *(f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        "head.weight",
    ]


def test_the_pipe_is_not_changed() -> None:
    pipe, schedule = made(Model(), batch())
    before = dict(pipe.named_parameters(remove_duplicate=False))
    program_of_pipe(pipe, schedule)
    assert dict(pipe.named_parameters(remove_duplicate=False)).items() == before.items()


def test_a_skip_passes_through_the_stages_between() -> None:
    program = program_of_pipe(*made(Model(), batch()))
    assert [len(stage.inputs) for stage in program.stages] == [0, 2, 2, 2]
    assert [stage.batch_inputs for stage in program.stages] == [("ids",), (), (), ("labels",)]
    assert all(value.requires_grad and value.shape == (2, 3, WIDTH) for value in program.stages[2].inputs)
    assert [stage.paths for stage in program.stages] == [
        ("embedding", "blocks.0"),
        ("blocks.1",),
        ("blocks.2",),
        ("norm", "drop", "head"),
    ]
    assert len(analyze_pipeline_module(program).values) == 4
    assert "stage 3\n  runs            norm, drop, head" in describe(program)


class Plain(nn.Module):
    """Gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


def test_a_policy_of_split_points() -> None:
    model, inputs = Plain(), {"x": torch.randn(4, WIDTH)}
    plain = copy.deepcopy(model)
    schedule = create_schedule(
        model, example_inputs=inputs, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin])
    )
    pipe = pipeline(copy.deepcopy(model), (), inputs, split_spec={"layers.1": SplitPoint.BEGINNING})
    program = program_of_pipe(pipe, schedule)
    assert len(program.stages) == 2
    assert_is_model(program, model, plain, inputs)


def test_another_mode_and_other_shapes() -> None:
    model, inputs = Model(), batch()
    program = program_of_pipe(*made(model, inputs))
    with pytest.raises(TraceError, match=r"the Pipe was made for other inputs, the batch\['ids'\] is a tensor \[4, 3\] int64"):
        program(**batch(4))
    model.eval()
    with pytest.raises(TraceError, match="the Pipe was made in train mode; make another one for the other"):
        program(**inputs)


def test_a_pipe_of_one_tensor_for_two_arguments() -> None:
    model, inputs = Model().eval(), batch()
    schedule = create_schedule(
        model, example_inputs=inputs, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin])
    )
    pipe = pipeline(model, (), {"ids": inputs["ids"], "labels": inputs["ids"]})  # torch reads one of them twice
    with pytest.raises(BuildError, match="give another result than the model on the example inputs; make the Pipe from this"):
        program_of_pipe(pipe, schedule)


def test_a_pipe_of_another_mode() -> None:
    model, inputs = Model(), batch()
    pipe, schedule = made(model.eval(), inputs)
    model.train()
    with pytest.raises(BuildError, match="give another result than the model on the example inputs.* in this mode"):
        program_of_pipe(pipe, schedule)


class Flat(nn.Module):
    """Has its number of rows in the graph that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).reshape(x.shape[0] * WIDTH, 1))


def test_a_pipe_of_other_shapes() -> None:
    model = Flat()
    pipe = pipeline(model, (), {"x": torch.randn(4, WIDTH)}, split_spec={"b": SplitPoint.BEGINNING})
    schedule = create_schedule(Flat(), example_inputs={"x": torch.randn(2, WIDTH)})
    with pytest.raises(
        BuildError, match="stage 0 of the Pipe does not run on the example inputs, .*; make the Pipe from inputs like"
    ):
        program_of_pipe(pipe, schedule)


def test_a_pipe_of_another_model() -> None:
    inputs = {"x": torch.randn(4, WIDTH)}
    pipe, _ = made(Plain(), inputs)
    other = create_schedule(nn.Sequential(nn.Linear(WIDTH, 1)), example_inputs=inputs)
    with pytest.raises(BuildError, match="takes 'x', no argument of the model"):
        program_of_pipe(pipe, other)
    wider = Plain()
    wider.layers[0] = nn.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(BuildError, match=r"has a parameter 'layers.0.bias' \[8\], but the model has not; give its own model"):
        program_of_pipe(pipe, create_schedule(wider, example_inputs=inputs))


def test_what_is_refused() -> None:
    model, inputs = Plain(), {"x": torch.randn(4, WIDTH)}
    pipe, schedule = made(model, inputs)
    with pytest.raises(BuildError, match="pipe is a Plain; give what torch.distributed.pipelining.pipeline returned"):
        program_of_pipe(model, schedule)
    schedule["layers.0"].cut_pipeline_stage()
    with pytest.raises(BuildError, match="the schedule has cuts of its own, which the Pipe does not contain"):
        program_of_pipe(pipe, schedule)
    with pytest.raises(BuildError, match="the stages of a Pipe run once; give create_schedule example_inputs="):
        program_of_pipe(pipe, create_schedule(model))


class Counting(nn.Module):
    """The last stage counts, the first reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.b(self.a(x) + self.count)
        self.count.add_(1)
        return result


def test_a_buffer_that_one_stage_changes_and_another_reads_is_refused() -> None:
    told = "'count' changes and is used by stages 0 and 1 of the Pipe, which have a copy each; split elsewhere"
    with pytest.raises(BuildError, match=told):
        program_of_pipe(*made(Counting(), {"x": torch.randn(4, WIDTH)}, split_spec={"b": SplitPoint.BEGINNING}))


def test_build_takes_a_ready_pipe_once() -> None:
    model, inputs = Plain(), {"x": torch.randn(4, WIDTH)}
    schedule = create_schedule(
        model, example_inputs=inputs, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin])
    )
    pipe = pipeline(copy.deepcopy(model), (), inputs, split_spec={"layers.1": SplitPoint.BEGINNING})
    build(schedule, pipe=pipe)
    assert schedule.program is not None
    assert [type(stage.module) for stage in schedule.program.stages] == [TorchPipeStage, TorchPipeStage]
    assert len(build_program(schedule).stages) == 1


def test_build_refuses_what_is_no_pipe() -> None:
    schedule = create_schedule(Plain(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin]))
    with pytest.raises(BuildError, match="pipe is a str; give what torch.distributed.pipelining.pipeline returned"):
        build(schedule, pipe="ready")
    assert len(build_program(schedule).stages) == 1
