"""Questions of size that ``slapo plan`` answers by trying: the least devices, the longest sequence, the largest micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from slapo_core import SlapoError
from slapo_plan import ContradictionError
from slapo_report import format_count

from ..run_data.settings import SettingsError
from .plan_settings import PlanSettings, check_constraints


class Probe(NamedTuple):
    """Tests of whether a layout fits.

    Args:
        quick: By the costs of the search.
        exact: By the estimate of the best layout's real schedule as well.
    """

    quick: Callable[[PlanSettings], bool]
    exact: Callable[[PlanSettings], bool]


_LARGEST = 2**20
"""Largest number of tokens or rows that is tried."""

_LEAST_TOKENS = 8
_STEPS = 16
"""A bisection ends at this fraction of the largest power of two that fits."""


def least_devices(settings: PlanSettings, probe: Probe, least: int) -> tuple[PlanSettings, str]:
    """Return the settings for the least number of devices and the answer in words; for the most if no layout fits.

    The numbers are the product of the given degrees times 1, 2, 4 and so on, and the largest.

    Args:
        settings: Settings whose ``gpus`` is the largest number to try.
        probe: Tests of whether a layout fits.
        least: No smaller number can fit.

    Raises:
        SlapoError: the constraints leave no layout for any number.
    """
    first = math.prod(settings.constraints.get(axis, 1) for axis in ("tp", "pp", "dp"))
    if first > settings.gpus:
        raise SettingsError(
            f"--gpus {settings.gpus}: the degrees given make {format_count(first, 'device')}; use {first} or more"
        )
    largest: PlanSettings | None = None
    refusal: SlapoError | None = None
    for number in _doublings(first, settings.gpus):
        trial = replace(settings, gpus=number, global_batch=settings.global_batch or number)
        try:
            check_constraints(trial)
            if number >= least and probe.quick(trial) and probe.exact(trial):
                tried = f", of {first}, {2 * first}, {4 * first} and so on" if number > first else ""
                return trial, f"{format_count(number, 'device')} of {settings.hardware}: the least that a layout fits on{tried}"
            largest = trial
        except (SettingsError, ContradictionError) as err:
            refusal = err
    if largest is None:
        raise refusal or SettingsError(f"--gpus {settings.gpus}: no number of devices to try")
    return largest, ""


def _doublings(first: int, most: int) -> Iterator[int]:
    """Iterate over a number times 1, 2, 4 and so on, and the largest number if it is a multiple."""
    number = first
    while number <= most:
        yield number
        number *= 2
    if most % first == 0 and number != 2 * most:
        yield most


def longest_sequence(settings: PlanSettings, probe: Probe, positions: int | None = None) -> tuple[PlanSettings, str]:
    """Return the settings with the longest sequence that fits, to a sixteenth, and the answer in words.

    Args:
        settings: The settings; their sequence does not count.
        probe: Tests of whether a layout fits.
        positions: Most tokens that the model takes; None if it has no such limit.
    """

    def at(seq: int) -> PlanSettings:
        return replace(settings, model=replace(settings.model, seq=seq))

    most = positions or _LARGEST
    least = min(_LEAST_TOKENS, most)
    seq = bisect(lambda seq: probe.quick(at(seq)), lambda seq: probe.exact(at(seq)), least, most)
    if not seq:
        return at(least), ""
    return at(seq), f"--seq {seq}: the longest sequence that fits{_limit(seq, most, positions)}"


def most_rows(settings: PlanSettings, probe: Probe) -> tuple[PlanSettings, str]:
    """Return the settings with the largest micro-batch that fits, to a sixteenth, and the answer in words."""

    def at(rows: int) -> PlanSettings:
        return replace(settings, global_batch=rows * settings.gpus, constraints={**settings.constraints, "rows": rows})

    rows = bisect(lambda rows: probe.quick(at(rows)), lambda rows: probe.exact(at(rows)), 1)
    if not rows:
        return at(1), ""
    words = f"--rows {rows}: the largest micro-batch that fits{_limit(rows, _LARGEST)}"
    return at(rows), f"{words}; more sequences are more micro-batches"


def _limit(number: int, most: int, positions: int | None = None) -> str:
    """Return what else binds an answer, in a clause."""
    if number < most:
        return ""
    return f", as the model has {positions} positions" if positions else ", of those that were tried"


def bisect(fits: Callable[[int], bool], exact: Callable[[int], bool], least: int, most: int = _LARGEST) -> int:
    """Return the largest number that fits, to a sixteenth of the power of two below it; 0 if ``least`` does not fit.

    Args:
        fits: Quick test.
        exact: Test that the result passes as well.
        least: Smallest number.
        most: Largest number.
    """
    if not fits(least):
        return 0
    low = least
    while low < most and fits(min(most, 2 * low)):
        low = min(most, 2 * low)
    smallest = max(1, low // _STEPS)
    step = low // 2
    while step >= smallest and low < most:
        if low + step < most and fits(low + step):
            low += step
        step //= 2
    while low > least and not exact(low):
        low = max(least, low - smallest)
    return low
