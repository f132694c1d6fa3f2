"""Python code of a graph.

The generator of fx spells every function and constant as text, which fails for many. Here a value without a plain spelling is a
global of the code.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch.fx.node import map_arg

_file_numbers = itertools.count()


def compile_graph(graph: fx.Graph, name: str) -> tuple[Any, str]:
    """Return a function ``run(self, *inputs)`` and its source. Values are freed after their last use."""
    writer = _Writer(graph)
    last = {node: user for user in graph.nodes for node in user.all_input_nodes}
    dying: dict[fx.Node, list[str]] = {}
    for node, user in last.items():
        dying.setdefault(user, []).append(node.name)
    inputs, values, body = {writer.root: ""}, [writer.root], ["    pass"]
    for node in graph.nodes:
        if node.op == "placeholder":
            given = str(node.target).removeprefix("*")
            given = node.name if given in inputs else given
            inputs[given] = f"={writer.text(node.args[0])}" if node.args else ""
            values.append(node.name)
        elif node.op == "output":
            body.append(f"    return {writer.text(node.args[0])}")
        else:
            freed = dying.get(node, []) if node.users else [*dying.get(node, []), node.name]
            body.append("; ".join([f"    {node.name} = {writer.call(node)}", *(f"{other} = None" for other in freed)]))
    arguments = ", ".join(f"{given}{default}" for given, default in inputs.items())
    # all arguments at once, as the name of one's value may be that of another argument
    source = "\n".join([f"def run({arguments}):", f"    {', '.join(values)}, = {', '.join(inputs)},", *body]) + "\n"
    file = f"<{name}.{next(_file_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), writer.names)  # noqa: S102
    return writer.names["run"], source


class _Writer:
    def __init__(self, graph: fx.Graph) -> None:
        self.taken = {name for node in graph.nodes for name in (node.name, str(node.target))}
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.root = self._free("self")

    def _free(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        return name

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, (tuple, list)) and type(value).__module__ in ("builtins", "torch.fx.immutable_collections"):
            inner = ", ".join(map(self.text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.text(key)}: {self.text(part)}" for key, part in value.items()) + "}"
        if isinstance(value, slice):
            return f"{self.name_of_global(slice)}({', '.join(map(self.text, (value.start, value.stop, value.step)))})"
        return repr(value) if type(value) in (type(None), bool, int, str) else self.name_of_global(value)

    def name_of_global(self, value: Any) -> str:
        """Return the name of the global that holds ``value``."""
        if id(value) not in self.known:
            label = str(getattr(value, "__name__", type(value).__name__))
            name = self._free(f"_{len(self.known)}_{label if label.isidentifier() else ''}")
            self.known[id(value)], self.names[name] = name, value
        return self.known[id(value)]

    def call(self, node: fx.Node) -> str:
        arguments = [*map(self.text, node.args)]
        named = [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *named])})"
        if node.op == "call_function":
            return f"{self.name_of_global(node.target)}({', '.join([*arguments, *named])})"
        *parents, name = str(node.target).split(".")
        holder = self.root + "".join(f"._modules[{parent!r}]" for parent in parents)
        if node.op == "call_module":
            return f"{holder}._modules[{name!r}]({', '.join([*arguments, *named])})"
        return f"getattr({holder}, {name!r})"


def run_graph(
    module: nn.Module, graph: fx.Graph, inputs: Mapping[str, Any], around: Callable[[fx.Node], AbstractContextManager[None]]
) -> Any:
    """Run a graph of a module node by node, each in the context that ``around`` makes."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        if node.op == "output":
            return args[0]
        if node.op == "placeholder":
            values[node] = inputs[target] if target in inputs else args[0]
            continue
        *parents, name = str(target).split(".")
        with around(node):
            if node.op == "call_function":
                values[node] = target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                found = getattr(module.get_submodule(".".join(parents)), name)
                values[node] = found if node.op == "get_attr" else found(*args, **kwargs)
    raise AssertionError("a graph without output")
