"""``sch.decompose()``: a layer's bias as an operation of its own, which can be fused with what follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core.errors import ScheduleError
from slapo_core.primitive import Primitive
from slapo_core.schedule import Schedule
from slapo_core.wrapping import is_opaque


class DecomposePrimitive(Primitive):
    """Add the bias of this Linear, Conv1d, Conv2d, or Conv1D of Transformers, apart.

    Rewrite:
        sch["fc1"].decompose():      y = addmm(bias, x, weight)      -->  y = x @ weight + bias

    Weight and bias are the same parameters under the same names; the sum is rounded once more in low precision. A trace that
    goes into the layer has the sum as a node: ``sch.fuse`` takes it together with what follows.

    Raises:
        ScheduleError: another layer, one without bias, padded otherwise than with zeros, or sharded, hooked or wrapped.
    """

    name = "decompose"
    scope = "module"

    @staticmethod
    def check(schedule: Schedule) -> None:
        module: Any = schedule.mod
        cls = _class_for(module)
        if cls is None:
            what = f"a {type(module).__name__} has no bias that can be added apart"
            raise _error(schedule, f"{what}; a Linear, Conv1d, Conv2d or Transformers' Conv1D has")
        if module.bias is None:
            raise _error(schedule, "it has no bias; there is nothing to take apart")
        if getattr(module, "padding_mode", "zeros") != "zeros":
            raise _error(schedule, f"it is padded by {module.padding_mode!r}; only zeros are known here")
        if is_opaque(module):
            raise _error(schedule, "it is sharded, hooked or wrapped; decompose it first")

    @staticmethod
    def apply(schedule: Schedule) -> None:
        cls = _class_for(schedule.mod)
        assert cls is not None
        new: nn.Module = cls.__new__(cls)
        vars(new).update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(schedule.mod).items()}
        )
        schedule.replace_module(new)


class LinearWithSeparateBias(nn.Linear):
    """A Linear: ``(..., in_features)`` to ``(..., out_features)``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input @ weight.T + bias``, in two operations."""
        return F.linear(input, self.weight) + self.bias


class Conv1dWithSeparateBias(nn.Conv1d):
    """A Conv1d: ``(N, C, L)`` or ``(C, L)``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The convolution, then the bias."""
        assert self.bias is not None
        found = F.conv1d(input, self.weight, None, self.stride, self.padding, self.dilation, self.groups)
        return found + self.bias.unsqueeze(-1)


class Conv2dWithSeparateBias(nn.Conv2d):
    """A Conv2d: ``(N, C, H, W)`` or ``(C, H, W)``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The convolution, then the bias."""
        assert self.bias is not None
        found = F.conv2d(input, self.weight, None, self.stride, self.padding, self.dilation, self.groups)
        return found + self.bias.view(-1, 1, 1)


class _Transposed:
    """What the Conv1D of Transformers, whose weight is ``(in, out)``, computes."""

    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight + bias``, in two operations."""
        return torch.matmul(x, self.weight) + self.bias


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LinearWithSeparateBias,
    nn.Conv1d: Conv1dWithSeparateBias,
    nn.Conv2d: Conv2dWithSeparateBias,
}


def _class_for(module: nn.Module) -> type[nn.Module] | None:
    cls = type(module)
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D") and cls not in _CLASSES:
        _CLASSES[cls] = type("Conv1DWithSeparateBias", (_Transposed, cls), {"__module__": __name__})
    return _CLASSES.get(cls)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, path=schedule.path, primitive="decompose")
