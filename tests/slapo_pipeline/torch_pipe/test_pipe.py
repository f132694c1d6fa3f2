"""The interface of a ``Pipe``: its stages, where it is cut, what it says, and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import pipe_split as torch_pipe_split
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import slapo
from slapo.pipeline import (
    DetachExecutor,
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeInfo,
    PipeSequential,
    PipeSplitWrapper,
    SplitPoint,
    TrivialLossWrapper,
    analyze_pipeline_module,
    annotate_split_points,
    get_submod_name,
    pipe_split,
    pipeline,
)
from slapo_core import BuildError, ScheduleError
from slapo_tracing.nodes import wrap_forward

from ..stage_comparison import assert_same, loss_of

WIDTH = 4
X = torch.randn(4, WIDTH)
END, BEGINNING = SplitPoint.END, SplitPoint.BEGINNING


class Net(nn.Module):
    """Three layers, of which the first and last have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0)) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight  # type: ignore[index, assignment]

    def forward(self, x: torch.Tensor, scale: float = 1.0, shift: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x if shift is None else x + shift


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def assert_runs_as_model(pipe: Pipe, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs and the gradients of the shared parameters are those of a copy of the model."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    found, expected = pipe(*args, **kwargs), plain(*args, **kwargs)
    assert_same(found, expected, "outputs")
    loss_of(found).sum().backward()
    loss_of(expected).sum().backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


# ---- where it is cut


@pytest.mark.parametrize("how", ["END", "BEGINNING", "annotated", "from_tracing"])
@pytest.mark.parametrize("multi_use", list(MultiUseParameterConfig))
def test_split_points(how: str, multi_use: Any) -> None:
    model = net()
    spec = {"layers.0": END, "layers.1": END} if how == "END" else {"layers.1": BEGINNING, "layers.2": BEGINNING}
    if how in ("END", "BEGINNING"):
        pipe = pipeline(model, (X,), {"shift": X}, split_spec=spec, multi_use_param_spec=multi_use)
    else:
        annotate_split_points(model, spec)
        make = Pipe.from_tracing if how == "from_tracing" else pipeline
        pipe = make(model, (X,), {"shift": X}, multi_use_param_spec=multi_use)
    assert pipe.num_stages == 3
    names = [[name for name, _ in pipe.get_stage_module(index).named_parameters()] for index in range(3)]
    kept = ["layers.2.0.weight"] if multi_use is MultiUseParameterConfig.REPLICATE else []
    assert names[:2] == [["layers.0.0.weight", "layers.0.0.bias"], ["layers.1.0.weight", "layers.1.0.bias"]]
    assert sorted(names[2]) == sorted(["layers.2.0.bias", *kept])
    replicated = [{"submod_pp_0": "layers.0.0.weight", "submod_pp_2": "layers.2.0.weight"}]
    assert pipe.replicated_params == (replicated if kept else [])
    assert_runs_as_model(pipe, model, X, shift=X)
    assert_runs_as_model(pipe, model, X[:2], 2.0, X[:2])
    assert_runs_as_model(pipe.eval(), model.eval(), X, 0.5)
    assert "forward" not in vars(model.layers[1])


def test_multi_use_by_name() -> None:
    transmit = {"layers.0.0.weight": MultiUseParameterConfig.TRANSMIT}
    pipe = pipeline(model := net(), (X,), split_spec={"layers.1": END}, multi_use_param_spec=transmit)
    assert "layers.2.0.weight" not in dict(pipe.get_stage_module(1).named_parameters())
    assert_runs_as_model(pipe, model, X)
    with pytest.raises(ValueError, match="multi_use_param_spec names 'nowhere', no parameter of the Net"):
        pipeline(net(), (X,), multi_use_param_spec={"nowhere": MultiUseParameterConfig.TRANSMIT})
    with pytest.raises(ValueError, match="multi_use_param_spec has 3; give MultiUseParameterConfig.TRANSMIT or"):
        pipeline(net(), (X,), multi_use_param_spec=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [pipe_split, torch_pipe_split])
def test_marks_and_sequences(split: Callable[[], None]) -> None:
    class Marked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.layers[0](x)
            split()
            return self.layers[2](self.layers[1](x))

    pipe = pipeline(model := Marked(), (X,), split_spec={"layers.1": END})
    assert pipe.num_stages == 3
    assert_runs_as_model(pipe, model, X)
    sequence = PipeSequential.from_sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))
    pipe = pipeline(sequence, (X,))
    assert pipe.num_stages == 3
    assert_runs_as_model(pipe, sequence, X)


@pytest.mark.parametrize("mark", [pipe_split, torch_pipe_split, torch.ops.pippy._pipe_split.default])
def test_a_policy(mark: Any) -> None:
    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        for node in traced.graph.nodes:
            if node.op == "call_module" and node.target in ("layers.0.1", "layers.1.0"):
                with traced.graph.inserting_after(node):
                    traced.graph.call_function(mark)
        traced.recompile()
        return traced

    pipe = pipeline(model := net(), (X,), {"shift": X}, split_policy=policy)
    assert pipe.num_stages == 3
    assert sorted(dict(pipe.get_stage_module(1).named_parameters())) == ["layers.1.0.bias", "layers.1.0.weight"]
    assert_runs_as_model(pipe, model, X, shift=X)
    assert_runs_as_model(pipe, model, X[:1], shift=X[:1])
    assert Pipe.from_tracing(net(), (X,), split_policy=policy).num_stages == 3


def test_a_policy_that_cannot_be_followed() -> None:
    def late(traced: fx.GraphModule) -> fx.GraphModule:
        with traced.graph.inserting_before(traced.graph.output_node()):
            traced.graph.call_function(pipe_split)
        return traced

    with pytest.raises(BuildError, match="split_policy leaves stage 1 without anything to run; take a pipe_split out"):
        pipeline(net(), (X,), split_policy=late)
    with pytest.raises(
        BuildError, match="split_policy returned a NoneType that was not traced here; put pipe_split into the graph"
    ):
        pipeline(net(), (X,), split_policy=lambda traced: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="both split_spec and split_policy are given; give one of them"):
        pipeline(net(), (X,), split_spec={"layers.0": END}, split_policy=late)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layers.7", "split point 'layers.7': the Net has no module 'layers.7'; the last part that exists is 'layers'"),
        ("layers.0.9.deep", "the Net has no module 'layers.0.9'; the last part that exists is 'layers.0'"),
        ("nowhere", "the Net has no module 'nowhere'; no part of it exists"),
    ],
)
def test_no_such_module(path: str, message: str) -> None:
    model = net()
    for call in (annotate_split_points, lambda mod, spec: pipeline(mod, (X,), split_spec=spec)):
        with pytest.raises(AttributeError, match=message):
            call(model, {"layers.1": END, path: END})
    assert pipeline(model, (X,)).num_stages == 1  # nothing was noted


def test_no_split_point() -> None:
    with pytest.raises(ValueError, match="the split point of 'layers.0' is 'end'; give SplitPoint.BEGINNING or SplitPoint.END"):
        annotate_split_points(net(), {"layers.0": "end"})  # type: ignore[dict-item]
    with pytest.raises(ScheduleError, match="nothing runs after it"):
        pipeline(net(), (X,), split_spec={"layers.2": END})
    model = net()
    wrap_forward(model.layers[1], lambda call, *args: call(*args))
    assert pipeline(model, (X,), split_spec={"layers.1": END}).num_stages == 2
    with pytest.raises(BuildError, match=r"cut at 'layers.1.0', inside 'layers.1', which was wrapped"):
        pipeline(model, (X,), split_spec={"layers.1.0": END})


def test_one_stage() -> None:
    pipe = pipeline(model := net(), (X,), {"shift": X})
    assert pipe.num_stages == 1
    assert_runs_as_model(pipe, model, X, shift=X)
    assert [*dict(pipe.get_stage_module(0).named_parameters())] == [*dict(model.named_parameters())]


# ---- what it says


def test_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline(net(), (X,), split_spec={"layers.1": END})
    assert (get_submod_name(1), pipe.get_stage_module(1)) == ("submod_pp_1", pipe.split_gm.submod_pp_1)
    info = pipe.info()
    assert isinstance(info, PipeInfo)
    assert (info.graph, info.num_stages, info.has_loss_and_backward) == (pipe.split_gm.graph, 2, False)
    assert "submod_pp_1 = self.submod_pp_1(submod_pp_0)" in str(pipe)
    assert "submod_pp_0" in repr(pipe)
    pipe.print_readable()
    assert "self.submod_pp_1(submod_pp_0)" in capsys.readouterr().out
    assert isinstance(pipe.split_gm, fx.GraphModule)
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"there is no stage {index}; the pipe has stages 0 to 1"):
            pipe.get_stage_module(index)
    with pytest.raises(BuildError, match="split_gm is a Net; make a Pipe with pipeline"):
        Pipe(net(), 1, False, None)  # type: ignore[arg-type]
    assert PipeSplitWrapper.SplitPoint is SplitPoint


class Named(nn.Module):
    """Has a loss among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": out.pow(2).mean(), "out": out}


class Wrapped(LossWrapper):
    """A loss wrapper of a user's own."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.module(x)
        return out, self.loss_fn(out, targets)

    loss_spec = (False, True)


@pytest.mark.parametrize(
    ("model", "args", "spec"),
    [
        (lambda: TrivialLossWrapper(net(), F.mse_loss), (X, X), True),
        (lambda: Wrapped(net(), F.mse_loss), (X, X), (False, True)),
        (Named, (X,), {"loss": True, "out": False}),
        (net, (X,), None),
    ],
)
def test_the_loss_of_a_pipe(model: Callable[[], nn.Module], args: tuple[Any, ...], spec: Any) -> None:
    made = model()
    path = "layers.0" if spec is None else "net.layers.0" if isinstance(spec, dict) else "module.layers.0"
    pipe = pipeline(made, args, split_spec={path: END})
    assert (pipe.loss_spec, pipe.has_loss_and_backward) == (spec, spec is not None)
    assert_runs_as_model(pipe, made, *args)


def test_detached_stages_in_one_process() -> None:
    pipe = pipeline(model := net(), (X,), {"shift": X}, split_spec={"layers.0": END, "layers.1": END})
    found = DetachExecutor(pipe.split_gm).run(X, X)
    assert_same(found, model(X, shift=X), "outputs")
    model.zero_grad()
    found.sum().backward()
    assert model.layers[1][0].bias.grad is None  # type: ignore[index]
    assert model.layers[2][0].bias.grad is not None  # type: ignore[index]


def test_rotary_embeddings_and_keywords() -> None:
    torch.manual_seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, vocab_size=32, use_cache=False, tie_word_embeddings=True, **heads
    )
    model, ids = LlamaForCausalLM(config), torch.randint(0, 32, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    for multi_use in MultiUseParameterConfig:
        split = {"model.layers.0": END, "model.layers.2": BEGINNING}
        pipe = pipeline(model, (ids, mask), {"labels": ids}, split_spec=split, multi_use_param_spec=multi_use)
        assert_runs_as_model(pipe, model, ids, labels=ids, attention_mask=mask)


# ---- stages for torch's schedules


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_stage_refuses_what_the_pipe_was_not_made_for() -> None:
    pipe = pipeline(net(), (X,), {"shift": X}, split_spec={"layers.0": END})
    first, last = (pipe.build_stage(index, torch.device("cpu")) for index in range(2))
    assert isinstance(first, PipelineStage)
    sent = first.submod(X, shift=X)
    assert_same(last.submod(*sent), net()(X, shift=X), "result")
    assert_same(last.submod(*sent, shift=X + 1), net()(X, shift=X + 1), "result")
    for call, message in [
        (lambda: first.submod(X), r"shift is None, traced as a tensor \[4, 4\] float32; make a pipe with inputs like these"),
        (lambda: first.submod(X, 2.0, X), "scale is 2.0, traced as 1.0"),
        (lambda: first.submod(X, shift=X[:1]), r"shift is a tensor \[1, 4\] float32, traced as a tensor \[4, 4\]"),
        (lambda: first.submod(X, 1.0, X, X), "4 positional arguments are given, but the forward of Net takes x, scale, shift"),
        (lambda: pipe.build_stage(1, "cpu", output=lambda out: "text"), "the last stage gives a str, but a schedule takes"),
    ]:
        with pytest.raises(BuildError, match=message):
            call()
    with pytest.raises(ValueError, match="there is no stage 2"):
        pipe.build_stage(2, "cpu")


def test_a_schedule_is_built_with_it() -> None:
    model = net()
    pipe = pipeline(model, (X,), {"shift": X}, split_spec={"layers.1": END})
    sch = slapo.create_schedule(model, example_inputs=((X,), {"shift": X}))
    program = slapo.pipeline.program_of_pipe(pipe, sch)
    assert program.original_names["layers.0.0.weight"] == ("layers.0.0.weight", "layers.2.0.weight")
    assert_same(program(X, shift=X), model(X, shift=X), "outputs")
    for other, message in [
        (pipeline(net(), (X,)), "the Pipe was made of another model; make it of the schedule's"),
        (
            pipeline(model, (X,), split_spec={"layers.1": END}, multi_use_param_spec=MultiUseParameterConfig.TRANSMIT),
            "the Pipe transmits parameters, which an engine keeps as ties",
        ),
    ]:
        with pytest.raises(BuildError, match=message):
            slapo.pipeline.program_of_pipe(other, sch)


@pytest.mark.slow
def test_importing_it_does_not_import_torch_s() -> None:
    code = "import slapo.pipeline, sys; assert 'torch.distributed.pipelining' not in sys.modules; slapo.pipeline.SplitPoint"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Early(nn.Module):
    """Gives what its layers make, in structures, as recurrent layers give their states."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.middle, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, states = self.states(x)
        middle = self.middle(hidden)
        return {"last": self.last(middle), "middle": middle, "states": states}


@pytest.mark.parametrize("paths", [["states"], ["middle"], ["states", "middle"]])
def test_results_of_early_stages(paths: list[str]) -> None:
    model, x = Early(), torch.randn(2, 3, 4)
    pipe = pipeline(model, (x,), split_spec=dict.fromkeys(paths, SplitPoint.END))
    torch.testing.assert_close(pipe(x), model(x))
    analysis = analyze_pipeline_module(pipe.program)
    assert all(len(paths) in value.used_by for value in analysis.values if value.name != "getitem")
