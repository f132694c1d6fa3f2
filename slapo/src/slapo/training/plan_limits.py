"""Questions of size that ``slapo plan`` answers by trying: the least devices, the longest sequence, the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from slapo_core import SlapoError
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
_STEPS = 16
"""A bisection ends at this fraction of the largest power of two that fits."""


def least_devices(settings: PlanSettings, probe: Probe, least: int) -> tuple[PlanSettings, str]:
    """Return the settings for the least number of devices, a power of two, and the answer in words.

    Args:
        settings: Settings whose ``gpus`` is the largest number to try.
        probe: Tests of whether a layout fits.
        least: No smaller number can fit.

    Raises:
        SlapoError: nothing fits up to the largest number, or the constraints leave no layout for any number.
    """
    number, refusal = 1, ""
    while number <= settings.gpus:
        trial = replace(settings, gpus=number, global_batch=settings.global_batch or number)
        if number >= least:
            try:
                check_constraints(trial)
                if probe.quick(trial) and probe.exact(trial):
                    return trial, f"{format_count(number, 'device')} of {settings.hardware}: the least that a layout fits on"
            except SettingsError as err:
                refusal = str(err)
        number *= 2
    reason = f"; the constraints leave no layout: {refusal}" if refusal else ""
    raise SlapoError(f"plan: no layout fits on up to {format_count(settings.gpus, 'device')} of {settings.hardware}{reason}")


def longest_sequence(settings: PlanSettings, probe: Probe) -> tuple[PlanSettings, str]:
    """Return the settings with the longest sequence that fits, to a sixteenth, and the answer in words."""

    def at(seq: int) -> PlanSettings:
        return replace(settings, model=replace(settings.model, seq=seq))

    def fits(seq: int, test: Callable[[PlanSettings], bool]) -> bool:
        try:
            return test(at(seq))
        except SettingsError:  # more than the model's positions
            return False

    seq = bisect(lambda seq: fits(seq, probe.quick), lambda seq: fits(seq, probe.exact), 8)
    if not seq:
        return settings, ""
    return at(seq), f"--seq {seq}: the longest sequence that fits"


def most_rows(settings: PlanSettings, probe: Probe) -> tuple[PlanSettings, str]:
    """Return the settings with the largest micro-batch that fits, to a sixteenth, and the answer in words."""

    def at(rows: int) -> PlanSettings:
        return replace(settings, global_batch=rows * settings.gpus, constraints={**settings.constraints, "rows": rows})

    rows = bisect(lambda rows: probe.quick(at(rows)), lambda rows: probe.exact(at(rows)), 1)
    if not rows:
        return at(1), ""
    return at(rows), f"--rows {rows}: the largest micro-batch that fits; more sequences are more micro-batches"


def bisect(fits: Callable[[int], bool], exact: Callable[[int], bool], least: int) -> int:
    """Return the largest number that fits, to a sixteenth of the power of two below it; 0 if ``least`` does not fit.

    Args:
        fits: Quick test.
        exact: Test that the result passes as well.
        least: Smallest number.
    """
    if not fits(least):
        return 0
    low = least
    while low * 2 <= _LARGEST and fits(low * 2):
        low *= 2
    step = low // 2
    smallest = max(1, low // _STEPS)
    while step >= smallest:
        if fits(low + step):
            low += step
        step //= 2
    while low > least and not exact(low):
        low = max(least, low - smallest)
    return low
