"""Every name of the reference's pages ``slapo.pipeline`` and of torch's pipeline IR, which has its place there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional as F

import slapo
from slapo_testing import run_distributed
from tests.slapo.reference_pages import Page, Stack, X, each_name, same, scheduled

PIPELINE, PIPE = Page(slapo.pipeline), Page(slapo.pipeline)


def cut(depth: int = 4, *, at: tuple[str, ...] = ("layers.0", "layers.1", "layers.2")) -> slapo.Schedule:
    """A stack, traced to its layers and cut behind some of them."""
    sch = scheduled(Stack(depth))
    sch.trace_until([f"layers.{number}" for number in range(depth)])
    for path in at:
        sch[path].cut_pipeline_stage()
    return sch


# ---- slapo.pipeline


@PIPELINE.row("propagate_partition", "sch, starting_stage_id=0, stop_at=None")
def _() -> None:
    sch = cut(at=("layers.0",))
    reference = copy.deepcopy(sch.mod)
    module, following = slapo.pipeline.propagate_partition(sch)
    assert following == 2
    assert len(list(module.children())) == 2
    same(reference, module)


@PIPELINE.row("add_partition_notation", "sch, idx")
def _() -> None:
    sch = scheduled()
    slapo.pipeline.add_partition_notation(sch["layers"], 3)
    below = [handle for name, handle in sch.named_schedules() if name.startswith("layers")]
    assert {handle.partition_idx for handle in below} == {3}


@PIPELINE.row("generate_pipeline_partition", "sch")
def _() -> None:
    sch = cut()
    assert list(sch.metadata.primitives["cut_pipeline_stage"]) == ["layers.0", "layers.1", "layers.2"]
    reference = copy.deepcopy(sch.mod)
    parted = slapo.pipeline.generate_pipeline_partition(sch)
    assert isinstance(parted, slapo.Schedule)
    assert len(parted.child) == 4
    assert [handle.partition_idx for handle in parted.child.values()] == [0, 1, 2, 3]
    same(reference, parted.mod)
    plain = slapo.create_schedule(copy.deepcopy(reference))  # as the page has it, without example inputs
    plain["layers.1"].cut_pipeline_stage()
    parted = slapo.pipeline.generate_pipeline_partition(plain)
    assert len(parted.child) == 2
    same(reference, parted.mod)


@PIPELINE.row("analyze_pipeline_module", "top_mod")
def _() -> None:
    parted = slapo.pipeline.generate_pipeline_partition(cut(3, at=("layers.0", "layers.1")))
    arguments, names, liveness = slapo.pipeline.analyze_pipeline_module(parted.mod)
    assert sorted(arguments) == sorted(names) == sorted(liveness) == [0, 1, 2]
    assert [*names.values()] == list(parted.child)
    assert all(set(arguments[stage]) <= set(liveness[stage]) for stage in (1, 2))


@PIPELINE.row("analyze_tie_weights", "top_mod, is_pipeline_partitioned")
def _() -> None:
    model = Stack()
    weight = model.layers[0].fc1.weight
    assert slapo.pipeline.analyze_tie_weights(model, False)[weight] == {("layers.0.fc1.weight", 0), ("layers.1.fc1.weight", 0)}
    sch = scheduled(model)
    sch["layers.0"].cut_pipeline_stage()
    parted = slapo.pipeline.generate_pipeline_partition(sch)
    ((_, places),) = slapo.pipeline.analyze_tie_weights(parted.mod, True).items()
    assert {stage for _, stage in places} == {0, 1}
    assert all(name.endswith("fc1.weight") for name, _ in places)


@PIPELINE.row("build_pipeline_model", "sch, target, **kwargs")
def _() -> None:
    sch = cut(at=("layers.1",))
    reference = copy.deepcopy(sch.mod)
    module, _ = slapo.pipeline.build_pipeline_model(sch, target=None)
    same(reference, module)


# ---- torch's pipeline IR


class Marked(nn.Module):
    """Two layers with a boundary between, one of which uses the other's weight too."""

    def __init__(self, shares: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.shares = nn.Linear(4, 4), nn.Linear(4, 4), shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        slapo.pipeline.pipe_split()
        x = self.second(x)
        return x @ self.first.weight if self.shares else x


def run(pipe: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return what a pipe computes; torch's returns a tuple of one for a tensor."""
    out = pipe(*args, **kwargs)
    return out[0] if isinstance(out, tuple) and len(out) == 1 else out


def alike(model: nn.Module, pipe: Any, **kwargs: Any) -> None:
    """Outputs are equal; values may be detached at the boundaries."""
    torch.testing.assert_close(run(pipe, **kwargs) if kwargs else run(pipe, X), model(X))


def by_spec(model: nn.Module) -> Any:
    return slapo.pipeline.pipeline(model, (X,), split_spec={"layers.1": slapo.pipeline.SplitPoint.BEGINNING})


@PIPE.row("get_submod_name", "stage_idx")
def _() -> None:
    assert slapo.pipeline.get_submod_name(3) == "submod_pp_3"


@PIPE.row("PipeSequential", "*modules")
def _() -> None:
    model = slapo.pipeline.PipeSequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    pipe = slapo.pipeline.Pipe.from_tracing(model, (X,))
    assert pipe.num_stages == 3
    alike(model, pipe)


@PIPE.row("PipeSequential.from_sequential", "sequential_instance")
def _() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    same(plain, slapo.pipeline.PipeSequential.from_sequential(plain))


@PIPE.row("LossWrapper", "module, loss_fn")
def _() -> None:
    class Own(slapo.pipeline.LossWrapper):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.loss_fn(self.module(x), targets)

    layer = nn.Linear(4, 4)
    assert torch.equal(Own(layer, F.mse_loss)(X, X), F.mse_loss(layer(X), X))


@PIPE.row("TrivialLossWrapper", "module, loss_fn")
def _() -> None:
    layer = nn.Linear(4, 4)
    wrapped = slapo.pipeline.TrivialLossWrapper(layer, F.mse_loss)
    assert torch.equal(wrapped(X, X), F.mse_loss(layer(X), X))
    assert wrapped.loss_spec is True


@PIPE.row("pipe_split", "")
def _() -> None:
    model = Marked()
    assert slapo.pipeline.pipe_split() is None
    pipe = slapo.pipeline.pipeline(model, (X,))
    assert pipe.num_stages == 2
    alike(model, pipe)


@PIPE.row("DetachExecutor", "module, garbage_collect_values=True")
def _() -> None:
    pipe = by_spec(Stack())
    out = slapo.pipeline.DetachExecutor(pipe.split_gm).run(X)
    torch.testing.assert_close(out, pipe(X))


@PIPE.row("MultiUseParameterConfig")
def _() -> None:
    choices = slapo.pipeline.MultiUseParameterConfig
    assert {choices.TRANSMIT.name, choices.REPLICATE.name} == {"TRANSMIT", "REPLICATE"}
    model = Marked(shares=True)
    alike(model, slapo.pipeline.pipeline(model, (X,)))


@PIPE.row("SplitPoint")
def _() -> None:
    points = slapo.pipeline.SplitPoint
    for point, first in ((points.BEGINNING, 1), (points.END, 2)):
        model = Stack(3)
        model.layers[2].fc1 = nn.Linear(4, 8)  # no tie, which both stages would hold
        pipe = slapo.pipeline.pipeline(model, (X,), split_spec={"layers.1": point})
        held = [len(pipe.get_stage_module(stage).layers._modules) for stage in (0, 1)]
        assert held == [first, 3 - first]
        alike(model, pipe)


@PIPE.row("PipeSplitWrapper")
def _() -> None:
    assert slapo.pipeline.PipeSplitWrapper.SplitPoint is slapo.pipeline.SplitPoint


@PIPE.row("annotate_split_points", "mod, spec")
def _() -> None:
    model = Stack(3)
    reference = copy.deepcopy(model)
    slapo.pipeline.annotate_split_points(model, {"layers.1": slapo.pipeline.SplitPoint.END})
    pipe = slapo.pipeline.pipeline(model, (X,))
    assert pipe.num_stages == 2
    alike(reference, pipe)
    with pytest.raises(AttributeError, match="layers"):
        slapo.pipeline.annotate_split_points(Stack(), {"layers.7.fc1": slapo.pipeline.SplitPoint.END})


@PIPE.row("pipeline", "module, mb_args, mb_kwargs=None, split_spec=None, split_policy=None")
def _() -> None:
    model = Stack()
    pipe = slapo.pipeline.pipeline(model, (), {"x": X}, {"layers.1": slapo.pipeline.SplitPoint.BEGINNING})
    assert isinstance(pipe, slapo.pipeline.Pipe)
    alike(model, pipe, x=X)
    with pytest.raises(ValueError, match="split_spec"):
        slapo.pipeline.pipeline(model, (X,), split_spec={}, split_policy=lambda graph: graph)


@PIPE.row("Pipe")
def _() -> None:
    assert issubclass(slapo.pipeline.Pipe, nn.Module)


@PIPE.row("Pipe.forward", "self, *args, **kwargs")
def _() -> None:
    model = Stack()
    alike(model, by_spec(model).forward)


@PIPE.row("Pipe.num_stages")
def _() -> None:
    assert by_spec(Stack()).num_stages == 2


@PIPE.row("Pipe.has_loss_and_backward")
def _() -> None:
    assert by_spec(Stack()).has_loss_and_backward is False


@PIPE.row("Pipe.loss_spec")
def _() -> None:
    assert by_spec(Stack()).loss_spec is None


@PIPE.row("Pipe.split_gm")
def _() -> None:
    pipe = by_spec(Stack())
    assert isinstance(pipe.split_gm, fx.GraphModule)
    assert [name for name, _ in pipe.split_gm.named_children()] == [slapo.pipeline.get_submod_name(stage) for stage in (0, 1)]


@PIPE.row("Pipe.get_stage_module", "self, stage_idx")
def _() -> None:
    pipe = by_spec(Stack())
    assert isinstance(pipe.get_stage_module(1), nn.Module)
    with pytest.raises(ValueError, match="2"):
        pipe.get_stage_module(2)


@PIPE.row("Pipe.info", "self")
def _() -> None:
    info = by_spec(Stack()).info()
    assert (type(info).__name__, info.num_stages, info.has_loss_and_backward) == ("PipeInfo", 2, False)
    assert isinstance(info.graph, fx.Graph)


@PIPE.row("Pipe.print_readable", "self")
def _() -> None:
    by_spec(Stack()).print_readable()


@PIPE.row("Pipe.__str__", "self")
def _() -> None:
    assert "submod" in str(by_spec(Stack()))


def run_stage(rank: int) -> float:
    """torch's own schedule on two ranks."""
    torch.manual_seed(0)
    model = Stack()
    pipe = by_spec(copy.deepcopy(model))
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    batch = torch.cat([X, X])
    losses: list[torch.Tensor] = []
    schedule.step(batch) if rank == 0 else schedule.step(target=batch, losses=losses)
    expected = F.mse_loss(model(batch), batch)
    return 0.0 if rank == 0 else float((torch.stack(losses).mean() - expected).abs())


@PIPE.row("Pipe.build_stage", "self, stage_index, device, group=None")
def _() -> None:
    assert max(run_distributed(run_stage, 2)) < 1e-6


@PIPE.row("Pipe.from_tracing", "mod, example_args, example_kwargs=None, split_policy=None")
def _() -> None:
    model = Marked()
    alike(model, slapo.pipeline.Pipe.from_tracing(model, (X,)))


FUNCTIONS = """
propagate_partition add_partition_notation generate_pipeline_partition analyze_pipeline_module analyze_tie_weights
build_pipeline_model
""".split()
OF_TORCH = """
get_submod_name PipeSequential PipeSequential.from_sequential LossWrapper TrivialLossWrapper pipe_split DetachExecutor
MultiUseParameterConfig SplitPoint PipeSplitWrapper annotate_split_points pipeline Pipe
""".split()
OF_PIPE = """
forward num_stages has_loss_and_backward loss_spec split_gm get_stage_module info print_readable __str__ build_stage
from_tracing
""".split()


def test_no_name_of_the_pages_is_waived() -> None:
    assert PIPELINE.calls.keys() == {*FUNCTIONS}
    assert PIPE.calls.keys() == {*OF_TORCH, *(f"Pipe.{name}" for name in OF_PIPE)}


@each_name(PIPELINE)
def test_the_documented_arguments_are_taken(name: str) -> None:
    PIPELINE.check_arguments(name)


@each_name(PIPELINE)
def test_what_the_page_says_is_so(name: str) -> None:
    PIPELINE.show(name)


@each_name(PIPE)
def test_the_arguments_of_torchs_are_taken(name: str) -> None:
    PIPE.check_arguments(name)


@pytest.mark.multiproc
@each_name(PIPE)
def test_what_torchs_page_says_is_so(name: str) -> None:
    PIPE.show(name)
