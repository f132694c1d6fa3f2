"""Directives that document what the installed plugins register.

``primitives`` lists every primitive as a method of a schedule, with the arguments of ``apply``. ``dialects`` lists every
target of ``build``, ``kernels`` every kernel with its arguments, ``commands`` those of the command line, and ``public-names``
what ``import slapo`` gives.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util import rst
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import slapo
import slapo_core
import slapo_kernels
from slapo.cli.app import create_app
from slapo.public_names import NAME_ORIGINS
from slapo_core import Registry


def rewrite_as_literal(docstring: str) -> str:
    """Make the section ``Rewrite:`` a literal block, whose line breaks count."""
    return re.sub(r"^Rewrite:$", "Rewrite::", docstring, flags=re.MULTILINE)


def _rewrite_as_literal(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = rewrite_as_literal("\n".join(lines)).split("\n")


class _Registered(SphinxDirective):
    """Parse a description for each name of one kind."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        """Yield the directive and the docstring of each name."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all descriptions."""
        lines = StringList()
        for heading, docstring in self.descriptions(Registry()):
            body = GoogleDocstring(rewrite_as_literal(inspect.cleandoc(docstring)), self.config).lines()
            for line in [*heading.splitlines(), "", *(f"   {line}" for line in body), ""]:
                lines.append(line, heading)
        node = nodes.Element()
        self.state.nested_parse(lines, 0, node)
        return node.children


class Primitives(_Registered):
    """``primitives``: each as the method of a schedule that it is."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        for name in registry.names("primitive"):
            primitive = registry.get("primitive", name)
            signature = inspect.signature(primitive.apply)
            own = signature.replace(parameters=[*signature.parameters.values()][1:], return_annotation=signature.empty)
            heading = f".. py:method:: Schedule.{name}{stringify_signature(own, unqualified_typehints=True)}"
            yield heading, str(primitive.__doc__)


class Dialects(_Registered):
    """``dialects``: each as the target that it is."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        for name in registry.names("dialect"):
            dialect = registry.get("dialect", name)
            able = ", ".join(f"``{word}``" for word in sorted(dialect.capabilities))
            yield f".. describe:: target={name!r}", f"{inspect.cleandoc(str(dialect.__doc__))}\n\nIt can do {able}."


class Kernels(_Registered):
    """``kernels``: each as its eager implementation."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        for name in slapo_kernels.kernel_names():
            eager = getattr(slapo_kernels.eager, name)
            heading = f".. py:function:: {name}{stringify_signature(inspect.signature(eager))}"
            yield f"{heading}\n   :module: slapo_kernels.eager", str(eager.__doc__)


class Commands(_Registered):
    """``commands``: each with its options."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        top = typer.main.get_command(create_app())
        for name, command in sorted(getattr(top, "commands", {}).items()):
            options = [(", ".join(each.opts), getattr(each, "help", None) or "") for each in command.params]
            lines = [f"* - ``{written}``\n      - {rst.escape(said)}" for written, said in options]
            table = ".. list-table::\n\n    " + "\n    ".join(lines) if lines else ""
            yield f".. describe:: slapo {name}", f"{rst.escape(inspect.cleandoc(command.help or ''))}\n\n{table}"


class PublicNames(_Registered):
    """``public-names``: each with a link to its description."""

    def descriptions(self, registry: Registry) -> Iterator[tuple[str, str]]:
        homes = {**dict.fromkeys(slapo_core.__all__, "slapo_core"), **NAME_ORIGINS}
        for name in sorted(homes, key=str.lower):
            if name in slapo.__all__ and homes[name].startswith("slapo"):
                yield f".. describe:: slapo.{name}", f"See :py:obj:`{homes[name]}.{name}`."


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("primitives", Primitives)
    app.add_directive("dialects", Dialects)
    app.add_directive("kernels", Kernels)
    app.add_directive("commands", Commands)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _rewrite_as_literal, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
