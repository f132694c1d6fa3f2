"""Registration of the primitives and checks of tensor parallelism."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl

from . import hookspecs


@hookimpl
def slapo_primitives() -> dict[str, str]:
    """The tensor-parallel primitives."""
    names = ("fork_rng", "shard", "sync", "sync_batch_norm", "tensor_parallel")
    return {name: f"slapo_sharding.{name}:{name.title().replace('_', '')}Primitive" for name in names}


@hookimpl
def slapo_add_hookspecs(manager: Any) -> None:
    """``slapo_shard_rules``."""
    manager.add_hookspecs(hookspecs)


@hookimpl(trylast=True)
def slapo_shard_rules() -> list[str]:
    """The rules for modules of torch and Transformers."""
    return [
        f"slapo_sharding.rules.{kinds}:RULES" for kinds in ("layers", "convolutions", "norms", "experts", "multihead_attention")
    ]


@hookimpl
def slapo_after_create(schedule: Any) -> None:
    """Record the unmodified model for the checks."""
    from .checks import check_list  # noqa: PLC0415  (finding plugins must stay cheap)

    check_list.record_original_model(schedule)


@hookimpl
def slapo_before_build(schedule: Any, target: str | None, config: dict[str, Any]) -> None:
    """Find the replicas of synced norms, and start the checks."""
    from .checks import check_list  # noqa: PLC0415  (finding plugins must stay cheap)
    from .communication.batch_norm_statistics import resolve_replicas  # noqa: PLC0415

    resolve_replicas(schedule)
    check_list.start_checks(schedule, target, config)
