"""Serialization of jobs for a worker: the function by file and name, everything else pickled.

Both ends are processes of one test run, joined by a private socket pair. Nothing is read from anywhere else.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class FunctionRef:
    """Reference to a module-level function by its file, since a test module often cannot be imported by name."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> FunctionRef:
        """Return the reference to ``fn``.

        Raises:
            TypeError: not a function at module level, or not defined in a file.
        """
        qualname = getattr(fn, "__qualname__", "<locals>")
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        if "<" in qualname or module is None:
            raise TypeError(
                f"run_distributed: {fn!r} is not a function at module level; move it there and give its values as arguments"
            )
        try:
            file = os.path.abspath(inspect.getsourcefile(module) or "")
        except TypeError as err:
            raise TypeError(f"run_distributed: no file defines {qualname!r}; write it in a module or script") from err
        return cls(module.__name__, file, qualname)

    def load(self) -> Callable[..., Any]:
        found: Any = load_module(self.module, self.file)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]


def load_module(name: str, file: str) -> ModuleType:
    """Return the module called ``name`` in the test process: imported by name if that finds the same file, else from the
    file.
    """
    alias = "__mp_main__" if name == "__main__" else name  # a script's own main guard must not run
    known = sys.modules.get(alias)
    if known is None or not _same_file(getattr(known, "__file__", None), file):
        known = importlib.import_module(name) if _importable(name, file) else _from_file(alias, file)
    if name == "__main__":
        sys.modules["__main__"] = known  # where pickle looks for the script's classes
    return known


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def _importable(name: str, file: str) -> bool:
    if name == "__main__":
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and _same_file(spec.origin, file)


def _from_file(name: str, file: str) -> ModuleType:
    """Run ``file`` as module ``name``. Missing parent packages are created, for relative imports."""
    folder = Path(file).parent
    parents = name.split(".")[:-1]
    for depth in range(len(parents), 0, -1):
        parent = ".".join(parents[:depth])
        if parent not in sys.modules:
            sys.modules[parent] = ModuleType(parent)
            sys.modules[parent].__path__ = [str(folder)]
        folder = folder.parent
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass(frozen=True)
class Job:
    """One call on one rank. ``payload`` is unpickled after ``fn`` is loaded, since it may contain classes of the same
    module.
    """

    number: int
    fn: FunctionRef
    payload: bytes
    rank: int
    world_size: int
    timeout: float
    store: str
    environ: dict[str, str]
    path: list[str]
    folder: str
    cleanup: FunctionRef | None = None

    def arguments(self) -> tuple[Any, ...]:
        return unpickle(self.payload)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Report:
    """Report of a worker on job ``number``. ``kind`` is ``"result"``, ``"error"`` or, once the worker is clean again,
    ``"idle"``.
    """

    number: int
    kind: str
    when: float = 0.0
    body: bytes = b""


def unpickle(data: bytes) -> Any:
    """Return the value that the other end of the socket pair sent."""
    return pickle.loads(data)  # noqa: S301  both ends are processes of this test run


def detach_copy(value: Any) -> Any:
    """Return ``value`` with every tensor in dicts, lists and tuples copied, without its graph and the rest of its storage."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: detach_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(detach_copy(item) for item in value)
    return value
