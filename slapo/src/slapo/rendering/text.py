"""A view as plain text that fits a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from .module_tree import ModuleNode
from .short_values import truncate
from .view import Detail, Facts, Tree, View, class_text, count_text, inside_text, name_text

_WIDTHS = (60, 140)
"""Fewest and most columns."""
_WIDTH_OF_FILES = 120
"""Columns where there is no terminal."""
_LINES = 200
"""A tree is closed at a depth that keeps it to about so many lines."""
_INDENT = 2
"""Columns for each level."""


def text_of(view: View, width: int | None = None) -> str:
    """Return a view as text.

    Args:
        view: Of any subject.
        width: Columns; None takes those of the terminal.
    """
    columns = width or shutil.get_terminal_size((_WIDTH_OF_FILES, 0)).columns
    columns = min(max(columns, _WIDTHS[0]), _WIDTHS[1])
    head = [truncate(view.title, columns), *_fact_lines(view.facts, columns)]
    return "\n".join([*head, *(line for tree in view.trees for line in ("", *_tree_lines(tree, columns)))])


def _fact_lines(facts: Facts, width: int) -> Iterator[str]:
    known = [(name, text) for name, text in facts if text]
    column = max((len(name) for name, _ in known), default=0) + 2
    for name, text in known:
        yield from _wrap_text(f"{name:<{column}}", text, column, width)


def _tree_lines(tree: Tree, width: int) -> Iterator[str]:
    if tree.title:
        yield truncate(tree.title, width)
    if tree.facts:
        yield from (*_fact_lines(tree.facts, width), "")
    detail = Detail.of(tree.root, _LINES)
    rows = list(_rows(tree.root, detail, 0))
    column = max(len(count) for count, _, _ in rows)
    for count, depth, texts in rows:
        indent = min(depth * _INDENT, width // 3) + (column + 2 if column else 0)
        margin = f"{count:>{column}}".ljust(indent)
        yield from _module_lines(margin, texts, width)


def _rows(node: ModuleNode, detail: Detail, depth: int) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the number of parameters, the depth, and the head and details of each line."""
    border = ("", depth, ["- - - stage border - - -"])
    if "before" in node.borders:
        yield border
    is_closed = detail.is_closed(node, depth)
    yield count_text(node), depth, [f"{name_text(node)}{class_text(node)}", *_details(node, is_closed)]
    for child in () if is_closed else detail.visible_children(node):
        yield from _rows(child, detail, depth + 1)
    if (left_out := len(node.children) - len(detail.visible_children(node))) and not is_closed:
        yield "", depth + 1, [f"... {left_out:,} more"]
    if "after" in node.borders:
        yield border


def _details(node: ModuleNode, is_closed: bool) -> Iterator[str]:
    if node.parameters:
        yield ", ".join(node.parameters)
    if node.steps:
        yield f"<- {', '.join(node.steps)}"
    if notes := [*node.notes, *([inside_text(node)] if is_closed else [])]:
        yield f"({'; '.join(notes)})"


def _module_lines(margin: str, texts: list[str], width: int) -> Iterator[str]:
    line = f"{margin}{'  '.join(texts)}"
    if len(line) <= width:
        yield line
        return
    yield f"{margin}{truncate(texts[0], width - len(margin))}"
    space = " " * (len(margin) + 2 * _INDENT)
    for text in texts[1:]:
        yield from _wrap_text(space, text, len(space), width)


def _wrap_text(start: str, text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False)
