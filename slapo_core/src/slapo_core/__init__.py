"""Schedule language for training large PyTorch models. Plugins import the names in ``__all__``."""

from . import hookspecs
from .building.build import BuildPlan, build, build_program
from .building.weights import init_empty_weights, materialize
from .distributed.agreement import agree_on_error, compare_across_ranks, gather_objects, mesh_groups, raise_on_all_ranks
from .distributed.random import (
    MODEL_PARALLEL_RNG,
    RNGState,
    RNGTracker,
    get_cuda_rng_tracker,
    is_random_seed_set,
    rng_state,
    set_random_seed,
    set_rng_state,
)
from .hookspecs import hookimpl, hookspec
from .interfaces.codec import Codec
from .interfaces.dialect import Dialect
from .interfaces.engine import Engine, PlainEngine
from .interfaces.primitive import Primitive, call_signature
from .interfaces.program import Boundary, Program, Stage, TieGroup
from .modules import paths
from .modules.forward_arguments import call_arguments, forward_signature, named_inputs, split_inputs
from .modules.holders import HOOK_TABLES
from .modules.parameters import ParameterFacts, ShardSpec, is_sharded, parameter_facts, shard_spec, successor
from .modules.paths import is_module_list
from .registration.entries import Entry, lazy_names
from .registration.plugins import PluginRecord
from .registration.registry import Registry, default_registry, list_primitives, register_primitive, use_registry
from .reporting.errors import (
    BuildError,
    PluginError,
    ScheduleError,
    SlapoError,
    TraceError,
    UnknownNameError,
    VerifyError,
    failure_reason,
)
from .reporting.logger import get_logger
from .schedules.journal import Journal, Step
from .schedules.load_schedule import load_schedule
from .schedules.schedule import Schedule, create_schedule
from .schedules.serialization import make, round_trip
from .schedules.steps import ScheduleMetadata, savepoint
from .schedules.transaction import Transaction

__all__ = [
    "Boundary",
    "BuildError",
    "BuildPlan",
    "Codec",
    "Dialect",
    "Engine",
    "Entry",
    "HOOK_TABLES",
    "Journal",
    "MODEL_PARALLEL_RNG",
    "ParameterFacts",
    "PlainEngine",
    "PluginError",
    "PluginRecord",
    "Primitive",
    "Program",
    "RNGState",
    "RNGTracker",
    "Registry",
    "Schedule",
    "ScheduleError",
    "ScheduleMetadata",
    "ShardSpec",
    "SlapoError",
    "Stage",
    "Step",
    "TieGroup",
    "TraceError",
    "Transaction",
    "UnknownNameError",
    "VerifyError",
    "build",
    "build_program",
    "call_arguments",
    "call_signature",
    "compare_across_ranks",
    "create_schedule",
    "default_registry",
    "agree_on_error",
    "failure_reason",
    "forward_signature",
    "gather_objects",
    "get_cuda_rng_tracker",
    "get_logger",
    "hookimpl",
    "hookspec",
    "hookspecs",
    "init_empty_weights",
    "is_module_list",
    "is_random_seed_set",
    "is_sharded",
    "lazy_names",
    "list_primitives",
    "load_schedule",
    "make",
    "materialize",
    "mesh_groups",
    "named_inputs",
    "parameter_facts",
    "paths",
    "raise_on_all_ranks",
    "register_primitive",
    "round_trip",
    "rng_state",
    "savepoint",
    "set_random_seed",
    "set_rng_state",
    "shard_spec",
    "split_inputs",
    "successor",
    "use_registry",
]
