"""``pipeline`` as a step: places all cuts at once, and is refused where it cannot be right."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import Program, Schedule, ScheduleError, TraceError, build_program, get_logger, load_schedule
from slapo_pipeline.balance.cut_search import StageTable
from slapo_pipeline.tracing.cuts import cuts_of_steps
from slapo_tracing.nodes import wrap_forward

from ..stage_comparison import assert_same, cut, loss_of
from ..test_transformers import SIZES, T5, TEXT, _model
from ..toy_models import Skips, Stateful

X = {"input": torch.randn(4, 8)}


def mlp(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise((8, *widths))))


def table(schedule: Schedule) -> StageTable:
    found = schedule.metadata.primitives["pipeline"]
    assert isinstance(found, StageTable)
    return found


def pipelined(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Schedule, Program]:
    """The schedule, and the program, whose outputs, gradients and buffers are the unmodified model's."""
    before = copy.deepcopy(model)
    schedule = cut(model, inputs)
    assert schedule.pipeline(*args, **kwargs) is schedule
    program = build_program(schedule)
    assert len(program.stages) == len(table(schedule).stages)
    torch.manual_seed(1)
    expected = before(**inputs)
    torch.manual_seed(1)
    found = program(**inputs)
    assert_same(found, expected, "outputs")
    loss_of(expected).sum().backward()
    loss_of(found).sum().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in before.named_parameters()}, "grad")
    assert_same(dict(model.named_buffers()), dict(before.named_buffers()), "buffers")
    return schedule, program


@pytest.mark.sampled(3)
@pytest.mark.parametrize("balance", ["parameters", "flops", "memory"])
@pytest.mark.parametrize("stages", [1, 3, 5])
def test_llama(balance: str, stages: int) -> None:
    model = _model("LlamaForCausalLM", **{**SIZES, "num_hidden_layers": 4}, num_key_value_heads=1, use_cache=False)
    schedule, program = pipelined(model, TEXT, stages, balance=balance)
    assert [[boundary.shape for boundary in stage.inputs] for stage in program.stages[1:]] == [[(2, 12, 32)]] * (stages - 1)
    assert [stage.received for stage in table(schedule).stages] == [0] + [2 * 12 * 32 * 4] * (stages - 1)


def test_gpt2_with_tied_embeddings() -> None:
    sizes = {
        "vocab_size": 512,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = _model("GPT2LMHeadModel", **sizes, use_cache=False)
    schedule, program = pipelined(model, TEXT, stages=3)
    assert [stage.parameter_bytes for stage in table(schedule).stages] == [
        sum(parameter.nbytes for parameter in stage.module.parameters()) for stage in program.stages
    ]
    embedding = model.transformer.wte.weight.nbytes
    assert table(schedule).stages[-1].cost == table(schedule).stages[-1].parameter_bytes - embedding


def test_cuts_inside_encoder_and_decoder() -> None:
    model = _model("T5ForConditionalGeneration", **{**T5, "num_layers": 4}, use_cache=False)
    schedule, program = pipelined(model, TEXT, stages=3)
    assert table(schedule).cuts == ("encoder.block.2", "decoder.block.1")
    assert {".".join(path.split(".")[:3]) for path in program.stages[1].paths if ".block." in path} == {
        "encoder.block.0",  # the table of its biases, which the stage looks up itself
        "encoder.block.3",
        "decoder.block.0",
        "decoder.block.1",
    }


class Residual(nn.Module):
    """Convolutions around which the input goes."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, padding=1, stride=2), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out)
        self.down = nn.Conv2d(channels, out, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class ResNet(nn.Module):
    """A stem, lists of residual blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 16))
        self.layer2 = nn.Sequential(Residual(16, 16), Residual(16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(self.pool(torch.relu(self.bn(self.stem(x))))))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("balance", ["parameters", "flops", "memory"])
def test_a_convolutional_model(balance: str) -> None:
    schedule, _ = pipelined(ResNet(), {"x": torch.randn(2, 3, 32, 32)}, 3, balance=balance)
    assert all(path == "pool" or path.startswith("layer") for path in table(schedule).cuts)


class Residue(nn.Linear):
    """A layer that its input goes around."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


class Stage(nn.Module):
    """Holds a list of blocks, as one of four of a vision model."""

    def __init__(self, channels: int, out: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residue(channels, channels) for _ in range(depth))
        self.merge = nn.Linear(channels, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.merge(x)


class Hierarchical(nn.Module):
    """A list of stages of unlike size."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(8, 16, 2), Stage(16, 32, 2), Stage(32, 32, 6), Stage(32, 16, 2)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def test_a_block_that_is_too_large_is_taken_apart() -> None:
    schedule, _ = pipelined(Hierarchical(), {"x": torch.randn(4, 8)}, 4)
    assert any(path.startswith("stages.2.blocks.") for path in table(schedule).cuts)
    costs = [stage.cost for stage in table(schedule).stages]
    assert max(costs) < 1.4 * sum(costs) / 4


class UNet(nn.Module):
    """Each step down is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, stride=2) for a, b in [(3, 8), (8, 16), (16, 32)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in [(64, 16), (32, 8), (16, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down in self.down:
            x = torch.relu(down(x))
            skips.append(x)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([x, skips.pop()], 1))
        return x


@pytest.mark.parametrize("stages", [2, 4])
def test_skips_over_stages(stages: int) -> None:
    pipelined(UNet(), {"x": torch.randn(2, 3, 16, 16)}, stages)


class Containers(nn.Module):
    """Lists in a list and modules in a dict, none of which runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.rest = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first["b"](self.first["a"](x))
        for pair in self.rest:
            for layer in pair:
                x = layer(x)
        return x


def test_containers_that_run_nothing() -> None:
    schedule, _ = pipelined(Containers(), {"x": torch.randn(4, 8)}, 3)
    assert table(schedule).cuts == ("first.b", "rest.0.1")


WIDTHS = [(16, 64, 8, 8, 40, 4), (64, 8, 8, 8, 8, 8, 64), (8, 8, 8, 8), (4, 4, 128, 4, 4, 4)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_best_of_all_placements(widths: tuple[int, ...], stages: int) -> None:
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in mlp(*widths)]
    rows = []
    for places in itertools.combinations(range(1, len(sizes)), stages - 1):
        costs = [sum(sizes[a:b]) for a, b in itertools.pairwise((0, *places, len(sizes)))]
        sent = sum(X["input"].shape[0] * widths[place - 1] * 4 for place in places)
        rows.append((max(costs), sent, sum(cost * cost for cost in costs)))
    schedule, _ = pipelined(mlp(*widths), X, stages=stages)
    found = table(schedule).stages
    costs = [stage.cost for stage in found]
    assert (max(costs), sum(stage.received for stage in found), sum(cost * cost for cost in costs)) == min(rows)


# ---- boundaries


def test_boundaries_are_paths_and_globs() -> None:
    schedule, program = pipelined(mlp(8, 8, 8, 8, 8), X, boundaries=["3", "[01]"])
    assert table(schedule).cuts == ("0", "1", "3")
    assert [stage.paths for stage in program.stages] == [("0",), ("1",), ("2", "3"), ("4",)]


def test_boundaries_at_nested_depth() -> None:
    model = _model("LlamaForCausalLM", **SIZES, num_key_value_heads=1, use_cache=False)
    schedule, program = pipelined(model, TEXT, boundaries=["model.layers.1.self_attn", "model.layers.0"], balance="memory")
    assert table(schedule).cuts == ("model.layers.0", "model.layers.1.self_attn")
    assert [len(stage.inputs) for stage in program.stages] == [0, 1, 2]


def test_a_policy_is_asked_for_each_module() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    schedule, _ = pipelined(model, X, boundaries=lambda path, module: isinstance(module, nn.ReLU))
    assert table(schedule).cuts == ("0.1", "1.1")


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (["50"], r"boundaries has '50', which matches no module; did you mean '0'\?"),
        (["x.*"], r"boundaries has 'x.\*', which matches no module; give paths"),
        (["1", "1"], "boundaries names '1' twice, as '1'; name it once"),
        (["1", "[12]"], r"boundaries names '1' twice, by '1' and '\[12\]'"),
        ([1, 2], "boundaries has 1, which is another module in each model; give paths or globs"),
        ("1", "boundaries is '1'; give a list of paths or globs"),
        (3, "boundaries is 3; give a list"),
        (["3"], "nothing runs after it"),
        ([""], "nothing comes after the whole model"),
        (lambda path, module: False, "boundaries accepts no module"),
    ],
)
def test_boundaries_that_are_none(boundaries: Any, message: str) -> None:
    model = mlp(8, 8, 8, 8)
    schedule = cut(model, X)
    with pytest.raises(ScheduleError, match=message):
        schedule.pipeline(boundaries=boundaries)
    assert not len(schedule.journal)
    assert "pipeline" not in schedule.metadata.primitives


def test_a_boundary_that_does_not_run() -> None:
    model = Skips()
    model.spare = nn.Linear(2, 2)
    inputs = {"x": torch.randn(4, 8), "labels": torch.randn(4, 1)}
    with pytest.raises(ScheduleError, match=r"cut_pipeline_stage\('spare'\): the model does not run this module"):
        cut(model, inputs).pipeline(boundaries=["spare"])


# ---- a step like any other


def test_it_takes_cuts_as_steps_and_is_undone() -> None:
    schedule = cut(mlp(8, 8, 8, 8), X).pipeline(2)
    assert str(schedule.journal).splitlines() == ["sch.pipeline(2)", "#   sch['1'].cut_pipeline_stage()"]
    assert cuts_of_steps(schedule.journal) == ["1"]
    schedule.undo()
    assert cuts_of_steps(schedule.journal) == []
    assert "pipeline" not in schedule.metadata.primitives
    assert "cut_pipeline_stage" not in schedule["1"].metadata.primitives
    assert len(build_program(schedule.pipeline(4)).stages) == 4


@pytest.mark.parametrize("suffix", [".json", ".py"])
def test_saved_and_taken_again(tmp_path: Path, suffix: str) -> None:
    first = cut(mlp(8, 8, 8, 8), X).pipeline(stages=3, balance="flops", microbatches=2)
    first.save(tmp_path / f"schedule{suffix}")
    second = load_schedule(mlp(8, 8, 8, 8), tmp_path / f"schedule{suffix}", example_inputs=X, plugins=first.registry)
    assert cuts_of_steps(second.journal) == cuts_of_steps(first.journal)
    assert table(second) == table(first)


def test_the_stages_are_a_table_to_read() -> None:
    schedule = cut(mlp(16, 64, 4), X).pipeline(2, balance="flops")
    assert str(table(schedule)).splitlines() == [
        "stage  from  to  parameters  their size  forward FLOPs  receives",
        "    0  0     1       1.23 k     4.93 kB         9.22 k       0 B",
        "    1  2     2         260      1.04 kB         2.05 k   1.02 kB",
    ]


class Asks(nn.Module):
    """Looks at values between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x * 2 if bool((x > 0).any()) else x)


def test_what_cannot_be_taken_apart_stays_whole() -> None:
    schedule, _ = pipelined(nn.Sequential(nn.Linear(8, 8), Asks(), nn.Linear(8, 8)), X, 2)
    assert table(schedule).cuts == ("1",)
    refused(nn.Sequential(nn.Linear(8, 8), Asks(), nn.Linear(8, 8)), X, "4 stages need 3 cuts, but .* end at 2 places", 4)


def test_positional_example_inputs() -> None:
    x = torch.randn(4, 8)
    program = build_program(cut(mlp(8, 8, 8), (x,)).pipeline(3))
    assert len(program.stages) == 3


# ---- what is refused


def refused(model: nn.Module, inputs: Any, message: str, *args: Any, **kwargs: Any) -> None:
    schedule = cut(model, inputs)
    with pytest.raises(ScheduleError, match=message):
        schedule.pipeline(*args, **kwargs)
    assert not len(schedule.journal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "stages is 0; give how many there are to be, at least 1"),
        ({"stages": True}, "stages is True"),
        ({"stages": 2.0}, "stages is 2.0"),
        ({"stages": 5}, "5 stages need 4 cuts, but the model's blocks end at 3 places where a stage can end; take fewer"),
        ({}, "give stages= or boundaries=, or create_schedule a mesh with an axis 'pp'"),
        ({"stages": 2, "boundaries": ["1"]}, "both stages and boundaries are given"),
        (
            {"stages": 2, "balance": "flop"},
            "balance is 'flop'; did you mean 'flops'.*available: 'parameters', 'flops', 'memory'",
        ),
        ({"stages": 2, "microbatches": 0}, "microbatches is 0; give how many a batch is cut into"),
        ({"parts": 2}, "it takes"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], message: str) -> None:
    refused(mlp(8, 8, 8, 8), X, message, **arguments)


def test_no_example_inputs() -> None:
    refused(mlp(8, 8), None, "a model is cut by tracing it; give create_schedule example_inputs=", 2)


def test_not_the_whole_model() -> None:
    model = nn.Sequential(mlp(8, 8), nn.Linear(8, 8))
    schedule = cut(model, X)
    with pytest.raises(
        ScheduleError, match=r"pipeline\('0'\): stages are parts of the whole model; call it on the top schedule"
    ):
        schedule["0"].pipeline(2)


def test_cut_already() -> None:
    schedule = cut(mlp(8, 8, 8), X, "0")
    with pytest.raises(
        ScheduleError, match="the model is cut already, at '0'; undo that, or make all cuts with cut_pipeline_stage"
    ):
        schedule.pipeline(2)
    schedule.undo()
    schedule.pipeline(2)
    with pytest.raises(ScheduleError, match="the model is cut already, at '[01]'"):
        schedule.pipeline(2)


def test_a_wrapped_model() -> None:
    model = mlp(8, 8)
    wrap_forward(model, lambda call, *args: call(*args))
    refused(model, X, "the whole model is wrapped and runs as one piece; call pipeline before", 2)


def test_nothing_inside_a_wrapped_module_is_a_place() -> None:
    model = nn.Sequential(mlp(8, 8, 8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    wrap_forward(model[0], lambda call, *args: call(*args))
    schedule = cut(model, X).pipeline(2)
    assert table(schedule).cuts == ("0",)
    refused(model, X, "4 stages need 3 cuts, but the model's blocks end at 2 places", 4)
    refused(model, X, "it lies inside '0', which is wrapped", boundaries=["0.1"])


def test_what_the_partitioner_says() -> None:
    with pytest.raises(TraceError, match=r"a Cache is used by stages 0 and 1, but only tensors can cross"):
        cut(Stateful(), {"x": torch.randn(2, 8)}).pipeline(2)


class NormedTwiceAtFirst(nn.Module):
    """Its largest layer is between two calls of one BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.norm(self.b(self.norm(self.a(x))))))


def test_a_place_that_the_partitioner_refuses_is_not_taken() -> None:
    inputs = {"x": torch.randn(4, 8)}
    schedule, _ = pipelined(NormedTwiceAtFirst(), inputs, 4)
    assert table(schedule).cuts == ("a", "norm", "c")
    refused = r"'norm.\w+' is changed in stages 0 and 1 and used in stages 0 and 1"
    with pytest.raises(TraceError, match=refused):
        cut(NormedTwiceAtFirst(), inputs).pipeline(5)
    with pytest.raises(TraceError, match=refused):
        cut(NormedTwiceAtFirst(), inputs).pipeline(boundaries=["b"])


def test_what_refused_places_cost_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = _model("LlamaForCausalLM", **SIZES, num_key_value_heads=1)
    monkeypatch.setattr(get_logger(), "propagate", True)
    schedule = cut(model, TEXT).pipeline(2)
    assert table(schedule).cuts == ("model.embed_tokens",)
    said = r"the largest stage costs 45% more than it could.* after 'model.layers.1'.*a DynamicCache is used .*use_cache=False"
    assert any(re.search(said, record.getMessage()) for record in caplog.records if record.levelname == "WARNING")
    with pytest.raises(TraceError, match=r"a DynamicCache is used by stages 0 and 1.*use_cache=False"):
        cut(model, TEXT).pipeline(5)
