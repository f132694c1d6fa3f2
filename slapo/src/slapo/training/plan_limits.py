"""Questions of size that ``slapo plan`` answers by trying: the least devices, the longest sequence, the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slapo_core import SlapoError
from slapo_report import format_count

from ..run_data.settings import SettingsError
from .plan_settings import PlanSettings, check_constraints

Fits = Callable[[PlanSettings], bool]

_LARGEST = 2**20
_STEPS = 16
"""A bisection ends at this fraction of the largest power of two that fits."""


def least_devices(settings: PlanSettings, fits: Fits, least: int) -> tuple[PlanSettings, str]:
    """Return the settings for the least number of devices, a power of two, and the answer in words.

    Args:
        settings: Settings whose ``gpus`` is the largest number to try.
        fits: True if a layout fits.
        least: No smaller number can fit.

    Raises:
        SlapoError: nothing fits up to the largest number, or the constraints leave no layout for any number.
    """
    number, refusal = 1, ""
    while number <= settings.gpus:
        probe = replace(settings, gpus=number, global_batch=settings.global_batch or number)
        if number >= least:
            try:
                check_constraints(probe)
                if fits(probe):
                    return probe, f"{format_count(number, 'device')} of {settings.hardware}: the least that a layout fits on"
            except SettingsError as err:
                refusal = str(err)
        number *= 2
    reason = f"; the constraints leave no layout: {refusal}" if refusal else ""
    raise SlapoError(f"plan: no layout fits on up to {format_count(settings.gpus, 'device')} of {settings.hardware}{reason}")


def longest_sequence(settings: PlanSettings, fits: Fits) -> tuple[PlanSettings, str]:
    """Return the settings with the longest sequence that fits, to a sixteenth, and the answer in words."""

    def at(seq: int) -> PlanSettings:
        return replace(settings, model=replace(settings.model, seq=seq))

    def fits_at(seq: int) -> bool:
        try:
            return fits(at(seq))
        except SettingsError:  # more than the model's positions
            return False

    seq = bisect(fits_at, 8, _LARGEST)
    if not seq:
        return settings, ""
    return at(seq), f"--seq {seq}: the longest sequence that fits"


def most_rows(settings: PlanSettings, fits: Fits) -> tuple[PlanSettings, str]:
    """Return the settings with the largest micro-batch that fits, to a sixteenth, and the answer in words."""

    def at(rows: int) -> PlanSettings:
        return replace(settings, global_batch=rows * settings.gpus, constraints={**settings.constraints, "rows": rows})

    rows = bisect(lambda rows: fits(at(rows)), 1, _LARGEST)
    if not rows:
        return at(1), ""
    return at(rows), f"--rows {rows}: the largest micro-batch that fits; more sequences are more micro-batches"


def bisect(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number that fits, to a sixteenth of the power of two below it; 0 if ``least`` does not fit."""
    if not fits(least):
        return 0
    low = least
    while low * 2 <= most and fits(low * 2):
        low *= 2
    step = low // 2
    smallest = max(1, low // _STEPS)
    while step >= smallest:
        if low + step <= most and fits(low + step):
            low += step
        step //= 2
    return low
