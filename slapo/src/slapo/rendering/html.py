"""A view as HTML for a notebook: a tree that unfolds, without any file beside it, in the colours of the page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .module_tree import ModuleNode
from .view import Detail, Facts, Tree, View, class_text, count_text, inside_text, name_text

_OPEN_LINES = 60
_LINES = 1000
_STYLE = """
.slapo-view { font: 13px/1.5 monospace; color: inherit; }
.slapo-view details > :not(summary) { margin-left: 1.5em; }
.slapo-view summary { cursor: pointer; }
.slapo-view .leaf { padding-left: 1.2em; }
.slapo-view table { border: none; margin: 0 0 .5em; color: inherit; background: none; }
.slapo-view td { border: none; padding: 0 1.5em 0 0; text-align: left; vertical-align: top; white-space: normal; }
.slapo-view .quiet, .slapo-view td:first-child { opacity: .65; }
.slapo-view .steps { border: 1px solid currentColor; border-radius: 4px; padding: 0 4px; }
.slapo-view .border { border-top: 2px dashed currentColor; opacity: .65; }
"""


def html_of(view: View) -> str:
    """Return a view as HTML."""
    trees = "".join(map(_tree, view.trees))
    return f'<div class="slapo-view"><style>{_STYLE}</style><b>{escape(view.title)}</b>{_table(view.facts)}{trees}</div>'


def _table(facts: Facts) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts if text)
    return f"<table>{rows}</table>" if rows else ""


def _tree(tree: Tree) -> str:
    title = f"<b>{escape(tree.title)}</b>" if tree.title else ""
    opened, present = Detail.of(tree.root, _OPEN_LINES), Detail.of(tree.root, _LINES)
    return title + _table(tree.facts) + "".join(_node(tree.root, 0, opened, present))


def _node(node: ModuleNode, depth: int, opened: Detail, present: Detail) -> Iterator[str]:
    border = '<div class="border">stage border</div>'
    if "before" in node.borders:
        yield border
    is_cut_off = bool(node.children) and depth >= present.depth
    head = "".join(_head(node, opened.is_closed(node, depth)))
    if not node.children or is_cut_off:
        yield f'<div class="leaf">{head}</div>'
    else:
        yield f"<details{'' if opened.is_closed(node, depth) else ' open'}><summary>{head}</summary>"
        for child in present.visible_children(node):
            yield from _node(child, depth + 1, opened, present)
        if left_out := len(node.children) - len(present.visible_children(node)):
            yield f'<div class="leaf">... {left_out:,} more</div>'
        yield "</details>"
    if "after" in node.borders:
        yield border


def _head(node: ModuleNode, is_closed: bool) -> Iterator[str]:
    yield f"<b>{escape(name_text(node))}</b>{escape(class_text(node))}"
    if count := count_text(node):
        yield f' <span class="quiet">{escape(count)}</span>'
    for parameter in node.parameters:
        yield f" <code>{escape(parameter)}</code>"
    for step in node.steps:
        yield f' <span class="steps">{escape(step)}</span>'
    for note in (*node.notes, *([inside_text(node)] if is_closed else [])):
        yield f' <span class="quiet">({escape(note)})</span>'
