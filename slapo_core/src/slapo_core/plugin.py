"""Registration of core's own primitives, by the same hook that plugins implement."""

from __future__ import annotations

from .hookspecs import hookimpl


@hookimpl
def slapo_primitives() -> dict[str, str]:
    return {
        "annotate": "slapo_core.primitives.annotate:AnnotatePrimitive",
        "replace": "slapo_core.primitives.replace:ReplacePrimitive",
        "replace_all": "slapo_core.primitives.replace_all:ReplaceAllPrimitive",
    }
