"""``sch.decompose()``: a layer's bias, or the parts of a fused projection, as separate operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Primitive, Schedule, ScheduleError
from slapo_tracing.nodes import is_opaque
from slapo_tracing.recording import share_hooks


class DecomposePrimitive(Primitive):
    """Separate the bias addition of a Linear, Conv1d, Conv2d or Transformers' Conv1D; or split a fused projection.

    Rewrite:
        sch["fc1"].decompose():              y = addmm(bias, x, weight)   -->  y = x @ weight + bias
        sch["c_attn"].decompose(parts=3):    y = linear(x)                -->  y = cat(q(x), k(x), v(x))

    Weight and bias are the same parameters under the same names; in low precision the sum is rounded once more. A trace into
    the layer has the sum, or each part's product, as a node, which ``sch.fuse`` can fuse with the operations that follow.
    ``sch.fuse(match, compiler="one_matmul")`` joins projections of one input.

    Args:
        parts: For a fused projection, a Linear or Transformers' Conv1D: number of equal parts of its outputs, 3 for queries,
            keys and values, 2 for gate and up; or the sizes of the parts. None separates the bias.

    Raises:
        ScheduleError: another layer; one without a bias, with padding other than zeros, or with an own or wrapped forward;
            parts that do not sum to the outputs; parts of a layer that is sharded or hooked.
    """

    name = "decompose"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule, parts: int | Sequence[int] | None = None) -> None:
        module: Any = schedule.mod
        if not getattr(vars(module).get("forward"), "computes_as_class", "forward" not in vars(module)):
            raise _error(schedule, "its forward was replaced or wrapped, e.g. by a shard of its inputs; decompose it first")
        if parts is not None:
            if is_opaque(module):
                raise _error(schedule, "it is sharded or hooked, and its parts would not be; decompose it first")
            _sizes(schedule, parts)
            return
        cls = _class_for(module)
        if cls is None:
            what = f"a {type(module).__name__} has no bias that can be added apart"
            raise _error(schedule, f"{what}; a Linear, Conv1d, Conv2d or Transformers' Conv1D has")
        if module.bias is None:
            raise _error(schedule, "it has no bias; there is nothing to take apart")
        if getattr(module, "padding_mode", "zeros") != "zeros":
            raise _error(schedule, f"it is padded by {module.padding_mode!r}; only zeros are known here")

    @staticmethod
    def apply(schedule: Schedule, parts: int | Sequence[int] | None = None) -> None:
        cls = _class_for(schedule.mod) if parts is None else _class_in_parts(type(schedule.mod))
        assert cls is not None
        new: Any = cls.__new__(cls)
        state = vars(schedule.mod).items()
        vars(new).update({name: value.copy() if isinstance(value, dict) else value for name, value in state})
        vars(new).pop("forward", None)
        share_hooks(schedule.mod, new)
        if parts is not None:
            new.parts = _sizes(schedule, parts)
        schedule.replace_module(new)


class LinearWithSeparateBias(nn.Linear):
    """``nn.Linear`` with a separate bias addition: ``(..., in_features)`` to ``(..., out_features)``."""

    _slapo_layer_class = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight) + self.bias


class Conv1dWithSeparateBias(nn.Conv1d):
    """``nn.Conv1d`` with a separate bias addition, on ``(N, C, L)`` or ``(C, L)``."""

    _slapo_layer_class = nn.Conv1d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        found = F.conv1d(input, self.weight, None, self.stride, self.padding, self.dilation, self.groups)
        return found + self.bias.unsqueeze(-1)


class Conv2dWithSeparateBias(nn.Conv2d):
    """``nn.Conv2d`` with a separate bias addition, on ``(N, C, H, W)`` or ``(C, H, W)``."""

    _slapo_layer_class = nn.Conv2d

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        found = F.conv2d(input, self.weight, None, self.stride, self.padding, self.dilation, self.groups)
        return found + self.bias.view(-1, 1, 1)


class _SeparateBiasMixin:
    """Transformers' Conv1D, whose weight is ``(in, out)``, with a separate bias addition."""

    _slapo_layer_class: type[nn.Module]
    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight) + self.bias


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LinearWithSeparateBias,
    nn.Conv1d: Conv1dWithSeparateBias,
    nn.Conv2d: Conv2dWithSeparateBias,
}


def _class_for(module: nn.Module) -> type[nn.Module] | None:
    cls = type(module)
    if _is_transposed(cls) and cls not in _CLASSES:
        _CLASSES[cls] = type(
            "Conv1DWithSeparateBias", (_SeparateBiasMixin, cls), {"__module__": __name__, "_slapo_layer_class": cls}
        )
    return _CLASSES.get(cls)


class _OutputPartsMixin:
    """Mixin of a projection that computes contiguous parts of its outputs separately.

    Attributes:
        parts: Number of outputs of each part.
    """

    parts: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None
    outputs_first: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.outputs_first else self.weight.T
        if weight.shape[0] != sum(self.parts):
            what = f"a projection in parts of {', '.join(map(str, self.parts))} outputs has {weight.shape[0]} now"
            advice = "leave decompose(parts=) out where a projection is sharded"
            raise ScheduleError(f"{what}; {advice}", primitive="decompose")
        weights = torch.split(weight, list(self.parts))
        biases = (None,) * len(self.parts) if self.bias is None else torch.split(self.bias, list(self.parts))
        return torch.cat([F.linear(input, part, bias) for part, bias in zip(weights, biases, strict=True)], dim=-1)


_IN_PARTS: dict[type[nn.Module], type[nn.Module]] = {}


def _is_transposed(cls: type[nn.Module]) -> bool:
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _class_in_parts(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _IN_PARTS:
        own = {"__module__": __name__, "outputs_first": not _is_transposed(cls)}
        _IN_PARTS[cls] = type(f"{cls.__name__}InParts", (_OutputPartsMixin, cls), own)
    return _IN_PARTS[cls]


def _sizes(schedule: Schedule, parts: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of outputs of each part."""
    module: Any = schedule.mod
    cls = type(module)
    if cls is not nn.Linear and not _is_transposed(cls):
        what = f"a {cls.__name__} is not a projection that parts can be taken of"
        raise _error(schedule, f"{what}; a Linear or Transformers' Conv1D is")
    outputs = module.weight.shape[0 if cls is nn.Linear else 1]
    if type(parts) is int and parts > 1 and outputs % parts == 0:
        return (outputs // parts,) * parts
    sizes = tuple(parts) if isinstance(parts, Sequence) and not isinstance(parts, str) else ()
    if len(sizes) < 2 or not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != outputs:
        advice = "give a number of parts that divides them, or sizes that add up"
        raise _error(schedule, f"parts is {parts!r}, of {outputs} outputs; {advice}")
    return sizes


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="decompose")
