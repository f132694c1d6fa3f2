"""Steps of a journal by the module they were taken on, in short form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slapo_core import Step

from .short_values import format_tally, short_call

CUTS = "cut_pipeline_stage"
"""Name of the primitive that ends a stage."""


class StepPlaces:
    """Index of the steps by path, with those that a step took on other modules.

    Args:
        steps: Of a journal, in order.

    Attributes:
        words: Path to the steps there, e.g. ``["shard(weight, 0)", "sync(grad)"]``.
        names: Path to the primitives there.
        replaced: Path to the primitives on modules there that were replaced later.
        borders: Path to the places where a stage ends: ``"before"`` and ``"after"`` the module.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.words: dict[str, list[str]] = {}
        self.names: dict[str, list[str]] = {}
        self.replaced: dict[str, list[str]] = {}
        self.borders: dict[str, list[str]] = {}
        for step in steps:
            self._add(step)

    def _add(self, step: Step) -> None:
        if step.name == "replace" and step.kwargs.get("subgraph", (*step.args, None, None)[1]) is None:
            self._drop_steps_in(step.path)
        inner = list(_steps_on_other_modules(step, step.path))
        taken = f": {format_tally(child.name for child in inner)}" if inner else ""
        self.words.setdefault(step.path, []).append(short_call(step.name, step.args, step.kwargs) + taken)
        self.names.setdefault(step.path, []).append(step.name)
        if step.name == CUTS:
            self.borders.setdefault(step.path, []).append(step.kwargs.get("where", (*step.args, "after")[0]))
        for child in inner:
            self._add(child)

    def _drop_steps_in(self, path: str) -> None:
        """Drop the steps on a module that is replaced, and on those inside; stages still end there."""
        for place in [place for place in self.words if is_inside(place, path)]:
            del self.words[place]
            self.replaced.setdefault(place, []).extend(self.names.pop(place))


def is_inside(path: str, top: str) -> bool:
    """Return True if a path is ``top`` or below it."""
    return not top or path == top or path.startswith(f"{top}.")


def _steps_on_other_modules(step: Step, path: str) -> Iterator[Step]:
    """Yield the steps that a step took on other modules; those on its own module are a part of it."""
    for child in step.children:
        if child.path != path:
            yield child
        else:
            yield from _steps_on_other_modules(child, path)
