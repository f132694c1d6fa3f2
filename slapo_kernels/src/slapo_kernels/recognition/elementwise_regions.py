"""Elementwise regions of a graph, matched with a kernel by their results on probe inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_tracing.matching import operator_of

from ..dispatch.dispatcher import run
from ..implementations.eager import ACTIVATIONS
from ..replacements.call_guard import DTYPES
from .forward_observer import ELEMENTWISE, HALVES
from .numeric_comparison import close, equal, probe_context, same_gradients

_GATES: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("swiglu", ()),
    ("geglu", (("approximate", "none"),)),
    ("geglu", (("approximate", "tanh"),)),
)
_PROBE_BATCHES = 16
"""Factor on a probe's batch: two formulas of one activation differ in the last bit of few numbers only."""
_EXTREMES = (0.0, 8.0, -8.0, 12.0, -12.0, 60.0, -60.0, torch.nan)
_LARGE = (120.0, -120.0, 1.1e3, -1.1e3, 1.1e4, -1.1e4)
"""Extreme numbers in a probe; the large ones at the same positions of all inputs. They tell clipped activations from others,
and overflow half precision. Bfloat16 does not overflow, and large numbers would dominate its distance, so it gets none."""
_MAX_EXTREME_POSITIONS = 4096
"""Positions over which ``_EXTREMES`` are spread."""


class KernelMatch(NamedTuple):
    """A kernel that computes the same as a function.

    Args:
        order: Positions of the function's inputs in the kernel's order; the same one twice if both are halves of one input.
        gate_first: Whether the first half is the gate.
    """

    kernel: str
    options: tuple[tuple[str, Any], ...]
    order: tuple[int, ...]
    gate_first: bool = True

    @property
    def kind(self) -> Any:
        """Kernel and options, without the order of inputs."""
        return self.kernel, self.options, self.gate_first


class Region:
    """Nodes of a graph, in order, that compute the value ``output`` from inputs; they call children of ``root``."""

    def __init__(self, root: nn.Module, output: fx.Node, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        self.root, self.output, self.nodes, self.inputs = root, output, nodes, inputs

    def recognise(self, kinds: Collection[Any] | None = None) -> KernelMatch | None:
        """Return the kernel that computes the same; see ``match_kernel``."""
        calls = [operator_of(node) for node in self.nodes if node.op != "call_module"]
        side_effects = any(node.meta.get(effect) for node in self.nodes for effect in ("mutates", "changes", "draws"))
        if not ELEMENTWISE.union(HALVES).issuperset(calls) or side_effects:
            return None
        shapes = {tuple(node.meta["val"].shape) for node in self.inputs}
        dtypes = {node.meta["val"].dtype for node in self.inputs}
        if len(shapes) != 1 or len(dtypes) != 1:
            return None
        return match_kernel(self, len(self.inputs), shapes.pop(), dtypes.pop(), kinds)

    def matches_in(self, found: KernelMatch, dtype: torch.dtype) -> bool:
        """Return whether the same kernel matches in another dtype."""
        shape = tuple(self.inputs[0].meta["val"].shape)
        return match_kernel(self, len(self.inputs), shape, dtype, {found.kind}) is not None

    def __call__(self, *values: torch.Tensor) -> Any:
        known: dict[fx.Node, Any] = dict(zip(self.inputs, values, strict=True))
        for node in self.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            if node.op == "call_module":
                known[node] = self.root.get_submodule(str(node.target))(*args, **kwargs)
            elif node.op == "call_method":
                known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[self.output]


def match_kernel(
    function: Callable[..., Any], count: int, shape: tuple[int, ...], dtype: torch.dtype, kinds: Collection[Any] | None = None
) -> KernelMatch | None:
    """Return the kernel with the same values and gradients as a function: a bitwise match, or one up to rounding, or None.

    The function takes ``count`` tensors of this shape, whose first size may differ. ``kinds`` admits some ``KernelMatch.kind``.
    """
    if dtype not in DTYPES:
        return None
    shape = (_PROBE_BATCHES * shape[0], *shape[1:])
    with probe_context():
        values = [_probe(shape, dtype, seed) for seed in range(count)]
        try:
            result = function(*values)
        except Exception:  # the function is a stranger's and may raise anything
            return None
        for alike in (equal, close):
            for found, kernel in _candidates(count, shape):
                if kinds is not None and found.kind not in kinds:
                    continue
                if alike(result, kernel(*values)) and (dtype is torch.bfloat16 or same_gradients(function, kernel, values)):
                    return found
    return None


def _candidates(count: int, shape: tuple[int, ...]) -> Iterator[tuple[KernelMatch, Callable[..., Any]]]:
    if count == 1:
        for name in ACTIVATIONS:
            found = KernelMatch("bias_act", (("activation", name),), (0,))
            yield found, partial(run, "bias_act", bias=None, choice="eager", activation=name)
        for kernel, options in _GATES if shape[-1] % 2 == 0 else ():
            for first in (True, False):
                yield KernelMatch(kernel, options, (0, 0), first), _halves(kernel, options, first)
    elif count == 2:
        for kernel, options in _GATES:
            for order in ((0, 1), (1, 0)):
                yield KernelMatch(kernel, options, order), _eager_gate(kernel, options, order)


def _probe(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal numbers with a few extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cpu") * 2
    flat = numbers.view(-1)
    few = min(flat.numel(), _MAX_EXTREME_POSITIONS)
    places = torch.randperm(few, generator=generator)[: len(_EXTREMES)] * (flat.numel() // few)
    flat[places] = torch.tensor(_EXTREMES[: len(places)])
    if dtype is not torch.bfloat16:
        flat[: len(_LARGE)] = torch.tensor(_LARGE)
    return numbers.to(dtype)


def _eager_gate(kernel: str, options: Any, order: tuple[int, int]) -> Callable[..., Any]:
    return lambda *values: run(kernel, values[order[0]], values[order[1]], choice="eager", **dict(options))


def _halves(kernel: str, options: Any, gate_first: bool) -> Callable[..., Any]:
    def function(x: torch.Tensor) -> Any:
        first, second = x.chunk(2, dim=-1)
        gate, up = (first, second) if gate_first else (second, first)
        return run(kernel, gate, up, choice="eager", **dict(options))

    return function
