"""The conformance kit: what an author gives by mistake is said in one sentence, where it is given."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing.conformance import (
    ConformanceError,
    EngineExample,
    Example,
    Refused,
    RefusedOption,
    check_dialect,
    check_primitive,
    dialect_checks,
    primitive_checks,
)


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Silent(Model):
    def forward(self, x: torch.Tensor) -> None:
        super().forward(x)


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(2, 4)}


EXAMPLE = Example(Model, (torch.ones(2, 4),))
ENGINE = EngineExample(Model, batch)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"changes": ["weights"]}, "no change 'weights'; available: values, names"),
        ({"changes": "values"}, "changes of the Example is 'values'; give a list of words"),
        ({"changes": None}, "changes of the Example is None; give a list of words"),
        ({"numerics": "near"}, "numerics is 'near'; available: equal"),
        ({"numerics": "none"}, "say why with because="),
        ({"tries": True}, "say why with because="),
        ({"ranks": 2, "before": lambda sch: None}, "before is a lambda or a function inside of one; write it at module level"),
        ({"ranks": 0}, "ranks of the Example is 0; give a number of processes, 1 or more"),
        ({"ranks": "2"}, "ranks of the Example is '2'; give a number"),
        ({"plugins": "mine"}, "plugins of the Example is 'mine'; give a list of names of modules"),
        ({"trust": "mine"}, "trust of the Example is 'mine'; give a list of names of modules"),
        ({"model": Model()}, "model of the Example is one Model; give a function that makes one each time"),
        ({"inputs": torch.ones(2, 4)}, r"inputs of the Example is one Tensor of shape \(2, 4\); give a tuple"),
        ({"args": 3}, "args of the Example is 3; give a tuple, or a function of the schedule"),
        ({"args": "weight"}, "args of the Example is 'weight'; give a tuple"),
        ({"kwargs": [1]}, r"kwargs of the Example is \[1\]; give a dict"),
        ({"path": None}, "path of the Example is None; give a string"),
        ({"before": 3}, "before of the Example is 3; give a function"),
        ({"atol": math.inf}, "atol of the Example is inf; give a finite number from 0 on"),
        ({"rtol": -1}, "rtol of the Example is -1; give a finite number from 0 on"),
        ({"refused": Refused("no")}, "refused of the Example is one Refused; give a list of Refused"),
    ],
)
def test_a_wrong_example_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(EXAMPLE, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model": Model()}, "model of the EngineExample is one Model; give a function"),
        ({"plugins": "mine"}, "plugins of the EngineExample is 'mine'; give a list"),
        ({"atol": math.nan}, "atol of the EngineExample is nan; give a finite number"),
        ({"refused": [("clip", {})]}, "refused of the EngineExample is .*; give a list of RefusedOption"),
    ],
)
def test_a_wrong_example_of_a_dialect_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(ENGINE, **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: check_primitive("trace", EXAMPLE),
            "examples of the primitive 'trace' are one Example; give a list of Example",
        ),
        (lambda: check_primitive("trace", None), "examples of the primitive 'trace' are None; give a list"),
        (lambda: check_primitive("trace", [ENGINE]), "an example of the primitive 'trace' is one EngineExample; give Example"),
        (lambda: check_dialect("torch", [EXAMPLE]), "an example of the dialect 'torch' is one Example; give EngineExample"),
        (lambda: check_primitive(None, [EXAMPLE]), "None is not the name of a primitive; give the string"),
        (lambda: check_dialect(Model, [ENGINE]), "Model'> is not the name of a dialect; give the string"),
        (lambda: Refused("no", 3), "args of the Refused is 3; give a tuple"),
        (lambda: Refused(None), "match of the Refused is None; give a regular expression"),
        (lambda: RefusedOption("no", 3), "options of the RefusedOption is 3; give a dict"),
    ],
)
def test_a_wrong_call_of_the_kit_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_of_an_unknown_name_one_check_tells() -> None:
    for checks in (primitive_checks("tracee", [EXAMPLE]), dialect_checks("troch", [ENGINE])):
        (check,) = checks
        with pytest.raises(ConformanceError, match="registered: no (primitive 'tracee'|dialect 'troch'|target 'troch')"):
            check()


@pytest.mark.parametrize(
    ("options", "check", "sentence"),
    [
        ({"model": lambda: 3}, "undo", "the example's model gives 3, which is not an nn.Module"),
        ({"model": Silent}, "numerics", "no output of the model has floating-point numbers, so nothing is compared"),
    ],
)
def test_a_model_that_is_none_or_gives_nothing_is_told(options: dict[str, Any], check: str, sentence: str) -> None:
    (found,) = [each for each in primitive_checks("trace", [replace(EXAMPLE, **options)]) if each.name == check]
    with pytest.raises(ConformanceError, match=sentence):
        found()
