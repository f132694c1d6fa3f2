"""Hook implementations of slapo-tracing."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {
        "trace": "slapo_tracing.primitives.trace:TracePrimitive",
        "trace_until": "slapo_tracing.primitives.trace_until:TraceUntilPrimitive",
    }


@hookimpl
def slapo_queries() -> dict[str, str]:
    queries = "slapo_tracing.matching.queries"
    return {"find": f"{queries}:find", "find_node": f"{queries}:find_node", "find_subgraph": f"{queries}:find_subgraph"}


@hookimpl
def slapo_codecs() -> dict[str, str]:
    return {"$match": "slapo_tracing.matching.match_codec:MatchCodec"}


@hookimpl
def slapo_subgraph_primitives() -> dict[str, str]:
    return {"replace": "slapo_tracing.editing.replacement:SubgraphReplacement"}
