"""Saved schedules: data that cannot run anything, code that says where it is wrong."""

from __future__ import annotations

import copy
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slapo_core import ScheduleError, TraceError, create_schedule, load_schedule, make
from slapo_core.schedules.serialization import decode, encode, to_source


def fresh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Plain(nn.Module):
    """Needs no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0


@pytest.fixture
def scheduled() -> Any:
    sch = create_schedule(fresh())
    sch["1"].replace(make(nn.Softplus, beta=2.0))
    sch["0"].annotate("weight", "groups", (1, "a", None, {"k": [1.5, torch.float16]}))
    sch.replace_all(nn.Linear, nn.Flatten)
    return sch


@pytest.mark.parametrize("suffix", [".json", ".py"])
def test_a_saved_schedule_replays_to_the_same_steps(tmp_path: Path, scheduled: Any, suffix: str) -> None:
    scheduled.undo()
    file = tmp_path / f"schedule{suffix}"
    scheduled.save(file)
    model = fresh()
    again = load_schedule(model, file)
    assert str(again.journal) == str(scheduled.journal)
    assert model[1].beta == 2.0
    assert model[0].weight.groups == (1, "a", None, {"k": [1.5, torch.float16]})
    assert list(tmp_path.iterdir()) == [file]


def test_the_journal_prints_as_python(scheduled: Any) -> None:
    assert str(scheduled.journal).splitlines() == [
        "sch['1'].replace(slapo_core.make(torch.nn.modules.activation.Softplus, beta=2.0))",
        "sch['0'].annotate('weight', 'groups', (1, 'a', None, {'k': [1.5, torch.float16]}))",
        "sch.replace_all(torch.nn.modules.linear.Linear, torch.nn.modules.flatten.Flatten)",
    ]


def test_what_cannot_be_written_is_named_and_no_file_appears(tmp_path: Path) -> None:
    sch = create_schedule(fresh())
    sch["0"].annotate("weight", "f", lambda: None)
    for name in ("s.json", "s.py"):
        with pytest.raises(ScheduleError, match=r"step 1, .*cannot write down .*<lambda>.*; define it at the top level"):
            sch.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [nn.Linear(4, 8), nn.GELU("tanh"), nn.Sequential(nn.Linear(2, 2))])
def test_a_module_whose_class_alone_would_lose_something_needs_make(module: nn.Module) -> None:
    with pytest.raises(ScheduleError, match=r"build it with slapo.make\(cls, ...\)"):
        encode(module)


@pytest.mark.parametrize("module", [Plain(), nn.GELU()])
def test_a_module_that_needs_no_arguments_is_its_class(module: nn.Module) -> None:
    assert encode(module)["$make"]["args"] == []


def test_a_changed_attribute_is_not_lost() -> None:
    module = Plain()
    module.scale = 3.0
    with pytest.raises(ScheduleError, match="build it with"):
        encode(module)


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "builtins:eval",
        "torch:load",
        "torch.nn.functional:importlib",
        "torch.nn.modules.module:torch.load",
        "torch.nn.modules.module:Module.__init__",
        "torch.nn.modules.module:Module.__subclasses__",
        "subprocess:run",
        "slapo_core.schedules.load_schedule:load_schedule",
        "torch.nnx:f",
        "torch.nn.utils.prune:torch.hub.load",
        "",
        ":",
        "torch.nn",
    ],
)
def test_data_names_nothing_that_is_not_trusted(path: str) -> None:
    with pytest.raises(ScheduleError, match="trust|import path|not a class or function"):
        decode({"$import": path})


def test_only_modules_are_made() -> None:
    with pytest.raises(ScheduleError, match="only modules can be made"):
        decode({"$make": {"class": {"$import": "torch.nn.functional:gelu"}, "args": [], "kwargs": {}}})


@pytest.mark.parametrize("name", ["a=print('!'), b", "lambda", "a b", ""])
def test_the_name_of_an_argument_is_a_name(tmp_path: Path, name: str) -> None:
    """It would run when the schedule is saved as source and loaded again."""
    recipe = {"$make": {"class": {"$import": "torch.nn:Identity"}, "args": [], "kwargs": {name: 1}}}
    with pytest.raises(ScheduleError, match="is not the name of an argument"):
        decode(recipe)
    with pytest.raises(ScheduleError, match="is not the name of an argument"):
        make(nn.Identity, **{name: 1})
    file = tmp_path / "schedule.json"
    step = {"path": "", "name": "trace_until", "args": ["0"], "kwargs": {name: 1}}
    file.write_text(json.dumps({"slapo_schedule": 1, "model": "Sequential", "steps": [step]}))
    with pytest.raises(ScheduleError, match="step 1: .* is not the name of an argument"):
        load_schedule(nn.Sequential(nn.ReLU()), file)


def test_trust_is_by_module() -> None:
    with pytest.raises(ScheduleError, match=r"pass trust=\['fractions'\]"):
        decode({"$import": "fractions:Fraction"})
    assert decode({"$import": "fractions:Fraction"}, trust=["fractions"]).__name__ == "Fraction"


def test_a_trusted_module_lends_no_trust_to_what_it_imports() -> None:
    with pytest.raises(ScheduleError, match="not a class or function of 'fractions'"):
        decode({"$import": "fractions:Decimal"}, trust=["fractions"])


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.bfloat16, torch.device("cpu")]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers())
    ),
    max_leaves=12,
)


@given(values)
def test_values_survive_the_file(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


@given(values)
def test_source_evaluates_to_the_value(value: Any) -> None:
    assert eval(to_source(encode(value)), {"torch": torch, "inf": math.inf}) == value  # noqa: S307 - our own output


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [(torch.Size([2, 3]), (2, 3)), (frozenset({1}), {1}), (Color.RED, 1), (numpy.float64(0.5), 0.5), ({"$import": 1}, None)],
)
def test_what_is_written_reads_the_same_as_data_and_as_source(value: Any, plain: Any) -> None:
    data = json.loads(json.dumps(encode(value)))
    assert decode(data) == eval(to_source(data)) == (plain or value)  # noqa: S307 - our own output


class Costly(nn.Module):
    """Its constructor cannot be tried out, and its attributes cannot be compared."""

    def __init__(self, loaded: bool = False) -> None:
        super().__init__()
        self.table = torch.ones(3)
        if not loaded:
            raise OSError("no file to load")


def test_a_module_that_cannot_be_made_again_is_shown_and_not_written() -> None:
    sch = create_schedule(fresh())
    sch["1"].replace(Costly(loaded=True))
    assert str(sch.journal) == f"sch['1'].replace(<the module {__name__}.Costly>)"
    with pytest.raises(ScheduleError, match=r"cannot write down the module .*Costly; build it with slapo.make\(cls, ...\)"):
        encode(sch["1"].mod)


def write(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.py", "def schedule(sch)\n    pass\n", r"s.py:1: expected ':'"),
        (
            "s.py",
            "def schedule(sch):\n    sch['0'].annotate('weight', 'a', 1)\n    sch['9']\n",
            r"s.py:3: no module '9'",
        ),
        ("s.py", "def schedule(sch):\n    x = 1\n    return 1 / 0\n", r"s.py:3: ZeroDivisionError: division by zero"),
        ("s.py", "x = 1\n", r"s.py: defines no function 'schedule\(sch\)'"),
        ("s.json", '{\n"a": \n', r"s.json:\d+: not JSON"),
        ("s.json", '{"steps": []}', "not a saved schedule of format 1"),
        ("s.json", '{"slapo_schedule": 1, "steps": [3]}', "step 1: not a step: 3"),
        (
            "s.json",
            '{"slapo_schedule": 1, "steps": [{"path": "0", "name": "annotate", "args": ["weight", "a", 1], "kwargs": {}},'
            '{"path": "0", "name": "annotat", "args": [], "kwargs": {}}]}',
            "step 2: no primitive 'annotat'; did you mean 'annotate'",
        ),
        (
            "s.json",
            '{"slapo_schedule": 1, "steps": [{"path": "0", "name": "annotate", '
            '"args": ["weight", "a", {"$import": "os:system"}], "kwargs": {}}]}',
            "step 1: 'os:system' is not from a trusted module",
        ),
    ],
)
def test_a_mistake_in_a_file_is_located_and_nothing_changed(tmp_path: Path, name: str, text: str, message: str) -> None:
    model = fresh()
    with pytest.raises(ScheduleError, match=message):
        load_schedule(model, write(tmp_path, name, text))
    assert not hasattr(model[0].weight, "a")


def test_a_schedule_of_another_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sch = create_schedule(fresh())
    sch["0"].annotate("weight", "a", 1)
    sch.save(tmp_path / "s.json")
    with pytest.raises(ScheduleError, match=r"s.json, saved for a Sequential and not a Linear: step 1: no module '0'"):
        load_schedule(nn.Linear(2, 2), tmp_path / "s.json")
    load_schedule(nn.ModuleList(fresh()), tmp_path / "s.json")
    assert "s.json, saved for a Sequential and not a ModuleList" in capsys.readouterr().err


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot read the schedule"):
        load_schedule(fresh(), tmp_path / "none.json")
    with pytest.raises(ScheduleError, match=r"cannot tell the format of 's.yaml'; end it in .json or .py"):
        create_schedule(fresh()).save(tmp_path / "s.yaml")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.relu(self.up(x)) * 2.0)


def relu_twice(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(x) * 2.0


@pytest.mark.parametrize("suffix", [".json", ".py"])
def test_a_replaced_subgraph_is_replayed(tmp_path: Path, suffix: str) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(2, 4)
    fresh_model = copy.deepcopy(model)
    sch = create_schedule(model, example_inputs=(x,))
    sch.trace()
    (found,) = sch.find(relu_twice)
    sch.replace(nn.SiLU(), found)
    sch.save(tmp_path / f"s{suffix}")
    again = load_schedule(fresh_model, tmp_path / f"s{suffix}", trust=[__name__], example_inputs=(x,))
    assert torch.equal(again.mod(x), sch.mod(x))
    assert not torch.equal(again.mod(x), Gated()(x))
    assert str(again.journal) == str(sch.journal)


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x.sin(), 0.5, self.training)


def dropped(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    return nn.functional.dropout(x.sin(), p, training)


@pytest.mark.parametrize(("suffix", "trust"), [(".json", [__name__]), (".json", []), (".py", [])])
def test_a_replayed_match_knows_its_pattern_where_it_may_be_imported(tmp_path: Path, suffix: str, trust: list[str]) -> None:
    """In eval mode the graph has another constant, which the pattern has as an argument."""
    x = torch.randn(2, 4)
    sch = create_schedule(Drops(), example_inputs=(x,))
    sch.trace()
    (found,) = sch.find(dropped)
    sch.replace(nn.functional.alpha_dropout, found)
    sch.save(tmp_path / f"s{suffix}")
    again = load_schedule(Drops(), tmp_path / f"s{suffix}", trust=trust, example_inputs=(x,))
    sch.mod.eval()
    again.mod.eval()
    assert torch.equal(sch.mod(x), x)
    if suffix == ".py" or trust:
        assert torch.equal(again.mod(x), x)
        assert str(again.journal) == str(sch.journal)
    else:
        with pytest.raises(TraceError, match="traced in train mode, and the rewritten graph of the Drops has no other form"):
            again.mod(x)


class Difference(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 2.0 - b


def minus_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return b - a


@pytest.mark.parametrize("suffix", [".json", ".py"])
def test_a_replayed_subgraph_keeps_the_order_of_its_inputs(tmp_path: Path, suffix: str) -> None:
    x, y = torch.rand(2, 4) + 1, torch.rand(2, 4) + 1
    sch = create_schedule(Difference(), example_inputs=(x, y))
    sch.trace()
    (found,) = sch.find(minus_first)
    sch.replace(nn.functional.linear, found)
    sch.save(tmp_path / f"s{suffix}")
    again = load_schedule(Difference(), tmp_path / f"s{suffix}", example_inputs=(x, y))
    expected = nn.functional.linear(y, x * 2.0)  # by the pattern's arguments, not by first use
    assert torch.equal(sch.mod(x, y), expected)
    assert torch.equal(again.mod(x, y), expected)


@pytest.mark.parametrize("value", [torch.special.xlogy, type("Local", (nn.Module,), {"__module__": "__main__"})])
def test_what_could_not_be_loaded_again_is_not_saved(value: Any) -> None:
    with pytest.raises(ScheduleError, match="cannot write down"):
        encode(value)


@pytest.mark.parametrize(
    "path",
    ["torch.nn.modules.module:Module.half", "torch.nn.modules.module:register_module_forward_pre_hook", "torch.nn.init:zeros_"],
)
def test_of_torch_only_modules_and_functionals_are_taken(path: str) -> None:
    with pytest.raises(ScheduleError, match="not a class or function|import path"):
        decode({"$import": path})


NEGATIVE = '{"$make": {"class": {"$import": "torch.nn.modules.linear:Linear"}, "args": [-1, 3], "kwargs": {}}}'


def replacing(value: str) -> str:
    return '{"slapo_schedule": 1, "steps": [{"path": "1", "name": "replace", "args": [VALUE], "kwargs": {}}]}'.replace(
        "VALUE", value
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.py", "import sys\ndef schedule(sch):\n    sys.exit(0)\n", r"s.py: leaves the program \(sys.exit\)"),
        ("s.py", "def schedule():\n    pass\n", r"s.py: schedule\(\) does not take one argument"),
        ("s.json", "[" * 100_000, "s.json: not a schedule"),
        ("s.json", '{"a": ' + "1" * 5000 + "}", "s.json: not a schedule"),
        ("s.json", replacing('{"$make": {}}'), "s.json: step 1: KeyError"),
        ("s.json", replacing('{"$device": "foo"}'), "s.json: step 1: RuntimeError"),
        ("s.json", replacing(NEGATIVE), "s.json: step 1: RuntimeError"),
    ],
)
def test_odd_files_are_one_sentence(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        load_schedule(fresh(), write(tmp_path, name, text))
