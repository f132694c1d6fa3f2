"""Numbers have the unit that fits them; tables sort by values and are escaped."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from slapo_report import (
    Cell,
    embed_json,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    sortable_table,
    table,
)

from ..html_page import HOSTILE, Page


@pytest.mark.parametrize(
    ("function", "value", "words"),
    [
        (format_bytes, 0, "0 bytes"),
        (format_bytes, 1, "1 bytes"),
        (format_bytes, 1023, "1023 bytes"),
        (format_bytes, 1536, "1.50 KiB"),
        (format_bytes, 2**30 - 1, "1.00 GiB"),
        (format_bytes, 61.24 * 2**30, "61.2 GiB"),
        (format_bytes, 5e20, "444089 PiB"),
        (format_seconds, 0, "0 us"),
        (format_seconds, 3.5e-7, "0.35 us"),
        (format_seconds, 0.0125, "12.5 ms"),
        (format_seconds, 0.99999, "1.00 s"),
        (format_seconds, 8.41, "8.41 s"),
        (format_seconds, 90, "90 s"),
        (format_seconds, 412, "6.87 min"),
        (format_seconds, 7200, "2 h"),
        (format_flops, 3.52e18, "3.52 EFLOP"),
        (format_flops, 12, "12 FLOP"),
        (format_percent, 0.0, "0.0%"),
        (format_percent, 0.0906, "9.1%"),
        (format_percent, 1.4, "140%"),
        (format_bytes, math.nan, "nan bytes"),
    ],
)
def test_a_number_with_its_unit(function: Callable[[float], str], value: float, words: str) -> None:
    assert function(value) == words


def test_numbers_sort_by_value_and_stand_to_the_right() -> None:
    parsed = Page(sortable_table(("a", "b"), [("x", Cell("1 KiB", 1024)), (None, Cell("2 bytes", 2)), ("y", None)], "sizes"))
    cells = [attrs for tag, attrs in parsed.elements if tag == "td"]
    assert [attrs.get("data-value") for attrs in cells] == [None, "1024", None, "2", None, None]
    assert [attrs["class"] for attrs in cells] == ["short", "number"] * 3


def test_long_text_is_wrapped_and_an_empty_column_is_none() -> None:
    parsed = Page(sortable_table(("a", "b"), [("words " * 10, None)], "texts"))
    assert [attrs["class"] for tag, attrs in parsed.elements if tag == "td"] == ["long", "number"]


def test_cells_and_heads_are_escaped() -> None:
    for html in (table([HOSTILE], [[HOSTILE]]), sortable_table([HOSTILE], [[HOSTILE], [Cell(HOSTILE, 1)]], HOSTILE)):
        parsed = Page(html)
        assert parsed.text.count(HOSTILE) >= 2
        assert {tag for tag, _ in parsed.elements} <= {"div", "table", "thead", "tbody", "tr", "th", "td", "button"}


def test_json_in_a_page_ends_no_element() -> None:
    assert "<" not in embed_json({HOSTILE: [HOSTILE, math.inf]})
