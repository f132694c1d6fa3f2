"""What ranks tell each other: that an action failed, and whether they were given batches that fit together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from slapo_core.agreement import agree
from slapo_core.errors import BuildError
from slapo_core.program import Program

T = TypeVar("T")
_NOTHING = -(2**40)


class BatchFacts(NamedTuple):
    """Numbers that are compared between ranks: of the shape of a batch, two of its labels, and of the stages' inputs.

    Args:
        low: The smallest over this rank's micro-batches.
        high: The largest.
    """

    low: list[int]
    high: list[int]


def on_all(action: Callable[[], T], program: Program) -> T:
    """Do what one rank can do alone, and go on only if all could. Collective.

    Returns:
        The result of the action.

    Raises:
        Exception: what the action raised here.
        BuildError: it raised on another rank.
    """
    result: Any = None
    error = None
    try:
        result = action()
    except Exception as err:
        error = err
    agree(error, program.mesh)
    return result  # type: ignore[no-any-return]


def content_slots(program: Program, content: int, known: bool) -> list[int]:
    """For each replica the largest and, negated, the smallest content of its ranks' batches; this rank knows its own.

    They are to be reduced to their largest over all ranks; none where no ranks share a batch.
    """
    if program.axis_size("pp") * program.axis_size("tp") == 1:
        return []
    slots = [_NOTHING] * (2 * program.axis_size("dp"))
    if known:
        own = 2 * program.axis_rank("dp")
        slots[own : own + 2] = content, -content
    return slots


def check_contents(slots: list[int]) -> None:
    """Raise ``BuildError`` where the ranks of one replica were given different batches, from the reduced slots."""
    for replica, (high, low) in enumerate(zip(slots[::2], slots[1::2], strict=True)):
        if high != -low:
            raise BuildError(
                f"the ranks of replica {replica} were given different batches; give all pipeline stages and tensor-parallel "
                "ranks of one replica the same rows in the same order, e.g. by one seed for their data loaders"
            )


def check_shapes(high: int, low: int) -> None:
    """Raise ``BuildError`` where the largest and the smallest fingerprint of all ranks' batches differ."""
    if high != low:
        raise BuildError(
            "the ranks were given batches of different names, shapes or types, or some train while others evaluate; give "
            "each rank a batch of the same shape, and call the same method"
        )
