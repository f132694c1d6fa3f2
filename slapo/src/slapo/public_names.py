"""Homes of the public names that core does not hold. Importing this imports nothing."""

from __future__ import annotations

DOCUMENTED_MODULES = (
    "autotune",
    "framework_dialect",
    "initialization",
    "logger",
    "model_schedule",
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

NAME_ORIGINS = {
    "Database": "slapo_tune",
    "FunctionType": "types",
    "ModulePattern": "slapo_tracing",
    "OrderedDict": "collections",
    "Pattern": "slapo_tracing",
    "Report": "slapo_verify",
    "ScheduleSpace": "slapo_tune",
    "Space": "slapo_tune",
    "Symbol": "slapo_tune",
    "Tolerance": "slapo_verify",
    "Verify": "slapo_verify",
    "Weights": "slapo_weights",
    "analyze_tie_weights": "slapo_pipeline.partition",
    "apply_schedule": "slapo_models",
    "call_module": "slapo_tracing",
    "checkpoint": "slapo_memory.forward_wrappers",
    "consolidate_model": "slapo_weights",
    "dataclass": "dataclasses",
    "ema": "slapo_training.ema",
    "export_weights": "slapo_weights",
    "field": "dataclasses",
    "get_dialect_cls": "slapo.framework_dialect",
    "gradient_hook": "slapo_training.gradient_hooks",
    "init_target_engine": "slapo.framework_dialect",
    "partial": "functools",
    "trace": "slapo_tracing",
    "trace_module": "slapo_tracing",
    "tune": "slapo_tune",
    "verify": "slapo_verify",
    "verify_engine": "slapo_verify",
}
"""Name to the module it comes from; what is not listed comes from ``slapo_core``."""
