"""Norms and embeddings, told by what their forward makes of random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..registry import run
from ..swapped import Lookup, Norm
from .copies import bare_copy
from .numbers import close, equal, quietly, same_gradients
from .signatures import tensor_inputs

_SCALES = (1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e-6)
"""Of the rows of a probe: of small ones, the epsilon shows."""


def recognise_norm(module: nn.Module) -> Norm | None:
    """A module with a one-dimensional weight, and perhaps a bias, that computes a norm over the last dimension."""
    names = tensor_inputs(module)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if names is None or len(names) > 1 or weight is None or weight.dim() != 1 or module._modules or module._buffers:
        return None
    if set(module._parameters) - {"weight", "bias"} or (bias is not None and bias.shape != weight.shape):
        return None
    with quietly():
        for exact in (True, False):
            for kernel, options in _forms(module, bias is not None):
                if all(_agrees(module, kernel, options, training, exact) for training in (True, False)):
                    return Norm(names, kernel, options, _packs(module))
    return None


def recognise_embedding(module: nn.Module) -> Lookup | None:
    """An ``nn.Embedding``, or a subclass that keeps its forward, without what a kernel does not do."""
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return None
    return Lookup(("input",))


def _packs(module: nn.Module) -> bool:
    """Whether the result is contiguous where the input is not."""
    probe: Any = bare_copy(module, torch.float32, module.training)
    parameters = vars(probe)["_parameters"]
    parameters.update({name: torch.ones(each.shape) for name, each in parameters.items() if each is not None})
    result: torch.Tensor = probe.forward(torch.ones(2, 3, probe.weight.numel()).transpose(0, 1))
    return result.is_contiguous()


def _forms(module: nn.Module, bias: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernels with options that the module's numbers allow."""
    for eps in dict.fromkeys(value for value in vars(module).values() if type(value) is float and 0 <= value < 1):
        if not bias:
            for offset in (0.0, 1.0):
                for cast in ("input", "weight"):
                    yield "rms_norm", {"eps": eps, "offset": offset, "cast": cast}
        yield "layer_norm", {"eps": eps}


def _agrees(module: nn.Module, kernel: str, options: dict[str, Any], training: bool, exact: bool) -> bool:
    """Whether the module computes the kernel, in single precision and, ``exact`` to the bit, in bfloat16."""
    width, generator = module._parameters["weight"].numel(), torch.Generator().manual_seed(0)  # type: ignore[union-attr]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    scales = torch.tensor(_SCALES).view(2, 3, 1)
    inputs = [draw(2, 3, width) * scales, draw(5, width), draw(2, 1, 2, width)]
    weights = {name: draw(width) for name, tensor in module._parameters.items() if tensor is not None}
    for dtype in (torch.float32, torch.bfloat16):
        probe = bare_copy(module, dtype, training)
        vars(probe)["_parameters"].update({name: nn.Parameter(value.to(dtype)) for name, value in weights.items()})
        own = [probe.weight] if kernel == "rms_norm" else [probe.weight, probe.bias if "bias" in probe._parameters else None]
        alike = equal if exact and dtype is torch.bfloat16 else close
        for x in inputs:
            try:
                found = probe.forward(x.to(dtype))
            except Exception:  # whatever a stranger's forward makes of these numbers
                return False
            if not alike(found, run(kernel, x.to(dtype), *own, choice="eager", **options)):
                return False
    probe = bare_copy(module, torch.float32, training)
    vars(probe)["_parameters"].update({name: nn.Parameter(value) for name, value in weights.items()})
    own = [probe.weight] if kernel == "rms_norm" else [probe.weight, probe.bias if "bias" in probe._parameters else None]
    return same_gradients(
        probe.forward,
        lambda x: run(kernel, x, *own, choice="eager", **options),
        [inputs[1]],
        list(probe.parameters()),
    )
