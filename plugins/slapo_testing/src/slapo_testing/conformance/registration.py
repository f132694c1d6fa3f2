"""Checks of the registration: a name is registered, documented, and imported at its first use."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from slapo_core import Dialect, Entry, Registry, SlapoError, call_signature

from .examples.case import ConformanceError
from .examples.examples import EngineExample, Example

_LOADED = """
import json, sys
import slapo_core.schedules.schedule
before = set(sys.modules)
slapo_core.default_registry()
known = {name.partition(".")[0] for name in before}
new = set(sys.modules) - before
print(json.dumps(sorted(new | {top for name in new if (top := name.partition(".")[0]) not in known})))
"""
_SIGNATURES = re.compile(r"^\s*\*{0,2}(\w+)(?: \(.*\))?:", re.MULTILINE)


def check_registered(registry: Registry, kind: str, name: str) -> None:
    """Check that one plugin registers the name, and that its class can be loaded."""
    try:
        registry.get(kind, name)
    except SlapoError as error:
        raise ConformanceError(str(error)) from error


def check_lazy_import(registry: Registry, kind: str, name: str) -> None:
    """Check that loading the plugins does not import the module of the name."""
    entry = _entry(registry, kind, name)
    if entry.record is None:
        return  # defined in this process
    target = entry.target
    if not isinstance(target, str):
        raise ConformanceError(f"the plugin registers the class {target.__name__}; give its import path, 'module:Class'")
    module = target.partition(":")[0]
    if entry.record.entry_point is None:
        return  # given to the registry, not installed
    loaded = imported_by_loading()
    if module in loaded:
        raise ConformanceError(f"loading the plugins imports {module}, which should be imported when {name!r} is first used")
    if heavy := sorted(_dependency_packages(entry.record.distribution) & loaded):
        raise ConformanceError(f"loading the plugins imports {heavy[0]}, which should be imported when {name!r} is first used")


def _dependency_packages(distribution: str) -> set[str]:
    """Return the top-level packages of a distribution's dependencies in other projects, extras included."""
    wanted = {name for name in _requirements(distribution) if name != "slapo-core" and "slapo-core" not in _requirements(name)}
    found = importlib.metadata.packages_distributions().items()
    return {package for package, owners in found if wanted & {_normalized_name(owner) for owner in owners}}


def _requirements(distribution: str) -> set[str]:
    try:
        return {_normalized_name(re.split(r"[^\w.-]", line)[0]) for line in importlib.metadata.requires(distribution) or ()}
    except importlib.metadata.PackageNotFoundError:  # an extra that is not installed
        return set()


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@lru_cache(maxsize=1)
def imported_by_loading() -> frozenset[str]:
    """Return the modules that loading the installed plugins imports in a new process, besides core's."""
    ran = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, timeout=300)
    if ran.returncode:
        raise ConformanceError(f"the plugins cannot be loaded in a fresh process: {ran.stderr.strip()[-300:]}")
    return frozenset(json.loads(ran.stdout.splitlines()[-1]))


def _entry(registry: Registry, kind: str, name: str) -> Entry:
    return next(entry for entry in registry.entries(kind) if entry.name == name)


def check_documented(registry: Registry, kind: str, name: str) -> None:
    """Check that the class has its own docstring with all parameters under ``Args``; for a dialect, its capabilities."""
    cls = registry.get(kind, name)
    doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    if not doc:
        raise ConformanceError(f"{cls.__name__} has no docstring of its own")
    first = " ".join(doc.partition("\n\n")[0].split())
    if not first.endswith((".", ":")):
        raise ConformanceError(f"the docstring of {cls.__name__} does not begin with a sentence: {first!r}")
    if issubclass(cls, Dialect):
        _check_capabilities(cls)
        return
    taken = list(call_signature(cls).parameters)[1:]
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    said = _SIGNATURES.findall(_least_indented(section.group(1))) if section else []
    if missing := [each for each in taken if each not in said]:
        raise ConformanceError(f"the docstring of {cls.__name__} does not say under Args what {missing[0]!r} is")
    if extra := [each for each in said if each not in taken]:
        what = f"what {extra[0]!r} is, which apply does not take"
        raise ConformanceError(f"the docstring of {cls.__name__} says under Args {what}")
    _check_same_parameters(cls, taken)


def _least_indented(section: str) -> str:
    """Return the lines with the least indentation."""
    lines = [line for line in section.splitlines() if line.strip()]
    least = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(line for line in lines if len(line) - len(line.lstrip()) == least)


def _check_same_parameters(cls: Any, taken: list[str]) -> None:
    own = [base for base in cls.__mro__[:-1] if base.__module__ != "slapo_core.interfaces.primitive"]
    if not any("check" in vars(base) for base in own):
        return
    checked = [each.name for each in list(inspect.signature(cls.check).parameters.values())[1:]]
    if checked != taken:
        raise ConformanceError(f"check takes ({', '.join(checked)}), and apply ({', '.join(taken)})")


def _check_capabilities(dialect: type[Dialect]) -> None:
    kinds = {"pipeline", "data_parallel", "tensor_parallel", "precision:fp32", "precision:bf16", "precision:fp16"}
    if not dialect.capabilities or not any(word.startswith("precision:") for word in dialect.capabilities):
        raise ConformanceError(f"{dialect.__name__}.capabilities do not say what it can do, 'precision:fp32' for one")
    if unknown := sorted({*dialect.capabilities} - kinds):
        raise ConformanceError(f"{dialect.__name__}.capabilities have {unknown[0]!r}; available: {', '.join(sorted(kinds))}")


def check_has_examples(registry: Registry, kind: str, name: str, examples: Sequence[Example | EngineExample]) -> None:
    """Check that there are examples, and that one has a refusal, unless nothing can be refused."""
    if not examples:
        raise ConformanceError("there is no example")
    cls = registry.get(kind, name)
    takes = kind == "dialect" or len(call_signature(cls).parameters) > 1
    if takes and not any(example.refused for example in examples):
        raise ConformanceError("no example has refused=, calls with wrong arguments and what their errors say")
