"""Linear layers whose bias is an operation of its own, joined with what follows it."""

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
    """``nn.Linear`` as a product, then a sum with the bias.

    Args:
        in_features: As ``nn.Linear``.
        out_features: As ``nn.Linear``.
        bias: As ``nn.Linear``; without one there is the product alone.
        device: As ``nn.Linear``.
        dtype: As ``nn.Linear``.
        sync_fn: Called with the product; the bias is added to what it returns, such as the sum over ranks that hold parts of
            the input features.
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
            raise ValueError(f"sync_fn is called with the product, and {sync_fn!r} is no function")
        self.sync_fn = sync_fn

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Without the bias."""
        x = F.linear(x, self.weight)
        return x if self.sync_fn is None else self.sync_fn(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        x = self.product(x)
        return x if self.bias is None else x + self.bias


class LinearWithSyncFunc(LinearWithSeparateBias):
    """``sync_fn(product) + bias``, by its established name; arguments as ``LinearWithSeparateBias``."""

    def extra_repr(self) -> str:
        """With the function."""
        return f"{super().extra_repr()}, sync_fn={getattr(self.sync_fn, '__name__', self.sync_fn)}"


class LinearWithAct(LinearWithSeparateBias):
    """``activation(linear(x))``, the activation in one with the bias by the kernel ``bias_act``.

    Args:
        in_features: As ``nn.Linear``.
        out_features: As ``nn.Linear``.
        bias: As ``nn.Linear``.
        act_fn: Exactly this one: ``"gelu"`` (with erf), ``"gelu_tanh"``, ``"gelu_new"``, ``"quick_gelu"``, ``"relu"``,
            ``"relu2"``, ``"silu"``; names as Transformers has them, ``"gelu_pytorch_tanh"`` too.
        device: As ``nn.Linear``.
        dtype: As ``nn.Linear``.
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
        """``[..., in_features]`` to ``[..., out_features]``."""
        out: torch.Tensor = run("bias_act", self.product(x), self.bias, activation=self.activation)
        return out

    def extra_repr(self) -> str:
        """With the activation."""
        return f"{super().extra_repr()}, act_fn={self.act_fn!r}"


class LinearWithDropout(LinearWithSeparateBias):
    """``dropout(linear(x))``; the masks are those of ``nn.Dropout`` for the same random state.

    Args:
        in_features: As ``nn.Linear``.
        out_features: As ``nn.Linear``.
        bias: As ``nn.Linear``.
        p: As ``nn.Dropout``.
        inplace: As ``nn.Dropout``.
        device: As ``nn.Linear``.
        dtype: As ``nn.Linear``.
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
        """``[..., in_features]`` to ``[..., out_features]``."""
        return F.dropout(super().forward(x), self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        """With the probability."""
        return f"{super().extra_repr()}, p={self.p}, inplace={self.inplace}"


def check_probability(name: str, p: object) -> None:
    """Refuse what is no probability.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"{name} is a probability, not {p!r}")


def activation_named(act_fn: str) -> str:
    """Return the kernel's name of an activation of Transformers.

    Raises:
        ValueError: the kernel does not know it.
    """
    names: dict[str, Any] = {**{name: name for name in ACTIVATIONS}, **_TRANSFORMERS}
    if not isinstance(act_fn, str) or act_fn not in names:
        raise ValueError(f"no activation {act_fn!r}; available: {', '.join(sorted(names))}")
    return str(names[act_fn])


_TRANSFORMERS = {"gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
