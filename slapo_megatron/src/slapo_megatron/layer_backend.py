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

import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import ScheduleError, ShardSpec, get_logger
from slapo_training.engines import without_warnings

from .process_state._megatron_private import (
    fused_cross_entropy,
    has_fused_norms,
    mark_shards,
    row_parallel_linear,
    silence_cuda_advice,
)

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
    given |= {"vocabulary": {}, "columns": {"disable_grad_reduce": not sums_gradient}, "rows": {"input_is_parallel": True}}[
        kind
    ]
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


@cache
def layer_classes() -> dict[str, Any]:
    """Return the classes for ``"columns"``, ``"rows"`` and ``"vocabulary"``, which an unmodified model calls.

    They take one tensor and return one, and differ from Megatron's layers in these points:

    - Inputs may have any number of dimensions.
    - A bias may be trained beside a frozen weight.
    - The input's gradient is not all-reduced if nothing needs it.
    - An embedding's padding row is not trained, and an index outside of the table is an error.
    - Copies of a model share the process group.
    - A gradient of a gradient is an error; Megatron would compute it without its all-reduces.
    """
    with without_warnings():
        from megatron.core import tensor_parallel as megatron
    if not torch.cuda.is_available():
        silence_cuda_advice()

    class ColumnParallel(_ParallelLayer, megatron.ColumnParallelLinear, _Linear):  # type: ignore[misc]
        """Linear with the rows of its weight sharded, and therefore the columns of its output."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            _check_autocast(input)
            self.allreduce_dgrad = input.requires_grad and not self.disable_grad_reduce
            output, bias = super().forward(_two_dimensional(input))
            output = _restore_shape(input, refuse_double_backward(output))
            return output if bias is None else output + bias

    class RowParallel(_ParallelLayer, row_parallel_linear(), _Linear):  # type: ignore[misc]
        """Linear with the columns of its weight and its input sharded; the output is all-reduced."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            _check_autocast(input)
            return _restore_shape(input, refuse_double_backward(super().forward(_two_dimensional(input))[0]))

    class VocabParallel(_ParallelLayer, megatron.VocabParallelEmbedding, _Embedding):  # type: ignore[misc]
        """Embedding with the rows of its table sharded; the output is all-reduced."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            # fails as the whole table would: Megatron takes an index outside of the table for another rank's row
            F.embedding(input, torch.zeros((), device=input.device).expand(self.num_embeddings, 1))
            output = _restore_shape(input.unsqueeze(-1), refuse_double_backward(super().forward(input)))
            if self.padding_idx is None:
                return output
            return torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)

    return {"columns": ColumnParallel, "rows": RowParallel, "vocabulary": VocabParallel}


class _Linear(nn.Linear):
    """Base that makes a layer pass ``isinstance(module, nn.Linear)``, as initializers ask, without weights of its own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Embedding(nn.Embedding):
    """Base that makes a layer pass ``isinstance(module, nn.Embedding)``, without weights of its own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class _ParallelLayer:
    """Base of all layers: a copy shares the process group, and the parameters are the only state."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for shared in ("tp_group", "config"):
            if (value := vars(self).get(shared)) is not None:
                memo[id(value)] = value
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("what is sharded cannot be pickled with its process group; save state_dict() or full_state()")


def _two_dimensional(input: torch.Tensor) -> torch.Tensor:
    """Flatten all dimensions but the last: Megatron's backward takes 2 or 3, and its all-reduce a contiguous output."""
    return input.reshape(input.shape[:-1].numel(), input.shape[-1])


def _restore_shape(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the output in the input's shape; unlike a view of a Megatron function's output, it may be changed in place."""
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(output, (*input.shape[:-1], output.shape[-1]))
    return shaped


def refuse_double_backward(output: torch.Tensor) -> torch.Tensor:
    """Return the output with a hook that refuses a graph of its gradient."""
    if output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]
    return output


def _refuse_graph(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise ScheduleError(
            "what Megatron-Core computes has no gradient of its gradient, as create_graph=True asks for; leave out backend"
        )


def _check_autocast(input: torch.Tensor) -> None:
    """Refuse autocast on a CPU: Megatron's backward re-enters autocast for CUDA only."""
    if input.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        raise ScheduleError(
            "layers of Megatron-Core do not run under autocast on a CPU; give the model the dtype itself, or leave out backend"
        )


class FusedLosses(nn.Module):
    """Token losses by Megatron's fused function, from this rank's columns of the logits; all shards have the same size.

    Only bfloat16 logits use it, because Megatron rounds their gradient to bfloat16; the module ``others`` serves other types
    and empty batches. This module adds ignored targets, and an error for targets outside of the vocabulary, for which Megatron
    would return only the logarithm of the sum. Megatron's ``vocab_parallel_cross_entropy`` takes no process group but that of
    ``parallel_state``, and overwrites float32 logits.
    """

    def __init__(self, others: nn.Module, spec: ShardSpec) -> None:
        super().__init__()
        self.others, self.spec, self.fused = others, spec, fused_cross_entropy()

    def forward(self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Return float32 losses ``[tokens]`` of logits ``[tokens, columns]``; 0 for ignored targets."""
        if logits.dtype is not torch.bfloat16 or not target.numel():
            losses: torch.Tensor = self.others(logits, target, ignore_index)
            return losses
        size, ignored = self.spec.full_shape[0], target == ignore_index
        compiling = torch.compiler.is_compiling()
        if not compiling and bool((~ignored & ((target < 0) | (target >= size))).any()):
            raise IndexError(f"a target is outside of the vocabulary of {size} and is not ignore_index ({ignore_index})")
        if logits.device.type == "cpu" and not compiling:
            losses = _EagerCrossEntropy.apply(self.fused, logits, target, self.spec.group)  # type: ignore[no-untyped-call]
        else:
            losses = self.fused(logits, target, self.spec.group)
        if losses.requires_grad and not compiling:
            losses.register_hook(_SingleBackwardHook())  # type: ignore[no-untyped-call]
        return refuse_double_backward(losses).masked_fill(ignored, 0)


class _SingleBackwardHook:
    """Gradient hook that refuses a second backward: Megatron's first one overwrites its saved tensors."""

    done = False

    def __call__(self, grad: torch.Tensor) -> None:
        if self.done:
            raise ScheduleError("Megatron-Core's loss has one backward, as retain_graph=True asks for two; leave out backend")
        self.done = True


class _EagerCrossEntropy(torch.autograd.Function):
    """Autograd node that runs Megatron's function without its ``torch.compile``, which on a CPU needs a C++ compiler."""

    @staticmethod
    def forward(ctx: Any, fused: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            ctx.logits = logits.detach().requires_grad_()
            ctx.losses = fused(ctx.logits, target, group)
        losses: torch.Tensor = ctx.losses.detach()
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        with torch.compiler.set_stance("force_eager"):
            (found,) = torch.autograd.grad(ctx.losses, ctx.logits, grad)
        return None, found, None, None
