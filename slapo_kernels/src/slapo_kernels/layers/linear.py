"""Linear layers with a separate bias addition, which is fused with the operation that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..dispatch.dispatcher import run
from ..implementations.eager import ACTIVATIONS

Sync = Callable[[torch.Tensor], torch.Tensor]


class LinearWithSeparateBias(nn.Linear):
    """``nn.Linear`` as a matrix product followed by the addition of the bias.

    Args:
        in_features: As ``nn.Linear``, and so are ``out_features``, ``device`` and ``dtype``.
        bias: As ``nn.Linear``; without one there is the product alone.
        sync_fn: Function of the product, such as an all-reduce over ranks that shard the input features; the bias is added to
            its result.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sync_fn: Sync | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if not (sync_fn is None or callable(sync_fn)):
            raise ValueError(f"sync_fn is called with the product, and {sync_fn!r} is not a function")
        self.sync_fn = sync_fn

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, after ``sync_fn``, without the bias."""
        x = F.linear(x, self.weight)
        return x if self.sync_fn is None else self.sync_fn(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        x = self.product(x)
        return x if self.bias is None else x + self.bias


class LinearWithSyncFunc(LinearWithSeparateBias):
    """``LinearWithSeparateBias`` under its established name: ``sync_fn(product) + bias``."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sync_fn={getattr(self.sync_fn, '__name__', self.sync_fn)}"


class LinearWithAct(LinearWithSeparateBias):
    """``activation(linear(x))``, with activation and bias by the kernel ``bias_act``.

    Args:
        in_features: As ``nn.Linear``, and so are ``out_features``, ``bias``, ``device`` and ``dtype``.
        act_fn: Name of the activation: ``"gelu"`` (with erf), ``"gelu_tanh"``, ``"gelu_new"``, ``"quick_gelu"``, ``"relu"``,
            ``"relu2"``, ``"silu"``, or Transformers' ``"gelu_pytorch_tanh"`` and ``"swish"``.
        sync_fn: As ``LinearWithSeparateBias``.

    Raises:
        ValueError: there is no such activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act_fn: str = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sync_fn: Sync | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, sync_fn)
        self.act_fn = act_fn
        self.activation = activation_named(act_fn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        out: torch.Tensor = run("bias_act", self.product(x), self.bias, activation=self.activation)
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act_fn={self.act_fn!r}"


class LinearWithDropout(LinearWithSeparateBias):
    """``dropout(linear(x))``; the masks are those of ``nn.Dropout`` for the same random state.

    Args:
        in_features: As ``nn.Linear``, and so are ``out_features``, ``bias``, ``device`` and ``dtype``.
        p: As ``nn.Dropout``, and so is ``inplace``.
        sync_fn: As ``LinearWithSeparateBias``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        p: float = 0.5,
        inplace: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sync_fn: Sync | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, sync_fn)
        check_probability("p", p)
        self.p, self.inplace = p, inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return F.dropout(super().forward(x), self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, inplace={self.inplace}"


def check_probability(name: str, p: object) -> None:
    """Raise ``ValueError`` unless ``p`` is a number between 0 and 1."""
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"{name} has to be a probability, not {p!r}")


def activation_named(act_fn: str) -> str:
    """Return the kernel's name of an activation; raise ``ValueError`` if there is none."""
    names: dict[str, Any] = {**{name: name for name in ACTIVATIONS}, **_TRANSFORMERS}
    if not isinstance(act_fn, str) or act_fn not in names:
        raise ValueError(f"no activation {act_fn!r}; available: {', '.join(sorted(names))}")
    return str(names[act_fn])


_TRANSFORMERS = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
