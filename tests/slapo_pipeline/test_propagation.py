"""The classic functions: cuts are propagated, the stages are children, and an engine is built of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import slapo
from slapo_core import BuildError, Schedule, ScheduleError, build, build_program, load_schedule
from slapo_pipeline.analysis import analyze_pipeline_module
from slapo_pipeline.partition import PartitionedModule, analyze_tie_weights
from slapo_pipeline.propagation import (
    add_partition_notation,
    build_pipeline_model,
    generate_pipeline_partition,
    propagate_partition,
)

from .stage_comparison import assert_same, cut, loss_of

WIDTH = 4
X = torch.randn(2, WIDTH)


class Block(nn.Module):
    """Two layers and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Coder(nn.Module):
    """Blocks and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.block:
            x = block(x)
        x = self.norm(x)
        return x if memory is None else x * memory


class Pair(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Coder(), Coder(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(y, memory=self.encoder(x)))


def pair(*paths: str) -> Schedule:
    torch.manual_seed(1)
    return cut(Pair(), (X, X + 1), *paths)


def assert_runs_as(top: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Outputs and the gradients of the shared parameters are those of a copy of the model."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    found, expected = top(*args, **kwargs), plain(*args, **kwargs)
    assert_same(found, expected, "outputs")
    loss_of(found).sum().backward()
    loss_of(expected).sum().backward()
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name)


# ---- generate_pipeline_partition


def test_the_children_are_the_stages() -> None:
    schedule = pair("encoder.block.2", "encoder", "decoder.block.2")
    staged = generate_pipeline_partition(schedule["head"])
    assert isinstance(staged, Schedule)
    assert list(staged.child) == [name for name, _ in staged.mod.named_children()] == [f"submod_{i}" for i in range(4)]
    assert [*dict(staged.mod.get_submodule("submod_1").named_parameters())] == ["encoder.norm.weight", "encoder.norm.bias"]
    assert staged.program is not None
    assert len(staged.program.stages) == 4
    assert isinstance(staged.mod, fx.GraphModule)
    assert_runs_as(staged.mod, schedule.mod, X, X + 1)
    assert_runs_as(staged.mod, schedule.mod, torch.randn(5, WIDTH), y=torch.randn(5, WIDTH))
    assert generate_pipeline_partition(staged).mod is staged.mod


def test_the_numbers_of_the_stages_are_noted() -> None:
    schedule = pair("encoder", "decoder.block.0")
    assert schedule["encoder"].partition_idx is None
    staged = generate_pipeline_partition(schedule)
    assert [stage.partition_idx for stage in staged.child.values()] == [0, 1, 2]
    assert staged["submod_1.decoder.block.0.up"].partition_idx == 1
    assert (schedule["encoder.norm"].partition_idx, schedule["head"].partition_idx) == (0, 2)
    add_partition_notation(schedule["encoder"], 7)
    assert schedule["encoder.block.1.up"].partition_idx == staged["submod_0.encoder.block.1"].partition_idx == 7


def test_the_schedule_it_came_from_goes_on(tmp_path: Any) -> None:
    schedule = pair("encoder")
    before = str(schedule.mod)
    staged = generate_pipeline_partition(schedule)
    assert (str(schedule.mod), staged.original_names["submod_0.encoder.norm.weight"]) == (before, ("encoder.norm.weight",))
    assert staged.metadata.primitives["cut_pipeline_stage"] == ["encoder"]
    staged.save(tmp_path / "cuts.json")
    assert len(build_program(load_schedule(Pair(), tmp_path / "cuts.json", example_inputs=(X, X))).stages) == 2
    schedule["decoder.block.1"].cut_pipeline_stage()
    assert len(generate_pipeline_partition(schedule).child) == 3
    schedule.undo()
    schedule.undo()
    assert list(generate_pipeline_partition(schedule).child) == ["submod_0"]
    assert_runs_as(generate_pipeline_partition(schedule).mod, schedule.mod, X, X + 1)


def test_a_copy_has_weights_of_its_own() -> None:
    schedule = pair("encoder", "decoder.block.0")
    top = generate_pipeline_partition(schedule).mod
    copied = copy.deepcopy(top)
    assert_same(copied(X, X), schedule.mod(X, X), "outputs")
    with torch.no_grad():
        copied.get_parameter("submod_2.head.bias").add_(1)
    assert_same(copied(X, X), schedule.mod(X, X) + 1, "outputs")


def test_a_partitioned_schedule_is_built() -> None:
    schedule = pair("encoder")
    staged = generate_pipeline_partition(schedule)
    assert build_program(staged) is staged.program
    staged["submod_1"].replace(nn.Identity())
    with pytest.raises(
        BuildError, match=r"replace\(.*\) was taken on a whole stage; take it before generate_pipeline_partition"
    ):
        build_program(staged)
    staged.undo()
    module, _ = build(staged)
    assert module is schedule.mod


class Drops(nn.Module):
    """Does other things in training, in its own forward and in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.a(x))
        return self.b(F.dropout(x, 0.5, self.training)) * (2 if self.training else 1)


def test_the_mode_is_that_of_the_model() -> None:
    schedule = cut(Drops(), X, "a")
    top, model = generate_pipeline_partition(schedule).mod, schedule.mod
    plain = copy.deepcopy(model)
    for switched, mode in [(top, False), (top, True), (model, False), (top, True), (top, False), (model, True)]:
        switched.train(mode)
        plain.train(mode)
        torch.manual_seed(3)
        found = top(X)
        torch.manual_seed(3)
        assert_same(found, plain(X), f"mode {mode}")
        assert top.training is switched.training or switched is model


def test_a_partitioned_schedule_is_verified() -> None:
    schedule = pair("encoder", "decoder.block.0")
    plain = copy.deepcopy(schedule.mod)
    assert slapo.verify(plain, generate_pipeline_partition(schedule))


def test_structured_results_and_several_of_them() -> None:
    config = GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    torch.manual_seed(1)
    model, ids = GPT2LMHeadModel(config).eval(), torch.randint(0, 32, (2, 8))
    schedule = cut(model, {"input_ids": ids, "labels": ids}, "transformer.h.0", "transformer.h.1")
    staged = generate_pipeline_partition(schedule)
    assert_runs_as(staged.mod, model, input_ids=ids, labels=ids)
    assert analyze_tie_weights(staged.mod, True) == {
        model.lm_head.weight: {("transformer.wte.weight", 0), ("lm_head.weight", 2)}
    }


# ---- propagate_partition


def test_cuts_of_both_sides_make_four_stages() -> None:
    schedule = pair("encoder.block.2", "encoder", "decoder.block.2")
    module, following = propagate_partition(schedule)
    assert (following, [name for name, _ in module.named_children()]) == (4, [f"submod_{i}" for i in range(4)])
    assert_runs_as(module, schedule.mod, X, X + 1)


def test_without_a_cut_at_the_call_the_tail_and_the_head_share_a_stage() -> None:
    schedule = pair("encoder.block.2", "decoder.block.2")
    module, following = propagate_partition(schedule)
    assert following == 3
    middle = dict(module.submod_1.named_parameters())
    assert {"encoder.norm.weight", "decoder.block.0.up.weight"} <= middle.keys()
    assert_runs_as(module, schedule.mod, X, X + 1)


def test_one_side_is_propagated_to_the_top() -> None:
    schedule = pair("encoder.block.0", "encoder", "decoder.block.2")
    module, following = propagate_partition(schedule["encoder"], 3)
    assert (following, [name for name, _ in module.named_children()]) == (6, ["submod_3", "submod_4", "submod_5"])
    assert "decoder.block.2.up.weight" in dict(module.submod_5.named_parameters())
    assert (schedule["encoder.block.1"].partition_idx, schedule["head"].partition_idx) == (4, 5)
    assert_runs_as(module, schedule.mod, X, X + 1)


@pytest.mark.parametrize(
    ("stop_at", "names"), [("decoder", ["submod_5", "submod_6", "submod_7"]), ("2", ["submod_5", "submod_6"])]
)
def test_it_stops_where_it_is_told(stop_at: str, names: list[str]) -> None:
    schedule = pair("decoder.block.2.up", "decoder.block.0", "encoder")
    module, following = propagate_partition(schedule["decoder.block.2"], 5, stop_at)
    assert (following, [name for name, _ in module.named_children()]) == (5 + len(names), names)
    if stop_at == "decoder":  # its own graph has a mark too
        assert_runs_as(module, schedule["decoder"].mod, X, memory=X)
    else:
        assert_runs_as(module, schedule["decoder.block.2"].mod, X)


def test_nothing_to_stop_at() -> None:
    with pytest.raises(ScheduleError, match="no schedule around 'decoder' is named 'nowhere'"):
        propagate_partition(pair()["decoder"], stop_at="nowhere")


def test_a_traced_module_is_split() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 3)
    )
    schedule = cut(model, X)
    schedule["2"].trace()
    schedule["2.0"].cut_pipeline_stage()
    module, following = propagate_partition(schedule["2"])
    assert following == 2
    assert_runs_as(module, model, X)


def test_no_cut_is_one_part() -> None:
    schedule = pair()
    module, following = propagate_partition(schedule["encoder"], 2, "encoder")
    assert (following, [name for name, _ in module.named_children()]) == (3, ["submod_2"])
    assert_runs_as(module, schedule["encoder"].mod, X)


def test_what_cannot_be_propagated() -> None:
    with pytest.raises(BuildError, match="cannot partition a Linear; give what create_schedule returned"):
        propagate_partition(nn.Linear(2, 2))  # type: ignore[arg-type]
    staged = generate_pipeline_partition(pair("encoder"))
    with pytest.raises(ScheduleError, match="it is partitioned already; give the schedule that it came from"):
        propagate_partition(staged)


# ---- analyze_pipeline_module


class Skips(nn.Module):
    """A value skips a stage, another one comes out of a tuple, and labels are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skipped = torch.relu(self.a(x))
        y = self.b(x)
        return self.d(self.c(y)) + skipped - labels


def test_names_of_arguments_and_what_is_alive() -> None:
    schedule = cut(Skips(), {"x": X, "labels": X}, "b", "c")
    top = generate_pipeline_partition(schedule).mod
    arguments, names, liveness = analyze_pipeline_module(top)
    assert names == {0: "submod_0", 1: "submod_1", 2: "submod_2"}
    skipped, y = ("submod_0.0", "submod_0.1") if arguments[1] == ["submod_0.1"] else ("submod_0.1", "submod_0.0")
    assert arguments == {0: ["x"], 1: [y], 2: [skipped, "submod_1", "labels"]}
    assert {stage: set(alive) for stage, alive in liveness.items()} == {
        0: {"x", "labels"},
        1: {"labels", skipped, y},
        2: {"labels", skipped, "submod_1"},
    }
    assert tuple(analyze_pipeline_module(schedule)) == (arguments, names, liveness)
    assert tuple(analyze_pipeline_module(build_program(schedule))) == (arguments, names, liveness)
    assert_runs_as(top, schedule.mod, x=X, labels=X)


def test_the_stages_run_by_what_the_analysis_says() -> None:
    schedule = cut(Skips(), {"x": X, "labels": X}, "a", "b", "c")
    top = generate_pipeline_partition(schedule).mod
    arguments, names, _ = analyze_pipeline_module(top)
    known: dict[str, Any] = {"x": X, "labels": X}
    result: Any = None
    for stage, name in names.items():
        given = [known[each] for each in arguments[stage] if each not in ("x", "labels")]
        batch = {each: known[each] for each in arguments[stage] if each in ("x", "labels")}
        result = top.get_submodule(name)(*given, **batch)
        known |= {name: result} if not isinstance(result, tuple) else {f"{name}.{i}": each for i, each in enumerate(result)}
    assert_same(result, schedule.mod(X, X), "result")


def test_a_module_that_torch_has_split() -> None:
    class Tuples(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = torch.split(x, 2, dim=1)
            c = torch.relu(a)
            return c + y, b * 2

    traced = fx.symbolic_trace(Tuples())
    stages = {"split": 0, "getitem": 0, "getitem_1": 0, "relu": 1, "add": 2, "mul": 2}
    split = split_module(traced, traced, lambda node: stages[node.name])  # type: ignore[arg-type]
    found = analyze_pipeline_module(split)
    assert found.stage_id_2_name == {0: "submod_0", 1: "submod_1", 2: "submod_2"}
    assert found.stage_id_2_arg_names == {0: ["x"], 1: ["submod_0.0"], 2: ["submod_1", "y", "submod_0.1"]}
    assert found.liveness == {0: ["x", "y"], 1: ["y", "submod_0.0", "submod_0.1"], 2: ["y", "submod_0.1", "submod_1"]}


def test_ties_of_stages_alone() -> None:
    shared = nn.Linear(2, 2)
    inside = nn.Module()
    inside.a, inside.b = nn.Linear(2, 2), nn.Linear(2, 2)
    inside.b.weight = inside.a.weight
    inside.shared = shared
    other = nn.Module()
    other.again = shared
    top = nn.ModuleDict({"submod_0": inside, "submod_1": other})
    assert analyze_tie_weights(top, True) == {
        shared.weight: {("shared.weight", 0), ("again.weight", 1)},
        shared.bias: {("shared.bias", 0), ("again.bias", 1)},
    }
    assert inside.a.weight in analyze_tie_weights(top, False)


def test_t5_as_the_pages_cut_it() -> None:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=32, decoder_start_token_id=0, use_cache=False
    )
    torch.manual_seed(1)
    model, ids = T5ForConditionalGeneration(config).eval(), torch.randint(1, 32, (2, 6))
    inputs = {"input_ids": ids, "labels": ids}
    schedule = cut(model, inputs, "encoder.block.1", "encoder", "decoder.block.1")
    staged = generate_pipeline_partition(schedule)
    assert len(staged.child) == 4
    assert_runs_as(staged.mod, model, **inputs)
    ((_, places),) = [(p, each) for p, each in analyze_tie_weights(staged.mod, True).items() if p is model.shared.weight]
    assert {stage for _, stage in places} >= {0, 3}


# ---- the top schedule knows the cuts


def test_cuts_are_noted_at_the_top() -> None:
    schedule = pair("decoder.block.0", "encoder")
    known = schedule.metadata.primitives
    assert known["cut_pipeline_stage"] == ["decoder.block.0", "encoder"]
    schedule["encoder.block.0"].cut_pipeline_stage(where="before")
    assert [*known["cut_pipeline_stage"]] == ["decoder.block.0", "encoder", "encoder.block.0"]
    with pytest.raises(ScheduleError):
        schedule["encoder"].cut_pipeline_stage()
    assert len(known["cut_pipeline_stage"]) == 3
    for left in (["decoder.block.0", "encoder"], ["decoder.block.0"]):
        schedule.undo()
        assert schedule.metadata.primitives["cut_pipeline_stage"] == left
    schedule.undo()
    assert "cut_pipeline_stage" not in schedule.metadata.primitives
    schedule.pipeline(2)
    assert len(schedule.metadata.primitives["cut_pipeline_stage"]) == 1
    copied = copy.deepcopy(schedule)
    assert copied.metadata.primitives["cut_pipeline_stage"] == schedule.metadata.primitives["cut_pipeline_stage"]
    schedule.undo()
    assert "cut_pipeline_stage" not in schedule.metadata.primitives


def test_an_engine_that_is_not_there() -> None:
    with pytest.raises(BuildError, match="cannot build a Linear"):
        build_pipeline_model(nn.Linear(2, 2))  # type: ignore[arg-type]
    assert isinstance(generate_pipeline_partition(pair("encoder")).mod, PartitionedModule)
