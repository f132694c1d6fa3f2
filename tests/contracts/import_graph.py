"""The imports of the repository's sources, as the contracts on them see them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

TOP = Path(__file__).parents[2]


@dataclass(frozen=True)
class Import:
    """One name that one module imports.

    Args:
        source: Dotted name of the importing module.
        module: Absolute name of the module after ``from`` or ``import``.
        name: The imported name; None for ``import module``.
        for_types: Whether it stands under ``if TYPE_CHECKING``.
        line: Line of the statement.
    """

    source: str
    module: str
    name: str | None
    for_types: bool
    line: int


class Sources:
    """All modules of the distributions, by dotted name."""

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """Dotted module name to its file."""
        roots = [*TOP.glob("slapo*/src"), *TOP.glob("plugins/*/src")]
        found = {file.relative_to(root): file for root in roots for file in root.rglob("*.py")}
        return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): file for path, file in found.items()}

    @cached_property
    def packages(self) -> frozenset[str]:
        """Names of the modules that are packages."""
        return frozenset(name for name, file in self.files.items() if file.name == "__init__.py")

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """Syntax tree of each module."""
        return {name: ast.parse(file.read_text()) for name, file in self.files.items()}

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import of one of our modules."""
        return tuple(each for name in self.files for each in self._of(name) if each.module.partition(".")[0] in self.packages)

    def published(self, module: str) -> frozenset[str]:
        """Return the names in ``__all__`` of a module."""
        for statement in self.trees[module].body if module in self.trees else ():
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
                return frozenset(ast.literal_eval(statement.value))
        return frozenset()

    def room(self, module: str) -> str:
        """Return the package that a module stands in; a package stands for itself."""
        return module if module in self.packages else module.rpartition(".")[0]

    def _of(self, source: str) -> Iterator[Import]:
        tree = self.trees[source]
        guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        typed = {id(node) for guard in guards for node in ast.walk(guard)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(source, each.name, None, id(node) in typed, node.lineno) for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(source, node)
                yield from (Import(source, module, each.name, id(node) in typed, node.lineno) for each in node.names)

    def _absolute(self, source: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = source.split(".")[: len(source.split(".")) - node.level + (source in self.packages)]
        return ".".join([*parts, *filter(None, [node.module])])


def cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes of a graph that reach one another."""
    reached: dict[str, set[str]] = {}
    for node in arrows:
        seen, todo = set(), [node]
        while todo:
            new = arrows.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[node] = seen
    found = {frozenset({node, *(other for other in seen if node in reached.get(other, ()))}) for node, seen in reached.items()}
    return sorted(sorted(group) for group in found if len(group) > 1)
