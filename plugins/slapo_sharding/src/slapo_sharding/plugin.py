"""Registration of the primitives and checks of tensor parallelism."""

from __future__ import annotations

from typing import Any

from slapo_core import hookimpl

from . import hookspecs
from .build_hooks import slapo_after_create as slapo_after_create
from .build_hooks import slapo_before_build as slapo_before_build


@hookimpl
def slapo_primitives() -> dict[str, str]:
    """Return the tensor-parallel primitives."""
    names = ("fork_rng", "shard", "sync", "sync_batch_norm", "tensor_parallel")
    return {name: f"slapo_sharding.{name}:{name.title().replace('_', '')}Primitive" for name in names}


@hookimpl
def slapo_add_hookspecs(manager: Any) -> None:
    """Add ``slapo_shard_rules`` and ``slapo_layer_backends``."""
    manager.add_hookspecs(hookspecs)


@hookimpl(trylast=True)
def slapo_shard_rules() -> list[str]:
    """Return the rules for modules of torch and Transformers."""
    return [f"slapo_sharding.rules.{kinds}:RULES" for kinds in ("layers", "channels", "experts", "multihead_attention")]
