"""The kernels there are, and their implementations in order of preference."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .implementation import Implementation


@dataclass(frozen=True)
class Kernel:
    """Something models compute.

    Args:
        name: What ``use_kernels`` calls it.
        summary: What it computes.
        implementations: Those of this distribution, the preferred ones first; the last is eager and works everywhere.
        weighed: Which argument's dtype counts.
    """

    name: str
    summary: str
    implementations: tuple[Implementation, ...]
    weighed: int = 0


def _kernel(name: str, summary: str, **implementations: Implementation) -> Kernel:
    everywhere = {**implementations, "eager": Implementation(f"slapo_kernels.eager:{name}")}
    return Kernel(
        name, summary, tuple(_named(name, each, found) for each, found in everywhere.items()), int(name == "embedding")
    )


def _named(kernel: str, name: str, found: Implementation) -> Implementation:
    return replace(found, name=name, kernel=kernel, provider="slapo-kernels")


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _kernel("attention", "softmax(q @ k.T * scale + mask) @ v"),
        _kernel("rotary", "rotary position embedding of q and k"),
        _kernel("rms_norm", "x / rms(x) * weight"),
        _kernel("layer_norm", "(x - mean) / deviation * weight + bias"),
        _kernel("swiglu", "silu(gate) * up"),
        _kernel("geglu", "gelu(gate) * up"),
        _kernel("bias_act", "activation(x + bias)"),
        _kernel("bias_dropout_residual", "residual + dropout(x + bias)"),
        _kernel("linear_cross_entropy", "cross entropy of hidden @ weight.T, without all logits at once"),
        _kernel("embedding", "rows of weight"),
    )
}
"""By name."""
