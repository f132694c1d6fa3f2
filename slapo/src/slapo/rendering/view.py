"""Title, facts and module trees of a subject as plain data, and the choice of the modules that are shown open."""

from __future__ import annotations

from dataclasses import dataclass

from .module_tree import ModuleNode
from .short_values import format_count, format_tally, short_count

Facts = tuple[tuple[str, str], ...]
"""Names and texts; a fact without text is left out."""


@dataclass(frozen=True)
class Tree:
    """A module tree.

    Args:
        root: The top module.
        title: A line above it.
        facts: Between the title and the tree.
    """

    root: ModuleNode
    title: str = ""
    facts: Facts = ()


@dataclass(frozen=True)
class View:
    """Title, facts and trees of a schedule, program or engine.

    Args:
        title: The first line.
        facts: Below the title.
        trees: Module trees.
    """

    title: str
    facts: Facts = ()
    trees: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Detail:
    """Choice of the modules of a tree that are closed, so that the others fill about as many lines as there is room for.

    Args:
        depth: Modules at this depth are closed.
        width: Modules of one module that are shown; the others are counted.
        closes_unchanged: True closes modules below the first level where nothing was done inside.
    """

    depth: int
    width: int
    closes_unchanged: bool

    @classmethod
    def of(cls, root: ModuleNode, lines: int) -> Detail:
        """Return the greatest depth that fits into a number of lines, and at least 1."""
        detail = cls(1, lines // 2, root.is_changed or root.is_changed_inside)
        level, shown = detail.visible_children(root), 1 + len(root.children)
        while level:
            is_open = [node for node in level if not detail._adds_nothing(node, detail.depth)]
            level = [child for node in is_open for child in detail.visible_children(node)]
            shown += len(level)
            if shown > lines:
                break
            detail = cls(detail.depth + 1, detail.width, detail.closes_unchanged)
        return detail

    def is_closed(self, node: ModuleNode, depth: int) -> bool:
        """Return whether the modules inside are left out."""
        return bool(node.children) and (depth >= self.depth or self._adds_nothing(node, depth))

    def visible_children(self, node: ModuleNode) -> list[ModuleNode]:
        """Return the modules inside that have a line."""
        return node.children[: self.width]

    def _adds_nothing(self, node: ModuleNode, depth: int) -> bool:
        return bool(node.model_inside) or (self.closes_unchanged and depth > 1 and not node.is_changed_inside)


def count_text(node: ModuleNode) -> str:
    """Return the number of parameters in all modules of a node, on this rank and, where these are fewer, as a whole."""
    held, total = node.held * node.copies, node.total * node.copies
    return "" if not total else short_count(total) if held == total else f"{short_count(held)} of {short_count(total)}"


def name_text(node: ModuleNode) -> str:
    """Return the name in the module around."""
    return f"{node.name}: " if node.name else ""


def class_text(node: ModuleNode) -> str:
    """Return class and configuration: ``Linear(in_features=2, out_features=2)``, ``3 x Block``."""
    number = f"{node.copies} x " if node.copies > 1 else ""
    return f"{number}{node.kind}({node.config})" if node.config else f"{number}{node.kind}"


def inside_text(node: ModuleNode) -> str:
    """Return what a closed module holds: ``5 modules inside: checkpoint, 2 shard``, or ``inside as in h.0``."""
    if node.model_inside:
        return f"inside as in {node.model_inside}"
    steps = format_tally(node.steps_inside.elements())
    return f"{format_count(node.modules_inside, 'module')} inside{': ' if steps else ''}{steps}"
