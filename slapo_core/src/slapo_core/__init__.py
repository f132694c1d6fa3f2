"""The schedule language for training large PyTorch models: core."""

from .building.build import build, build_program
from .building.weights import init_empty_weights, materialize
from .distributed.random import get_cuda_rng_tracker, is_random_seed_set, set_random_seed
from .interfaces.dialect import Dialect
from .interfaces.engine import Engine
from .interfaces.hookspecs import NAME, hookimpl, hookspec
from .interfaces.primitive import Primitive
from .interfaces.program import Boundary, Program, Stage, TieGroup
from .modules.paths import is_module_list
from .registration.registry import Registry, default_registry, list_primitives, register_primitive
from .reporting.errors import BuildError, PluginError, ScheduleError, SlapoError, TraceError, UnknownNameError, VerifyError
from .reporting.logger import get_logger
from .schedules.journal import Journal, Step
from .schedules.schedule import Schedule, ScheduleMetadata, create_schedule
from .schedules.schedule_files import load_schedule
from .schedules.serialization import make

__all__ = [
    "NAME",
    "Boundary",
    "BuildError",
    "Dialect",
    "Engine",
    "Journal",
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
    "build",
    "build_program",
    "create_schedule",
    "default_registry",
    "get_cuda_rng_tracker",
    "get_logger",
    "hookimpl",
    "hookspec",
    "init_empty_weights",
    "is_module_list",
    "is_random_seed_set",
    "list_primitives",
    "load_schedule",
    "make",
    "materialize",
    "register_primitive",
    "set_random_seed",
]
