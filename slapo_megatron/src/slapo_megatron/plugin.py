"""Hook implementations of this plugin."""

from __future__ import annotations

from slapo_core import hookimpl


@hookimpl
def slapo_dialects() -> dict[str, str]:
    return {"megatron": "slapo_megatron.dialect:MegatronDialect"}


@hookimpl(optionalhook=True)
def slapo_layer_backends() -> dict[str, str]:
    return {"megatron": "slapo_megatron.layer_backend:engine_layer"}
