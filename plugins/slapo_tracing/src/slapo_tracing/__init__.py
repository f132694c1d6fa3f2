"""Tracing: a module's forward as a graph, patterns to find in it, and edits of it.

A trace runs the forward once on fake tensors and records each torch call as a node. To trace a part of a model, the
whole model runs with the values of the batch until the part is called, so that the part gets the arguments of a plain
run. Hooks and wrappers of the part stay around the graph. Sizes that the forward reads from a tensor or an attribute
are integers that record their origin; they become nodes of the graph.

Python's decisions by such a size are not recorded. Instead, a graph serves a call only if a trace of that very call
gives the same graph. ``graphs.variants`` looks for a guard that admits the call. If no guard does, because a shape, a
dtype, a mode, an attribute or the set of parameters differs, the call is traced once. If the resulting graph exists, it
serves this call too; otherwise it is kept beside the others, with the same rewrites. A forward that cannot be traced
for a call runs untraced, with a warning.

Rewrites (``editing``) are kept as data: the names of the replaced nodes. The twin of a node in another graph is the
node that calls the same function from the same module. A call is refused if a rewritten node has no twin, or if its
constants differ and the rewrite cannot be repeated. A graph that was edited by hand serves only the calls of its first
trace.

A pipeline traces by values where a trace on fake tensors ends at a question about data. The batch is real, and so is
everything computed from it alone; parameters are fake. Each answer becomes a node ``expect``, which the stages check
for every batch.

A traced module that was not rewritten stands for its original: a trace that reaches it runs the original forward. If a
module that a graph has inlined is wrapped, hooked or replaced later, the graph no longer serves and the next call
traces another one.

Without example inputs ``torch.fx`` traces symbolically, or, where it cannot, the forward runs on synthetic inputs that
fit the first layers. Graphs of ``torch.fx`` serve all shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slapo_core import lazy_names

if TYPE_CHECKING:
    from .graphs.traced_module import TracedModule
    from .matching.matcher import match
    from .matching.patterns import ModulePattern, Pattern, call_module
    from .tracers.selection import trace, trace_module
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "graphs.traced_module": ["TracedModule"],
            "matching.matcher": ["match"],
            "matching.patterns": ["ModulePattern", "Pattern", "call_module"],
            "tracers.selection": ["trace", "trace_module"],
        },
    )

__all__ = ["ModulePattern", "Pattern", "TracedModule", "call_module", "match", "trace", "trace_module"]
