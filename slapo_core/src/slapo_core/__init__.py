"""The schedule language for training large PyTorch models: core."""

from . import gloo_threads as gloo_threads  # waits for them as the process ends
from .build import build, build_program, get_dialect_cls, init_target_engine
from .dialect import Dialect
from .engine import Engine
from .errors import BuildError, PluginError, ScheduleError, SlapoError, TraceError, UnknownNameError, VerifyError
from .hookspecs import NAME, hookimpl, hookspec
from .journal import Journal, Step
from .logger import get_logger
from .matching import find_by_name as match
from .paths import is_module_list
from .patterns import ModulePattern, Pattern, call_module
from .primitive import Primitive
from .program import Boundary, Program, Stage, TieGroup
from .random import get_cuda_rng_tracker, is_random_seed_set, set_random_seed
from .registry import Registry, default_registry, list_primitives, register_primitive
from .replay import load_schedule
from .schedule import Schedule, ScheduleMetadata, create_schedule
from .serialize import make
from .ties import analyze_tie_weights
from .tracing import trace, trace_module
from .weights import init_empty_weights, materialize

__all__ = [
    "NAME",
    "Boundary",
    "BuildError",
    "Dialect",
    "Engine",
    "Journal",
    "ModulePattern",
    "Pattern",
    "PluginError",
    "Primitive",
    "Program",
    "Registry",
    "Schedule",
    "ScheduleError",
    "ScheduleMetadata",
    "SlapoError",
    "Stage",
    "Step",
    "TieGroup",
    "TraceError",
    "UnknownNameError",
    "VerifyError",
    "analyze_tie_weights",
    "build",
    "build_program",
    "call_module",
    "create_schedule",
    "default_registry",
    "get_cuda_rng_tracker",
    "get_dialect_cls",
    "get_logger",
    "hookimpl",
    "hookspec",
    "init_empty_weights",
    "init_target_engine",
    "is_module_list",
    "is_random_seed_set",
    "list_primitives",
    "load_schedule",
    "make",
    "match",
    "materialize",
    "register_primitive",
    "set_random_seed",
    "trace",
    "trace_module",
]
