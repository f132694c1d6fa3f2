"""Each public class and function of core is documented, and the example in its docstring runs."""

from __future__ import annotations

import doctest
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core
from slapo_core import Registry, get_cuda_rng_tracker, use_registry

NAMES = {name: getattr(slapo_core, name) for name in slapo_core.__all__}
PUBLIC = {
    **{name: value for name, value in NAMES.items() if inspect.isroutine(value) or inspect.isclass(value)},
    **{
        f"paths.{name}": value for name, value in vars(slapo_core.paths).items() if inspect.isfunction(value) and name[0] != "_"
    },
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_example_runs(name: str) -> None:
    globs = {**NAMES, "torch": torch, "nn": nn, "logging": logging, "__name__": __name__}
    test = doctest.DocTestParser().get_doctest(documentation(PUBLIC[name]), globs, name, None, None)
    assert test.examples, f"{name} has no example"
    report: list[str] = []
    with use_registry(Registry([])), torch.random.fork_rng(devices=[]):
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    get_cuda_rng_tracker().reset()
    assert not report, "".join(report)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_methods_are_documented(name: str) -> None:
    value = PUBLIC[name]
    members = vars(value).items() if inspect.isclass(value) else ()
    missing = [
        key for key, member in members if key[0] != "_" and is_method(member) and not inspect.getdoc(getattr(value, key))
    ]
    assert not missing, f"{name} has methods without docstrings: {missing}"


def documentation(value: Any) -> str:
    """Return the docstring of the object itself, not of a base class."""
    return inspect.cleandoc(value.__doc__ or "")


def is_method(member: object) -> bool:
    return inspect.isroutine(member) or isinstance(member, property)
