"""The page of a tuning: its trials, the best one, and what mattered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..charts.axes import integer_axis, linear_axis
from ..charts.scatter import Point, scatter
from ..charts.share_bars import share_bars
from ..document import cards, document
from ..javascript import SCRIPT
from ..stylesheet import CHART_STYLE, STYLE
from ..tables import Cell, sortable_table
from ..units import format_count, format_seconds, second_scale
from .sections import format_value, section, sentences, settings_table, verdict

UNIT = "samples/s"

LEGEND = (("done", "measured"), ("best", "best"), ("stopped", "stopped or refused"), ("failed", "failed"))

STATES = {"measured": "done", "complete": "done"} | dict.fromkeys(
    ("pruned", "refused", "skipped", "running", "waiting"), "stopped"
)
"""State of a trial to the look of its point; any other has failed."""

VERIFIED: Mapping[object, str] = {True: " It is verified.", False: " It does not compute the same as the model."}
"""Sentence about the best."""

Data = Mapping[str, Any]


def tune_page(data: Data) -> str:
    """Return the page of a tuning. All text is escaped; missing keys are left out of the page.

    Args:
        data: A dict with any of these keys.

            - ``title``: a string.
            - ``space``: symbol to its candidates.
            - ``trials``: a list with ``number``, ``values`` (symbol to value), ``state`` (``"measured"``, ``"pruned"``,
              ``"refused"``, ``"skipped"``, or any other for a failure), ``throughput`` in samples per second, its ``interval``
              (two throughputs, or half of their distance), ``seconds`` and ``predicted`` seconds of a step, ``verified``
              (False is a failure), and ``message``, a sentence.
            - ``best``: number of the best trial.
            - ``best_so_far``: the best throughput after each trial; None before the first.
            - ``importances``: symbol to its share of 1.
            - ``failures``: sentences.
            - ``budget``: name to value; names that end in ``_seconds`` are times.
    """
    trials = list(data.get("trials") or ())
    best = next((trial for trial in trials if trial.get("number") == data.get("best")), None) if trials else None
    charts = _trial_chart(data, trials, best) + _prediction_chart(trials, best)
    left = settings_table(("symbol", "candidates"), data.get("space") or {})
    right = settings_table(("budget", "value"), data.get("budget") or {})
    tables = "".join(f"<div>{table}</div>" for table in (left, right) if table)
    sections = [
        section("Trials", f'<div class="charts">{charts}</div>' if charts else ""),
        section("Importance", share_bars("Share of the differences in throughput", data["importances"]))
        if data.get("importances")
        else "",
        section("Failures", sentences(data.get("failures") or ())),
        section("Search", f'<div class="two">{tables}</div>' if tables else ""),
        section("All trials", _trial_table(trials, best)),
    ]
    return document(
        data.get("title") or "Tuning",
        "slapo tune",
        head=f"{_verdict(trials, best)}\n{_cards(trials, best)}",
        main="\n".join(filter(None, sections)),
        style=STYLE + CHART_STYLE,
        scripts=f"<script>{SCRIPT}</script>",
    )


def _style(trial: Data) -> str:
    """Return the look of a trial that is not the best."""
    return "failed" if trial.get("verified") is False else STATES.get(str(trial.get("state", "")).lower(), "failed")


def _verdict(trials: Sequence[Data], best: Data | None) -> str:
    if not trials:
        return verdict(False, "No trial was run", ".")
    if best is None:
        return verdict(False, "No trial gave a throughput", f", of {len(trials)}.")
    speed = f", {best['throughput']:.5g} {UNIT}" if best.get("throughput") is not None else ""
    values = _values(best)
    checked = VERIFIED.get(best.get("verified"), "")
    good = best.get("verified") is not False
    return verdict(good, f"Trial {best['number']} is the best", f"{speed}{': ' if values else ''}{values}.{checked}")


def _cards(trials: Sequence[Data], best: Data | None) -> str:
    styles = [_style(trial) for trial in trials]
    values = {"trials": str(len(trials)), "measured": str(styles.count("done"))}
    values |= {"stopped or refused": str(styles.count("stopped")), "failed": str(styles.count("failed"))}
    if best is not None and best.get("throughput") is not None:
        values[f"best, {UNIT}"] = f"{best['throughput']:.5g}"
        first = next((trial for trial in trials if trial.get("throughput")), best)
        if first is not best:
            values[f"speed-up over trial {first.get('number')}"] = f"{best['throughput'] / first['throughput']:.2f} x"
    if best is not None and best.get("seconds") is not None:
        values["step"] = format_seconds(best["seconds"])
    return cards(values) if trials else ""


def _interval(trial: Data) -> tuple[float, float] | None:
    """Return the ends of the interval of a trial's throughput."""
    interval, middle = trial.get("interval"), trial.get("throughput")
    if interval is None or middle is None:
        return None
    if isinstance(interval, (int, float)):
        return middle - interval, middle + interval
    low, high = interval
    return low, high


def _values(trial: Data) -> str:
    return format_value(trial.get("values") or {})


def _trial_sentence(trial: Data) -> str:
    """Return a trial as one sentence."""
    speed, interval = trial.get("throughput"), _interval(trial)
    words = [f"trial {trial.get('number')}", str(trial.get("state") or "")]
    if speed is not None:
        words.append(f"{speed:.5g} {UNIT}" + (f" ({interval[0]:.5g} to {interval[1]:.5g})" if interval else ""))
    return ", ".join(filter(None, [*words, _values(trial), str(trial.get("message") or "")]))


def _trial_chart(data: Data, trials: Sequence[Data], best: Data | None) -> str:
    if not trials:
        return ""
    numbers = [trial.get("number", index) for index, trial in enumerate(trials)]
    points = [
        Point(
            number,
            trial.get("throughput"),
            "best" if trial is best else _style(trial),
            _trial_sentence(trial),
            _interval(trial),
        )
        for number, trial in zip(numbers, trials, strict=True)
    ]
    heights = [point.y for point in points if point.y is not None]
    ends = [end for point in points if point.interval for end in point.interval]
    so_far = zip(numbers, data.get("best_so_far") or (), strict=False)
    curve = [(number, value) for number, value in so_far if value is not None and math.isfinite(value)]
    shown = {point.style for point in points}
    legend = [(style, name) for style, name in LEGEND if style in shown] + ([("curve", "best so far")] if curve else [])
    y = linear_axis([*heights, *ends, *(value for _, value in curve)])
    label = f"throughput, {UNIT}" + ("; trials without one lie at the bottom" if len(heights) < len(points) else "")
    x = integer_axis(min(numbers), max(numbers))
    return scatter("Throughput of each trial", points, x, y, x_label="trial", y_label=label, legend=legend, curve=curve)


def _prediction_chart(trials: Sequence[Data], best: Data | None) -> str:
    known = [trial for trial in trials if trial.get("predicted") is not None and trial.get("seconds") is not None]
    if not known:
        return ""
    scale = second_scale(max(max(trial["predicted"], trial["seconds"]) for trial in known))
    points = [
        Point(
            trial["predicted"] / scale.size,
            trial["seconds"] / scale.size,
            "best" if trial is best else _style(trial),
            f"trial {trial.get('number')}: {format_seconds(trial['seconds'])}, predicted {format_seconds(trial['predicted'])}",
        )
        for trial in known
    ]
    return scatter(
        "Predicted and measured step",
        points,
        linear_axis(point.x for point in points),
        linear_axis(point.y for point in points if point.y is not None),
        x_label=f"predicted, {scale.unit}",
        y_label=f"measured, {scale.unit}; on the dashed line both are equal",
        legend=[(style, name) for style, name in LEGEND if style in {point.style for point in points}],
        diagonal=True,
    )


def _trial_table(trials: Sequence[Data], best: Data | None) -> str:
    if not trials:
        return ""
    symbols = list(dict.fromkeys(name for trial in trials for name in trial.get("values") or {}))
    measured = [key for key in COLUMNS if any(trial.get(key) is not None for trial in trials)]
    with_message = any(trial.get("message") for trial in trials)
    head = ["trial", "state", *(COLUMNS[key][0] for key in measured), *symbols, *["message"] * with_message]
    rows = [
        [
            trial.get("number"),
            f"{trial.get('state') or ''}{', best' if trial is best else ''}",
            *(COLUMNS[key][1](trial) for key in measured),
            *(_symbol_cell((trial.get("values") or {}).get(name)) for name in symbols),
            *[trial.get("message")] * with_message,
        ]
        for trial in trials
    ]
    return sortable_table(head, rows, f"All trials: {format_count(len(trials), 'row')}")


def _speed_cell(trial: Data) -> Cell | None:
    speed = trial.get("throughput")
    return None if speed is None else Cell(f"{speed:.5g}", speed)


def _interval_cell(trial: Data) -> Cell | None:
    interval = _interval(trial)
    return None if interval is None else Cell(f"{interval[0]:.4g} to {interval[1]:.4g}", interval[1] - interval[0])


def _step_cell(trial: Data) -> Cell | None:
    return _time_cell(trial.get("seconds"))


def _prediction_cell(trial: Data) -> Cell | None:
    return _time_cell(trial.get("predicted"))


def _verified_cell(trial: Data) -> str | None:
    verified = trial.get("verified")
    return None if verified is None else format_value(verified)


def _time_cell(seconds: float | None) -> Cell | None:
    return None if seconds is None else Cell(format_seconds(seconds), seconds)


def _symbol_cell(value: Any) -> object:
    return value if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)) else format_value(value)


COLUMNS: Mapping[str, tuple[str, Callable[[Data], Cell | str | None]]] = {
    "throughput": (UNIT, _speed_cell),
    "interval": ("interval", _interval_cell),
    "seconds": ("step", _step_cell),
    "predicted": ("predicted step", _prediction_cell),
    "verified": ("verified", _verified_cell),
}
"""Key of a trial to the title and the cells of its column."""
