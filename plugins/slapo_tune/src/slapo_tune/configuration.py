"""The configuration file of the classic tuner.

A configuration is Python with ``get_bs_range(args)``, ``update_space(args, space)``, or both.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .search_space.space import Space, UpdateSpace
from .search_space.symbol import OpenSymbolError, TuneError
from .trial.script_arguments import ScriptArguments

BATCH_SIZE, CHECKPOINT_RATIO = "batch_size", "ckpt_ratio"
CHECKPOINT_RATIOS = (1.0, 0.92, 0.84, 0.67, 0.5, 0.34, 0.25, 0.0)
"""Candidates where a configuration gives a range of batch sizes alone, and the script takes ``ckpt_ratio``."""


@dataclass(frozen=True)
class Configuration:
    """The functions of a configuration file.

    Args:
        get_bs_range: Takes the script's arguments; returns the smallest batch size, the largest, and the step between them.
        update_space: Takes the script's arguments and the space, in which it creates symbols.
    """

    path: str
    get_bs_range: Callable[[Mapping[str, Any]], Any] | None
    update_space: Callable[[Mapping[str, Any], Space], Any] | None

    @classmethod
    def load(cls, path: str) -> Configuration:
        """Run a configuration file; it may import modules that lie beside it.

        Raises:
            TuneError: the file cannot be run, or has neither of the functions.
        """
        module = _module(path)
        found = {name: getattr(module, name, None) for name in ("get_bs_range", "update_space")}
        for name, function in found.items():
            if function is not None and not callable(function):
                raise TuneError(f"config({path!r}): {name} is {function!r}; make it a function")
        if not any(found.values()):
            raise TuneError(
                f"config({path!r}): the file has neither get_bs_range(args) nor update_space(args, space); define one of them"
            )
        return cls(path, found["get_bs_range"], found["update_space"])

    def initial_space(self, args: ScriptArguments, takes_ratio: bool) -> Space:
        """Return the space before the first call of ``update_space``.

        ``takes_ratio`` says whether the script's arguments have a place for ``ckpt_ratio``.
        """
        space = Space()
        if self.get_bs_range is not None:
            space.create_symbol(BATCH_SIZE, self._batch_sizes(self._call("get_bs_range", args)))
            if self.update_space is None and takes_ratio:
                space.create_symbol(CHECKPOINT_RATIO, CHECKPOINT_RATIOS)
        return space

    @property
    def update(self) -> UpdateSpace:
        """``update_space`` with errors that name the file and the line; it does nothing where the file has none."""
        return lambda args, space: self._call("update_space", args, space) if self.update_space is not None else space

    def _call(self, name: str, args: Mapping[str, Any], *others: Any) -> Any:
        try:
            return getattr(self, name)(args, *others)
        except OpenSymbolError:
            raise
        except (Exception, SystemExit) as err:
            line = max(
                (
                    frame.lineno or 0
                    for frame in traceback.extract_tb(err.__traceback__)
                    if Path(frame.filename).resolve() == Path(self.path).resolve()
                ),
                default=0,
            )
            given = ", ".join(args) or "none"
            raise TuneError(
                f"config({self.path!r}): {name} fails in line {line} with {type(err).__name__}: {err}; the script's "
                f"arguments are: {given}"
            ) from err

    def _batch_sizes(self, given: Any) -> range:
        try:
            smallest, largest, step = (int(each) for each in given)
            if [smallest, largest, step] != [*given] or not (1 <= smallest <= largest and step >= 1):
                raise ValueError
        except (TypeError, ValueError):
            raise TuneError(
                f"config({self.path!r}): get_bs_range returns {given!r}; return (smallest, "
                "largest, step), whole numbers from 1 on"
            ) from None
        return range(smallest, largest + 1, step)


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"slapo_tune_config_{Path(path).stem}", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise TuneError(f"config({path!r}): no such Python file; give the path of one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        raise TuneError(
            f"config({path!r}): the file does not run: {type(err).__name__}: {err}; run it alone to see where"
        ) from err
    finally:
        sys.path.pop(0)
    return module
