"""Sharding rules of other plugins, from the hook ``slapo_shard_rules``."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import PluginError, Registry, ScheduleError, build, create_schedule, hookimpl, shard_spec
from slapo_sharding import hookspecs, plugin
from slapo_sharding.rules.rulebook import rules_of
from slapo_sharding.rules.sharding_rule import Cut, ShardingRule
from slapo_testing import run_distributed
from slapo_verify.comparison import assert_equivalent


class Gated(nn.Module):
    """Another plugin's layer: two halves in one weight, its own width, keyword inputs; ``table[in, 2 * out]``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.out = out
        self.table = nn.Parameter(torch.randn(width, 2 * out) / width)
        self.shift = nn.Parameter(torch.randn(out))

    def forward(self, *, value: torch.Tensor) -> torch.Tensor:
        both = (value @ self.table).view(*value.shape[:-1], 2, self.out)
        return both[..., 0, :].sigmoid() * both[..., 1, :] + self.shift


class Back(nn.Module):
    """Another plugin's row-parallel layer."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, out) / width)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table + self.bias


GATED = ShardingRule(
    "Gated",
    lambda module: type(module) is Gated,
    (Cut({"table": 1, "shift": 0}, "replicated", "sharded", ("out",), parts={"table": 2}),),
)
BACK = ShardingRule(
    "Back",
    lambda module: type(module) is Back,
    (Cut({"table": 0}, "sharded", "partial", forward=lambda module, x: x @ module.table, late_bias=True),),
)


class Strangers:
    """The plugin."""

    @staticmethod
    @hookimpl
    def slapo_shard_rules() -> list[Any]:
        return [f"{__name__}:GATED", BACK]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated, self.back = Gated(8, 12), Back(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.gated(value=x))


def _end_to_end(rank: int, steps: str) -> tuple[int, list[int]]:
    strangers = SimpleNamespace(slapo_shard_rules=hookimpl(lambda: [GATED, BACK]))
    torch.manual_seed(0)
    model = Model()
    before = copy.deepcopy(model)
    sch = create_schedule(model, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin, strangers]))
    if steps == "plan":
        sch.tensor_parallel({"gated": "colwise", "back": "rowwise"})
    else:
        sch["gated"].shard("table", axis=1).sync("bwd_post", "all_reduce")
        sch["back"].shard("table", axis=0).sync("fwd_post", "all_reduce")
    build(sch)
    assert_equivalent(before, model, torch.randn(2, 3, 8, requires_grad=True))
    spec = shard_spec(model.gated.table)
    assert spec is not None
    assert spec.blocks == (12, 12)
    return model.gated.out, list(model.gated.shift.shape)


@pytest.mark.multiproc
@pytest.mark.parametrize("steps", ["steps", "plan"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_another_plugin_s_modules_are_split_by_its_rules(ranks, steps):
    assert run_distributed(_end_to_end, ranks, steps) == [(12 // ranks, [12 // ranks])] * ranks


def _attribute(rank: int) -> str:
    model = nn.Sequential(Gated(8, 12))
    model[0].heads = 3
    rule = dataclasses.replace(GATED, cuts=(dataclasses.replace(GATED.cuts[0], attributes=("out", "heads", "absent")),))
    sch = create_schedule(
        model,
        plugins=Registry(
            [slapo_tracing.plugin, slapo_training.plugin, plugin, SimpleNamespace(slapo_shard_rules=hookimpl(lambda: [rule]))]
        ),
    )
    with pytest.raises(ScheduleError) as caught:
        sch["0"].shard("table", axis=1)
    return str(caught.value)


@pytest.mark.multiproc
def test_attributes_that_become_local_must_be_divisible():
    message = "shard('0'): heads of the Gated is 3, not divisible by 2 ranks; use fewer ranks"
    assert run_distributed(_attribute, 2) == [message] * 2


def _registry(*rules: Any) -> Registry:
    return Registry(
        [
            slapo_tracing.plugin,
            slapo_training.plugin,
            plugin,
            SimpleNamespace(__name__="strange", slapo_shard_rules=hookimpl(lambda: list(rules))),
        ]
    )


def _sharded(*rules: Any) -> Any:
    sch = create_schedule(nn.Sequential(nn.Linear(4, 4)), plugins=_registry(*rules))
    sch["0"].shard("weight", axis=0)
    return sch


def test_another_plugin_s_rule_comes_first():
    mine = ShardingRule("mine", lambda module: True, (Cut({"weight": 1}, "sharded", "sharded"),))
    with pytest.raises(ScheduleError, match="'weight' of a mine cannot be split along 0; it can split 'weight' along 1"):
        _sharded(mine)


def test_rules_belong_to_the_schedule_s_registry():
    _sharded()
    sch = create_schedule(Model(), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin]))
    with pytest.raises(
        ScheduleError, match="is in a Gated, which no sharding rule covers; there are rules for Linear, "
    ) as raised:
        sch["gated"].shard("table", axis=1)
    kinds = str(raised.value).partition("there are rules for ")[2].split(", ")
    assert len(kinds) == len(set(kinds))


def test_hooks_are_called_once_and_when_needed():
    calls: list[int] = []

    def rules() -> list[str]:
        calls.append(1)
        return ["slapo_sharding.rules.layers:LINEAR"]

    registry = Registry(
        [slapo_tracing.plugin, slapo_training.plugin, plugin, SimpleNamespace(slapo_shard_rules=hookimpl(rules))]
    )
    assert not calls
    for _ in range(2):
        create_schedule(nn.Linear(2, 2), plugins=registry).shard("weight", axis=0)
    assert calls == [1]


CUT = Cut({"weight": 0}, "replicated", "sharded")
RULE = ShardingRule("mine", lambda module: False, (CUT,))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("no.such.module:RULE", r"sharding rule 'no.such.module:RULE' of plugin .*strange.* cannot be imported: No module"),
        (3, r"sharding rule 3 of plugin .*strange.* cannot be used: 3 is not a ShardingRule"),
        (dataclasses.replace(RULE, matches=lambda: True), r"'mine' .* matches takes \(\); it is called as \(module\)"),
        (dataclasses.replace(RULE, matches=None), r"matches is None; give a function \(module\)"),
        (dataclasses.replace(RULE, refuse=lambda module: None), r"refuse takes \(module\); it is called as \(module, cut\)"),
        (dataclasses.replace(RULE, cuts=()), r"cuts is \(\); give a tuple of Cut"),
        (dataclasses.replace(RULE, cuts=CUT), r"cuts is Cut\(.*; give a tuple of Cut"),
        *(
            (dataclasses.replace(RULE, cuts=(dataclasses.replace(CUT, **change),)), problem)
            for change, problem in [
                ({"dims": {"weight": -1}}, r"dims is {'weight': -1}; give each parameter's dimension, counted from 0"),
                ({"dims": {}}, "dims is {}"),
                ({"dims": ["weight"]}, r"dims is \['weight'\]"),
                ({"input": "whole"}, "input is 'whole'; available: 'replicated', 'sharded', 'indices'"),
                ({"output": "reduced"}, "output is 'reduced'; available: 'sharded', 'partial'"),
                ({"attributes": "width"}, "attributes is 'width'; give a tuple of names"),
                ({"forward": lambda module: 0}, r"forward takes \(module\); it is called as \(module, input\)"),
                ({"late_bias": True}, "late_bias goes with a partial output"),
                ({"parts": {"other": 2}}, r"parts is {'other': 2}; give a number of blocks for names out of \['weight'\]"),
                ({"parts": {"weight": 0}}, "parts is {'weight': 0}"),
                ({"dim": None}, "dim is None; give a dimension"),
            ]
        ),
        (dataclasses.replace(RULE, matches=lambda module: module.absent), "'mine' of plugin .*strange.* failed: Attr"),
        (dataclasses.replace(RULE, matches=lambda m: True, refuse=lambda m, c: 1 / 0), "'mine' .* failed: ZeroDivisionError"),
    ],
)
def test_a_wrong_rule_is_one_sentence_that_names_the_plugin(rule, problem):
    with pytest.raises(PluginError, match=problem) as caught:
        _sharded(rule)
    assert "strange" in caught.value.owner
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"dims": {"weight": 0, "bias": 1}}, "it splits 'bias' along 1, which has 1 dimensions"),
        ({"attributes": ("padding",)}, "its attribute 'padding' is 'same', no number that could be divided"),
    ],
)
def test_a_rule_that_does_not_fit_the_module_names_the_plugin(change, problem):
    rule = dataclasses.replace(RULE, matches=lambda module: True, cuts=(dataclasses.replace(CUT, **change),))
    sch = create_schedule(nn.Conv1d(2, 2, 1, padding="same"), plugins=_registry(rule))
    with pytest.raises(PluginError, match=f"sharding rule 'mine' of plugin .*strange.* is not for this Conv1d: {problem}"):
        sch.shard("weight", axis=0)


def test_without_this_plugin_an_optional_hook_waits():
    registry = Registry([SimpleNamespace(slapo_shard_rules=hookimpl(optionalhook=True)(lambda: [RULE]))])
    assert registry.records[-1].loaded


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (lambda: {"a": RULE}, r"slapo_shard_rules of plugin .* returned {'a': .*; return a list of rules"),
        (lambda: 1 / 0, "slapo_shard_rules of plugin .* failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_hook_that_fails_names_the_plugin(hook, problem):
    sch = create_schedule(
        nn.Linear(2, 2),
        plugins=Registry(
            [slapo_tracing.plugin, slapo_training.plugin, plugin, SimpleNamespace(slapo_shard_rules=hookimpl(hook))]
        ),
    )
    with pytest.raises(PluginError, match=problem):
        sch.shard("weight", axis=0)


def test_a_hook_with_another_signature_is_refused_with_its_plugin():
    with pytest.raises(PluginError, match="slapo_shard_rules.*module"):
        Registry(
            [
                slapo_tracing.plugin,
                slapo_training.plugin,
                plugin,
                SimpleNamespace(slapo_shard_rules=hookimpl(lambda module: [])),
            ]
        )


def test_finding_the_plugin_imports_no_rules_and_no_dtensor():
    heavy = ("slapo_sharding.rules.layers", "torch.distributed.tensor", "sympy")
    code = f"import slapo_sharding.plugin, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_hook_is_typed_documented_and_its_example_runs():
    spec = hookspecs.slapo_shard_rules
    assert inspect.get_annotations(spec).keys() == {"return"}
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(spec), {"hookimpl": hookimpl, "__name__": __name__}, "", None, None
    )
    runner = doctest.DocTestRunner()
    runner.run(test, clear_globs=False)
    assert (runner.tries > 0, runner.failures) == (True, 0)
    example = SimpleNamespace(slapo_shard_rules=test.globs["slapo_shard_rules"])
    sch = create_schedule(
        nn.Sequential(test.globs["Scale"](4)), plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, plugin, example])
    )
    assert rules_of(sch).find(sch.mod[0]) is test.globs["SCALE"]
    sch["0"].shard("weight", axis=0)
