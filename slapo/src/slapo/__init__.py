"""Slapo, the schedule language for training large PyTorch models: ``slapo.create_schedule``, ``slapo.build`` and the rest.

Names are imported when first used, so that ``import slapo`` costs nothing and the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .public_names import DOCUMENTED_MODULES, NAME_ORIGINS

if TYPE_CHECKING:
    from collections import OrderedDict
    from dataclasses import dataclass, field
    from functools import partial
    from types import FunctionType, ModuleType

    from slapo.framework_dialect import get_dialect_cls, init_target_engine
    from slapo_core import (
        BuildError,
        Dialect,
        Engine,
        Journal,
        PluginError,
        Primitive,
        Program,
        Schedule,
        ScheduleError,
        ScheduleMetadata,
        SlapoError,
        Stage,
        Step,
        TraceError,
        UnknownNameError,
        VerifyError,
        build,
        build_program,
        create_schedule,
        get_cuda_rng_tracker,
        get_logger,
        hookimpl,
        hookspec,
        init_empty_weights,
        is_module_list,
        is_random_seed_set,
        list_primitives,
        load_schedule,
        make,
        register_primitive,
        set_random_seed,
    )
    from slapo_memory.forward_wrappers import checkpoint
    from slapo_models import apply_schedule
    from slapo_pipeline.partition import analyze_tie_weights
    from slapo_plan import Estimate, Hardware, Plan, calibrate, estimate, fake_ranks, plan
    from slapo_tracing import ModulePattern, Pattern, call_module, trace, trace_module
    from slapo_training.ema import ema
    from slapo_training.gradient_hooks import gradient_hook
    from slapo_tune import Database, ScheduleSpace, Space, Symbol, tune
    from slapo_verify import Report, Tolerance, Verify, verify, verify_engine
    from slapo_weights import Weights, consolidate_model, export_weights

__all__ = [
    "BuildError",
    "Database",
    "Dialect",
    "Engine",
    "Estimate",
    "FunctionType",
    "Hardware",
    "Journal",
    "ModulePattern",
    "OrderedDict",
    "Pattern",
    "Plan",
    "PluginError",
    "Primitive",
    "Program",
    "Report",
    "Schedule",
    "ScheduleError",
    "ScheduleMetadata",
    "ScheduleSpace",
    "SlapoError",
    "Space",
    "Stage",
    "Step",
    "Symbol",
    "Tolerance",
    "TraceError",
    "UnknownNameError",
    "Verify",
    "VerifyError",
    "Weights",
    "analyze_tie_weights",
    "apply_schedule",
    "build",
    "build_program",
    "calibrate",
    "call_module",
    "checkpoint",
    "consolidate_model",
    "create_schedule",
    "dataclass",
    "ema",
    "estimate",
    "export_weights",
    "fake_ranks",
    "field",
    "get_cuda_rng_tracker",
    "get_dialect_cls",
    "get_logger",
    "gradient_hook",
    "hookimpl",
    "hookspec",
    "init_empty_weights",
    "init_target_engine",
    "is_module_list",
    "is_random_seed_set",
    "list_primitives",
    "load_schedule",
    "make",
    "partial",
    "plan",
    "register_primitive",
    "set_random_seed",
    "trace",
    "trace_module",
    "tune",
    "verify",
    "verify_engine",
]


def __getattr__(name: str) -> Any:
    if name in DOCUMENTED_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'slapo' has no attribute {name!r}", name=name)
    value = globals()[name] = getattr(_home(name), name)
    return value


def _home(name: str) -> ModuleType:
    home = NAME_ORIGINS.get(name, "slapo_core")
    package = home.partition(".")[0]
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as err:
        if err.name not in (package, home):
            raise
        raise ImportError(f"slapo.{name} needs {package}; pip install {package.replace('_', '-')}", name=package) from err


def __dir__() -> list[str]:
    return sorted({*__all__, *DOCUMENTED_MODULES, *(name for name in globals() if name.startswith("__"))})
