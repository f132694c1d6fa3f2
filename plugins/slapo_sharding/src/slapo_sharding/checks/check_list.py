"""Names of all checks of this package, and the one place that starts them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from slapo_core import Schedule
from slapo_training.options import disabled_checks, log_disabled_checks, register_checks

from ..rules.sharding_rule import split_of
from .build_check import check_shared_memory, check_syncs, is_synced, note_shared_memory
from .first_run_check import install_first_run_check
from .module_rerun import record_sizes

CHECKS = {
    "syncs": "shards that lack a sync, and syncs that are doubled, impossible or reduce equal values, are then not seen",
    "shared_memory": "parameters that are views of one memory are then trained apart",
    "weights": "ranks that made different models are then not seen",
    "shard_reads": "code outside a sharded module that takes its shard for the whole parameter is then not seen",
    "values": "code that needs other ranks' parts of a sharded or partial value is then not seen",
    "random": "random numbers that ranks draw alike for shards, or differently for equal values, are then not seen",
    "gradients": "partial gradients that no sync sums, or that meet whole ones, are then not seen",
    "comparison": "code that computes something else on parts, where no rule of torch tells, is then not seen",
    "sizes": "errors of sizes then name neither the module nor the missing sync",
}
"""Each check with the faults that nobody sees without it. The first two run at ``build``, the others in the first runs."""
FIRST_RUN = frozenset(CHECKS) - {"syncs", "shared_memory"}


def record_original_model(schedule: Schedule) -> None:
    """Record what the checks need of the unmodified model: its sizes, and which tensors share memory."""
    note_shared_memory(schedule.mod)
    record_sizes(schedule.mod)


def start_checks(schedule: Schedule, target: str | None, config: dict[str, Any]) -> None:
    """Make the checks of ``build``, and let the first runs of the model be checked.

    ``check=`` and ``SLAPO_DISABLE_CHECKS`` switch checks off. The option is taken out of ``config`` where no engine reads it.

    Raises:
        BuildError: a check fails, or no check has a name that is to be switched off.
    """
    register_checks(CHECKS)
    disabled = [name for name in disabled_checks(config.get("check", True)) if name in CHECKS]
    root = schedule.root_module
    checked = [module for module in root.modules() if split_of(module) is not None or is_synced(module)]
    if checked:
        log_disabled_checks(disabled, extra={"another_rank": dist.is_initialized() and dist.get_rank() != 0})
    if "syncs" not in disabled:
        check_syncs(schedule)
    if not FIRST_RUN.issubset(disabled):
        install_first_run_check(root, checked, frozenset(disabled))
    if "shared_memory" not in disabled and not _trains_whole_replicas(schedule, target, config):
        check_shared_memory(root)
    if target is None or not schedule.registry.get("dialect", target).takes_check:
        config.pop("check", None)


def _trains_whole_replicas(schedule: Schedule, target: str | None, config: dict[str, Any]) -> bool:
    mesh = schedule.mesh
    if mesh is None or "dp" not in (mesh.mesh_dim_names or ()) or mesh["dp"].size() != dist.get_world_size():
        return False
    return target is None or schedule.registry.get("dialect", target).trains_in_place(**config)
