"""Tables as HTML. Cells are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

LONGEST_ON_ONE_LINE = 24
"""Characters of the longest cell of a column whose cells are not wrapped."""


class Cell(NamedTuple):
    """A cell whose text is not what a table is sorted by.

    Args:
        text: Shown.
        value: A number to sort by; None sorts last.
    """

    text: str
    value: float | None


def table(head: Sequence[str], rows: Iterable[Sequence[object]], style: str = "numbers") -> str:
    """Return a table of text.

    Args:
        head: Titles of the columns.
        rows: Cells, shown by ``str``.
        style: ``"numbers"``, to the right and on one line, or ``"words"``, to the left and as wide as the page.
    """
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{style}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def sortable_table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> str:
    """Return a table that the reader sorts by the buttons in its head.

    Args:
        head: Titles of the columns.
        rows: Strings, numbers or ``Cell``; None is an empty cell. Columns of numbers stand to the right, and sort by value.
        caption: Name of the table for screen readers.
    """
    columns = [[row[index] for row in rows if row[index] not in (None, "")] for index in range(len(head))]
    sides = list(map(_side, columns))
    titles = "".join(
        f'<th scope="col" aria-sort="none" class="{side}"><button type="button">{escape(title)}</button></th>'
        for title, side in zip(head, sides, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, sides))}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="sortable">'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _value(cell: object) -> float | None:
    if isinstance(cell, Cell):
        return cell.value
    return float(cell) if isinstance(cell, (int, float)) and not isinstance(cell, bool) else None


def _cell(cell: object, side: str) -> str:
    value = _value(cell)
    data = f' data-value="{value!r}"' if value is not None and value == value else ""
    return f'<td class="{side}"{data}>{escape(_text(cell))}</td>'


def _text(cell: object) -> str:
    if isinstance(cell, Cell):
        return cell.text
    return "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)


def _side(column: Sequence[object]) -> str:
    """Return the class of a column: numbers stand to the right, and short words on one line."""
    if all(_value(cell) is not None for cell in column):
        return "number"
    return "short" if max(len(_text(cell)) for cell in column) <= LONGEST_ON_ONE_LINE else "long"
