"""Megatron-Core's own parallel layers in place of sharded ones: ``tensor_parallel(backend="megatron")``.

A Megatron layer is made without weights and takes those of the sharded layer. It gets the schedule's group, so that
Megatron's ``parallel_state`` need not be set up. A column-parallel layer that alone reads its input all-reduces the
input's gradient while it computes the weight's, as Megatron does. Layers that share an input leave this all-reduce to the
schedule, which runs one for all of them.

Norms stay as they are. Without Apex and Transformer Engine, Megatron's norms are ``torch.nn.LayerNorm``, which models
already use, and ``torch.nn.RMSNorm``, which rounds differently from the models' own in low precision. With
``tensor_parallel(parallel_loss=True)`` and bfloat16 logits, the loss is Megatron's fused one: ``FusedLosses``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from slapo_core import ShardSpec, get_logger
from slapo_training.engines import without_warnings

from ..process_state._megatron_private import has_fused_norms, mark_shards
from .parallel_layers import FusedLosses, layer_classes

_UNEVEN = "its parts are not equal on all ranks, or some are copies"
_OF_EVERY_MODULE = {*vars(nn.Module()), "forward"}


def engine_layer(module: nn.Module, kind: str, spec: ShardSpec, *, sums_gradient: bool) -> nn.Module | str:
    """Return Megatron's layer for a sharded one, or the reason why there is none.

    Args:
        kind: ``"columns"``, ``"rows"``, ``"vocabulary"``, or ``"loss"`` for the module that computes the token losses.
        spec: The shard of its weight; for a loss, the shard of the head's weight.
        sums_gradient: For columns: True if the layer has to all-reduce the gradient of its input.
    """
    _tell_of_norms()
    if kind == "loss":
        return FusedLosses(module, spec) if spec.uneven_ranges is None else _UNEVEN
    if (why := _mismatch(module, kind, spec)) is not None:
        return why
    layer = _make_layer(module, kind, spec, sums_gradient)
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    for name, value in own.items():
        if not name.startswith("_slapo"):
            vars(layer).setdefault(name, value)
    for name, parameter in module.named_parameters():
        setattr(layer, name, parameter)
    mark_shards(layer)
    return layer


@cache
def _tell_of_norms() -> None:
    if has_fused_norms():
        get_logger().info("norms stay the model's own, though Megatron-Core has fused ones here")


def _mismatch(module: nn.Module, kind: str, spec: ShardSpec) -> str | None:
    """Return the reason why no layer of Megatron's computes the same result, or None."""
    if type(module) is not (nn.Embedding if kind == "vocabulary" else nn.Linear):
        return f"Megatron-Core has no layer for a {type(module).__name__}"
    if spec.uneven_ranges is not None:
        return _UNEVEN
    if len(spec.blocks) > 1:
        return f"it is fused of {len(spec.blocks)} blocks, each split for itself"
    if {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}:
        return "it holds more than weight and bias"
    return None


def _make_layer(module: Any, kind: str, spec: ShardSpec, sums_gradient: bool) -> nn.Module:
    """Make a layer without weights, on the meta device."""
    make, sizes = layer_classes()[kind], spec.full_shape
    given: dict[str, Any] = {"config": _config(spec.num_shards, module.weight.dtype), "tp_group": spec.group}
    if kind != "vocabulary":
        sizes = (sizes[1], sizes[0])
        given |= {"bias": module.bias is not None, "skip_bias_add": kind == "columns"}
    given |= {
        "vocabulary": {},
        "columns": {"disable_grad_reduce": not sums_gradient},
        "rows": {"input_is_parallel": True},
    }[kind]
    with torch.device("meta"):
        layer: nn.Module = make(*sizes, init_method=lambda weight: None, **given)
    layer._load_state_dict_pre_hooks.clear()  # it handles an extra state of Transformer Engine
    return layer


@cache
def _config(ranks: int, dtype: torch.dtype) -> Any:
    """Return the config that Megatron's layers read; all layers of a model share one object."""
    with without_warnings():
        from megatron.core.model_parallel_config import ModelParallelConfig
    return ModelParallelConfig(
        tensor_model_parallel_size=ranks, params_dtype=dtype, use_cpu_initialization=True, perform_initialization=False
    )
