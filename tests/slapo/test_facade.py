"""``import slapo``: every documented name, what serves it, and what to install for the rest."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import slapo
from slapo import public_names

DOCUMENTED = {
    "Database": "slapo_tune",
    "Estimate": "slapo_plan",
    "FunctionType": "types",
    "Hardware": "slapo_plan",
    "ModulePattern": "slapo_tracing",
    "OrderedDict": "collections",
    "Pattern": "slapo_tracing",
    "Plan": "slapo_plan",
    "ScheduleMetadata": "slapo_core",
    "Space": "slapo_tune",
    "Symbol": "slapo_tune",
    "analyze_tie_weights": "slapo_pipeline.partition",
    "calibrate": "slapo_plan",
    "checkpoint": "slapo_memory.forward_wrappers.recomputation",
    "consolidate_model": "slapo_weights",
    "create_schedule": "slapo_core",
    "dataclass": "dataclasses",
    "estimate": "slapo_plan",
    "fake_ranks": "slapo_plan",
    "field": "dataclasses",
    "get_cuda_rng_tracker": "slapo_core",
    "get_dialect_cls": "slapo.framework_dialect",
    "get_logger": "slapo_core",
    "init_empty_weights": "slapo_core",
    "init_target_engine": "slapo.framework_dialect",
    "is_module_list": "slapo_core",
    "is_random_seed_set": "slapo_core",
    "list_primitives": "slapo_core",
    "partial": "functools",
    "plan": "slapo_plan",
    "register_primitive": "slapo_core",
    "set_random_seed": "slapo_core",
    "trace": "slapo_tracing",
    "trace_module": "slapo_tracing",
}
"""Documented name to what serves it."""


MODULES = {
    "autotune": {"Database", "Space", "Symbol"},
    "framework_dialect": {"get_all_dialects", "get_dialect_cls"},
    "initialization": {"init_empty_weights"},
    "logger": {"get_logger"},
    "model_schedule": {"apply_schedule", "get_schedule", "register_schedule"},
    "op": {
        "FlashAttention",
        "FlashAttentionOp",
        "FusedMLP",
        "FusedQKV",
        "LinearWithAct",
        "LinearWithDropout",
        "LinearWithSeparateBias",
        "LinearWithSyncFunc",
        "ParallelCrossEntropy",
        "Print",
    },
    "pattern": {"ModulePattern", "Pattern", "call_module"},
    "pipeline": {
        "DetachExecutor",
        "LossWrapper",
        "MultiUseParameterConfig",
        "Pipe",
        "PipeSequential",
        "PipeSplitWrapper",
        "SplitPoint",
        "TrivialLossWrapper",
        "add_partition_notation",
        "analyze_pipeline_module",
        "analyze_tie_weights",
        "annotate_split_points",
        "build_pipeline_model",
        "build_program",
        "build_stage",
        "describe",
        "generate_pipeline_partition",
        "get_submod_name",
        "pipe_split",
        "pipeline",
        "program_of_pipe",
        "propagate_partition",
        "stage_code",
    },
    "primitives": {"Primitive", "register_primitive"},
    "random": {"get_cuda_rng_tracker", "is_random_seed_set", "set_random_seed"},
    "schedule": {"Schedule", "ScheduleMetadata", "create_schedule", "list_primitives"},
    "sharding": {
        "all_gather_forward_output",
        "reduce_backward_grad",
        "reduce_forward_output",
        "reduce_scatter_forward_output",
        "register_shard_method",
        "scatter_forward_output",
        "sync_ops",
    },
    "tracer": {"trace", "trace_module"},
    "utils": {"decoder_flops", "get_hooks", "profile_perf", "report_memory", "report_time", "transfer_hooks"},
}
"""Documented submodule to names in it."""


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_documented_name_is_served(name: str) -> None:
    home = importlib.import_module(DOCUMENTED[name])
    assert getattr(slapo, name) is getattr(home, name)
    assert name in slapo.__all__
    assert name in dir(slapo)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(slapo, "create_shedule")
    with pytest.raises(ImportError, match="cannot import name 'create_shedule'"):
        exec("from slapo import create_shedule")  # noqa: S102


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_documented_module_is_there(name: str) -> None:
    module = importlib.import_module(f"slapo.{name}")
    assert getattr(slapo, name) is module
    assert set(module.__all__) >= MODULES[name]
    assert all(getattr(module, name) is getattr(slapo, name) for name in module.__all__ if name in slapo.__all__)


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse(Path(slapo.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    imported.pop("ModuleType")
    assert imported == {name: public_names.NAME_ORIGINS.get(name, "slapo_core") for name in slapo.__all__}
    assert sorted(MODULES) == sorted(public_names.DOCUMENTED_MODULES)


def test_a_primitive_of_the_same_name_does_not_get_in_the_way() -> None:
    code = "import slapo; slapo.list_primitives(name_only=False); import slapo_memory.checkpoint"
    assert run(f"{code}; print(type(slapo.checkpoint).__name__)") == "function"


def test_star_import_gives_everything() -> None:
    space: dict[str, object] = {}
    exec("from slapo import *", space)  # noqa: S102
    assert set(slapo.__all__) <= set(space)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"torch", "slapo_core", "transformers", "typer", "rich"}
    assert run(f"import slapo, sys; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_using_it_imports_no_model_library_and_no_terminal() -> None:
    code = "import slapo, sys; [getattr(slapo, name) for name in (*slapo.__all__, *slapo.public_names.DOCUMENTED_MODULES)]"
    heavy = {"transformers", "typer", "rich", "triton"}
    assert run(f"{code}; slapo.list_primitives(); print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_a_package_that_is_not_installed_is_named() -> None:
    code = "import sys, slapo; sys.modules['slapo_memory'] = None"
    trial = "try: slapo.checkpoint\nexcept ImportError as err: print(err)"
    assert run(f"{code}\n{trial}") == "slapo.checkpoint needs slapo_memory; pip install slapo-memory"


@pytest.mark.parametrize("trial", ["from slapo import op", "import slapo.op"])
def test_the_classic_modules_name_the_package_they_are_in(trial: str) -> None:
    code = "import sys, slapo; sys.modules['slapo_kernels'] = None"
    caught = f"try: {trial}\nexcept ImportError as err: print(err)"
    assert run(f"{code}\n{caught}") == "slapo.op needs slapo_kernels; pip install slapo-kernels"
