"""The page of a plan: whether it fits, its memory, step time and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..charts.line_chart import Limit
from ..charts.stacked_bars import StackedBar, stacked_bars
from ..charts.timeline import ACTIONS, timeline
from ..charts.traffic_matrix import traffic_matrix
from ..document import cards, document
from ..javascript import SCRIPT
from ..stylesheet import CHART_STYLE, STYLE
from ..tables import Cell, sortable_table
from ..units import format_bytes, format_count, format_flops, format_percent, format_seconds, second_scale
from .candidate_table import candidate_table
from .rank_memory import count_of, join_equal, memory_bars, memory_table, name_of, peak_of
from .sections import section, sentences, settings_table, verdict

MOST_BARS = 2000
"""Actions of the timeline that have a bar with a tooltip each; more are drawn as one picture for each rank."""

BUSY = (
    "Busy: the share of the simulated step in which the rank computes, reduces gradients that nothing hides, or steps its "
    "optimizer; the rest of a row is its bubble and waits."
)

Data = Mapping[str, Any]


def plan_page(data: Data) -> str:
    """Return the page of a plan. All text is escaped; missing keys are left out of the page.

    Args:
        data: A dict with any of these keys.

            - ``title``, ``model``, ``target``: strings.
            - ``layout``: mesh axis to its size, e.g. ``{"tp": 2, "pp": 4, "dp": 8}``.
            - ``hardware``: ``name`` of a device, and ``memory_bytes``, the part of its memory that tensors may fill.
            - ``settings``: name to value.
            - ``ranks``: a list of equal ranks, each with ``ranks`` (first and last) or ``rank`` (along ``pp``), ``count`` if it
              is not all between them, ``stages``, ``memory`` (kind to bytes at the peak), ``peak_bytes``, and ``when`` the
              peak is.
            - ``collectives``: a list with ``kind``, ``axis``, ``link``, the ``rank`` along ``pp``, the ``count`` in a step, and
              ``nbytes``, the bytes of one of them; with ``within`` and ``between``, the bytes that a rank sends in one of them
              over the links of its node and over the network.
            - ``links``: a list of classes of links, each with ``link``, the ``rank`` along ``pp``, the ``count`` of
              collectives and messages, ``nbytes``, what such a rank sends in a step, and ``all_bytes``, what all of them send.
            - ``traffic``: ``labels`` of ranks or groups of ranks, and ``bytes``, rows of senders with columns of receivers.
            - ``flops``: floating-point operations of a step, of the ``model`` and, with recomputation, of the ``hardware``.
            - ``bubble``, ``mfu``: shares of 1. ``step_seconds``: seconds.
            - ``seconds``: parts of the step in seconds, e.g. ``compute``, ``communication``, ``bubble``.
            - ``timeline``: actions as those of ``engine.timeline``; messages are not shown.
            - ``candidates``: a list of layouts, the fastest first, each with ``layout``, ``recomputed``, ``peak_bytes``,
              ``step_seconds``, ``tokens_per_second``, ``bubble``, ``mfu`` and ``why`` it is slower.
            - ``problems``: sentences; with any, the plan does not work.
            - ``notes``: sentences.

    Raises:
        ValueError: ``traffic`` does not have a row and a column for each label.
    """
    ranks = join_equal(data.get("ranks") or ())
    sections = [
        _memory(ranks, _limit(data)),
        section("Step time", _time_parts(data), _timeline(data)),
        _traffic(data),
        section("Layouts", candidate_table(data.get("candidates") or ())),
        section("Plan", _settings(data)),
        section("Notes", sentences(data.get("notes") or ())),
    ]
    return document(
        data.get("title") or _default_title(data),
        "slapo plan",
        head=f"{_verdict(data, ranks)}\n{_cards(data, ranks)}",
        main="\n".join(filter(None, sections)),
        style=STYLE + CHART_STYLE,
        scripts=f"<script>{SCRIPT}</script>",
    )


def _default_title(data: Data) -> str:
    layout = " x ".join(f"{axis} {size}" for axis, size in (data.get("layout") or {}).items())
    return ": ".join(filter(None, [data.get("model"), layout])) or "Plan"


def _limit(data: Data) -> Limit | None:
    hardware = data.get("hardware") or {}
    return Limit(hardware.get("name") or "device", hardware["memory_bytes"]) if hardware.get("memory_bytes") else None


def _verdict(data: Data, ranks: Sequence[Data]) -> str:
    problems, limit = list(data.get("problems") or ()), _limit(data)
    fullest = max(ranks, key=peak_of, default=None)
    listed = sentences(problems)
    if fullest is None or limit is None:
        lead = f"This plan has {format_count(len(problems), 'problem')}"
        return verdict(False, lead, ":", listed) if problems else ""
    peak, verb = peak_of(fullest), "need" if count_of(fullest) > 1 else "needs"
    over = peak > limit.value
    share = f"{format_bytes(peak)} of the {format_bytes(limit.value)} ({format_percent(peak / limit.value)}) of {limit.name}"
    when = f" (peak: {fullest['when']})" if fullest.get("when") else ""
    words = f": {name_of(fullest)} {verb} the most memory, {share}{when}."
    if problems and not over:
        return verdict(False, "The memory fits, but this plan does not work", words, listed)
    return verdict(not over, "Does not fit" if over else "Fits", words, listed)


def _cards(data: Data, ranks: Sequence[Data]) -> str:
    formats = {"step_seconds": ("step", format_seconds), "mfu": ("MFU", format_percent), "bubble": ("bubble", format_percent)}
    values = {name: form(data[key]) for key, (name, form) in formats.items() if data.get(key) is not None}
    if ranks:
        values["peak memory"] = format_bytes(max(map(peak_of, ranks)))
        values["ranks"] = f"{sum(map(count_of, ranks)):,}"
    if (data.get("flops") or {}).get("model") is not None:
        values["FLOPs of a step"] = format_flops(data["flops"]["model"])
    return cards(values) if values else ""


def _memory(ranks: Sequence[Data], limit: Limit | None) -> str:
    if not ranks:
        return ""
    table = memory_table(ranks, limit)
    return section("Memory", memory_bars(ranks, limit), _details("All values", table))


def _time_parts(data: Data) -> str:
    seconds = {name: value for name, value in (data.get("seconds") or {}).items() if value is not None}
    total = data.get("step_seconds")
    if not seconds:
        return ""
    bar = StackedBar("one step", seconds, total)
    return stacked_bars("Parts of the step", [bar], second_scale(bar.shown_total))


def _timeline(data: Data) -> str:
    events = [
        {"stage": "", "microbatch": None, **event}
        for event in data.get("timeline") or ()
        if not str(event["kind"]).startswith(("SEND_", "RECV_"))
    ]
    if not events:
        return ""
    kinds = dict.fromkeys(str(event["kind"]) for event in events)
    names = ACTIONS | {kind: kind.replace("_", " ") for kind in kinds if kind not in ACTIONS}
    figure = timeline(events, title="Simulated step", note=BUSY, names=names, dense=len(events) > MOST_BARS)
    return f'<div class="below">{figure}</div>'


def _traffic(data: Data) -> str:
    traffic, collectives, links = data.get("traffic") or {}, data.get("collectives") or (), data.get("links") or ()
    matrix = traffic_matrix("Bytes per step", traffic["labels"], traffic["bytes"]) if traffic.get("labels") else ""
    table = f"<div><h3>Collectives and messages of a step</h3>{_collectives(collectives)}</div>" if collectives else ""
    values = _details("All values", _traffic_table(traffic)) if matrix else ""
    by_link = f"<div><h3>Sent over each link</h3>{_links(links)}</div>" if links else ""
    return section("Traffic", f'<div class="beside">{matrix}{table}</div>' if matrix or table else "", values, by_link)


def _collectives(collectives: Sequence[Data]) -> str:
    return _filled_table([_collective(each) for each in collectives], "Collectives and messages of a step")


def _links(links: Sequence[Data]) -> str:
    return _filled_table([_link(each) for each in links], "Bytes sent over each link in a step")


def _filled_table(rows: Sequence[Mapping[str, object]], caption: str) -> str:
    """Return a sortable table without the columns that no row fills."""
    columns = [title for title in rows[0] if any(row[title] is not None for row in rows)]
    return sortable_table(columns, [[row[title] for title in columns] for row in rows], caption)


def _link(each: Data) -> dict[str, object]:
    return {
        "pp rank": each.get("rank"),
        "link": each.get("link"),
        "number": each.get("count"),
        "bytes of a rank": _bytes_cell(each.get("nbytes")),
        "bytes of all its ranks": _bytes_cell(each.get("all_bytes")),
    }


def _bytes_cell(nbytes: float | None) -> Cell | None:
    return None if nbytes is None else Cell(format_bytes(nbytes), nbytes)


def _collective(each: Data) -> dict[str, object]:
    count, nbytes, kind = each.get("count"), each.get("nbytes"), each.get("kind")
    total = nbytes * count if nbytes is not None and count is not None else None
    return {
        "kind": str(kind).replace("_", "-") if kind is not None else None,
        "pp rank": each.get("rank"),
        "axis": each.get("axis"),
        "link": each.get("link"),
        "number": count,
        "bytes of one": _bytes_cell(nbytes),
        "bytes": _bytes_cell(total),
        "a rank sends in its node": _bytes_cell(each.get("within")),
        "between nodes": _bytes_cell(each.get("between")),
    }


def _traffic_table(traffic: Data) -> str:
    rows = [
        [source, *(Cell(format_bytes(value), value) if value else None for value in row)]
        for source, row in zip(traffic["labels"], traffic["bytes"], strict=True)
    ]
    return sortable_table(["from \\ to", *map(str, traffic["labels"])], rows, "Bytes from ranks to ranks")


def _settings(data: Data) -> str:
    flops, hardware = data.get("flops") or {}, data.get("hardware") or {}
    plan = {
        "model": data.get("model"),
        **(data.get("layout") or {}),
        "target": data.get("target"),
        "hardware": hardware.get("name"),
        "memory_of_a_device_bytes": hardware.get("memory_bytes"),
        "computed_by_the_model_flops": flops.get("model"),
        "computed_by_the_hardware_flops": flops.get("hardware"),
    }
    left = settings_table(("layout", "value"), plan)
    right = settings_table(("setting", "value"), data.get("settings") or {})
    tables = "".join(f"<div>{table}</div>" for table in (left, right) if table)
    return f'<div class="two">{tables}</div>' if tables else ""


def _details(summary: str, body: str) -> str:
    return f'<details class="more"><summary>{summary}</summary>{body}</details>'
