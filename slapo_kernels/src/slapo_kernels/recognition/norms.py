"""Recognition of norms and embeddings, by the calls of their forward and its results on random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..dispatch.dispatcher import run
from ..replacements.call_guard import DTYPES, CallGuard, attributes_are_comparable
from ..replacements.kernel_modules import EmbeddingForward, NormForward
from ..replacements.meta_copies import meta_copy
from .forward_observer import NORM, TYPICAL_BATCH, StableCalls, tensor_inputs
from .numeric_comparison import close, equal_but_last_bit, probe_context, same_gradients

_SCALES = (1.0, 30.0, 1e-2, 1e-3, 1e-4, 1e-6)
"""Scales of the rows of a probe; the results of small rows depend on the epsilon."""
_SHAPES = ((2, 3), (5,), (2, 1, 2))
"""Batch shapes of probes."""


def recognise_norm(module: nn.Module) -> NormForward | None:
    """Return the forward of a module with a one-dimensional weight, and maybe a bias, that computes a norm; or None."""
    names = tensor_inputs(module)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if names is None or len(names) > 1 or weight is None or weight.dim() != 1 or module._modules or module._buffers:
        return None
    if set(module._parameters) - {"weight", "bias"} or (bias is not None and bias.shape != weight.shape):
        return None
    with probe_context():
        first = StableCalls.observe(module, torch.float32, weight.shape, NORM)
        if first is None or not attributes_are_comparable(module, first.reads):
            return None
        forms = [
            form for form in _candidate_kernels(module, bias is not None) if _agrees(module, *form, torch.float32, first.dims)
        ]
        others = {dtype: StableCalls.observe(module, dtype, weight.shape, NORM) for dtype in DTYPES[1:] if forms}
        found: list[tuple[int, NormForward]] = []
        for form in forms:
            seen = {torch.float32: first}
            for dtype, other in others.items():
                if other is not None and other.dims == first.dims and _agrees(module, *form, dtype, first.dims):
                    seen[dtype] = other
            reads = {read for each in seen.values() for read in each.reads}
            guard = CallGuard(tuple(seen), first.dims, tuple(sorted(reads)))
            found.append((len(seen), NormForward(names, *form, _has_contiguous_output(module), guard)))
    return max(found, key=lambda each: each[0])[1] if found else None


def recognise_embedding(module: nn.Module) -> EmbeddingForward | None:
    """Return the forward of an ``nn.Embedding`` or subclass with its forward, and no option but ``padding_idx``; or None."""
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    if not plain or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return None
    return EmbeddingForward(("input",))


def _has_contiguous_output(module: nn.Module) -> bool:
    """Return whether the result is contiguous for a non-contiguous input."""
    probe: Any = meta_copy(module, torch.float32, module.training)
    parameters = vars(probe)["_parameters"]
    parameters.update({name: torch.ones(each.shape) for name, each in parameters.items() if each is not None})
    result: torch.Tensor = probe.forward(torch.ones(2, 3, probe.weight.numel()).transpose(0, 1))
    return result.is_contiguous()


def _candidate_kernels(module: nn.Module, bias: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kernels with the options that the module's attributes allow: each small float may be the epsilon."""
    for eps in dict.fromkeys(value for value in vars(module).values() if type(value) is float and 0 <= value < 1):
        if not bias:
            for offset in (0.0, 1.0):
                for cast in ("input", "weight"):
                    yield "rms_norm", {"eps": eps, "offset": offset, "cast": cast}
        yield "layer_norm", {"eps": eps}


def _agrees(module: nn.Module, kernel: str, options: dict[str, Any], dtype: torch.dtype, dims: tuple[int, ...]) -> bool:
    """Return whether the kernel has the module's results in both modes: close in float32, else equal but for last bits."""
    width, generator = module._parameters["weight"].numel(), torch.Generator().manual_seed(0)  # type: ignore[union-attr]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    inputs = [draw(*shape, width) for shape in _SHAPES]
    inputs[0] *= torch.tensor(_SCALES).view(*TYPICAL_BATCH, 1)
    inputs = [each.to(dtype) for each in inputs if each.dim() in dims]
    weights = {name: draw(width).to(dtype) for name, tensor in module._parameters.items() if tensor is not None}
    for training in (True, False):
        probe: Any = meta_copy(module, dtype, training)
        vars(probe)["_parameters"].update({name: nn.Parameter(value) for name, value in weights.items()})
        own = [probe.weight] if kernel == "rms_norm" else [probe.weight, probe.bias if "bias" in probe._parameters else None]

        def compute(x: torch.Tensor, own: list[Any] = own) -> Any:
            return run(kernel, x, *own, choice="eager", **options)

        alike = close if dtype is torch.float32 else equal_but_last_bit
        try:
            if not all(alike(probe.forward(x), compute(x)) for x in inputs):
                return False
        except Exception:  # a stranger's forward may raise anything
            return False
        if dtype is torch.float32 and not same_gradients(probe.forward, compute, inputs[1:2], list(probe.parameters())):
            return False
    return True
