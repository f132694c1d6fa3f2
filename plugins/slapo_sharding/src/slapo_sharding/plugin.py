"""What this distribution adds to Slapo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slapo_core.hookspecs import hookimpl


@hookimpl
def slapo_primitives() -> Mapping[str, str]:
    """The tensor-parallel primitives."""
    return {
        "fork_rng": "slapo_sharding.fork_rng:ForkRngPrimitive",
        "shard": "slapo_sharding.shard:ShardPrimitive",
        "sync": "slapo_sharding.sync:SyncPrimitive",
        "tensor_parallel": "slapo_sharding.tensor_parallel:TensorParallelPrimitive",
    }


@hookimpl
def slapo_before_build(schedule: Any, config: dict[str, Any]) -> None:
    """Refuse shards that lack a sync or that others read; ``check=False`` in the configuration turns this off."""
    from .completeness import check_syncs, cut_modules  # noqa: PLC0415  (finding plugins must stay cheap)
    from .foreign_reads import watch  # noqa: PLC0415

    if config.pop("check", True):
        check_syncs(schedule)
        watch(cut_modules(schedule.root_module))
