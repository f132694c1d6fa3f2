"""Patterns: descriptions of a part of a graph."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


class Pattern(nn.Module):
    """A pattern with submodules; ``forward`` defines how they are connected.

    A submodule that is a ``Pattern`` stands for its parts, any other for a call of a module of the same class and settings.
    """

    def forward(self, *args: Any) -> Any:
        """Define the pattern: one argument per input; returns the outputs."""
        raise NotImplementedError("a Pattern defines in forward() the operations that it matches")


class ModulePattern(Pattern):
    """A call of any module whose path in the graph fully matches a regular expression.

    Args:
        name: The regular expression, e.g. ``r".*\\.fc1"``.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_module(self.name, *args, **kwargs)


def call_module(name_regex: str, *args: Any, **kwargs: Any) -> Any:
    """In a pattern function: call a module whose path fully matches ``name_regex``, with these arguments."""
    proxies: list[fx.Proxy] = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, fx.Proxy)]
    if not proxies:
        raise TypeError("call_module(regex, ...) is for pattern functions: it needs one of the pattern's values as an argument")
    return proxies[0].tracer.create_proxy("call_function", call_module, (name_regex, *args), kwargs)


class PatternTracer(fx.Tracer):
    """Tracer of patterns, which keeps modules whole that are not patterns."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, Pattern)
