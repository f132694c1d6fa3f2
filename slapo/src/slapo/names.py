"""Where the public names live that core does not hold. Importing this imports nothing."""

from __future__ import annotations

MODULES = (
    "framework_dialect",
    "initialization",
    "logger",
    "op",
    "pattern",
    "pipeline",
    "primitives",
    "random",
    "schedule",
    "sharding",
    "tracer",
    "utils",
)
"""Documented submodules of ``slapo``."""

HOMES = {
    "FunctionType": "types",
    "OrderedDict": "collections",
    "Report": "slapo_verify",
    "Verify": "slapo_verify",
    "Weights": "slapo_weights",
    "checkpoint": "slapo_memory.recompute",
    "consolidate_model": "slapo_weights",
    "dataclass": "dataclasses",
    "export_weights": "slapo_weights",
    "field": "dataclasses",
    "partial": "functools",
    "verify": "slapo_verify",
    "verify_engine": "slapo_verify",
}
"""Name to the module it comes from; what is not listed comes from ``slapo_core``."""

OPTIONAL = {"Database": "slapo_tune", "Space": "slapo_tune", "Symbol": "slapo_tune"}
"""Names of packages that ``pip install slapo`` does not bring: served where the package is installed."""
