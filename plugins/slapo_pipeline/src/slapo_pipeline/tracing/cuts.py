"""Cuts: the modules and marks where a pipeline stage ends or begins, as the journal records them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from slapo_core import Step

CUT_PIPELINE_STAGE = "cut_pipeline_stage"
CUT_AT_MARKS = "cut_at_marks"
Where = Literal["after", "before"]


class Cut(str):
    """The path of a module where a stage ends or begins.

    Args:
        where: ``"after"`` it, ``"before"`` it, or the number of a mark in its own forward.
    """

    where: Where | int

    def __new__(cls, path: str, where: Where | int = "after") -> Cut:
        cut = super().__new__(cls, path)
        cut.where = where
        return cut


def cut_where(path: str) -> Where | int:
    """Return the ``where`` of a ``Cut``; a plain path cuts after its module."""
    return path.where if isinstance(path, Cut) else "after"


def is_at_mark(path: str) -> bool:
    """Return whether the cut lies inside the module's own forward."""
    return isinstance(cut_where(path), int)


def cuts_of_steps(steps: Iterable[Step]) -> list[str]:
    """Return the cuts of these steps and of their child steps, in the order in which they were taken."""
    found: list[str] = []
    for step in steps:
        if step.name == CUT_PIPELINE_STAGE:
            found.append(Cut(step.path, *step.args, **step.kwargs))
        elif step.name == CUT_AT_MARKS:
            found += [Cut(step.path, number) for number in step.args]
        found += cuts_of_steps(step.children)
    return found
