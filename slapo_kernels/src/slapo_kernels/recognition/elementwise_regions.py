"""What a few operations between layers compute, told by what they make of numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from slapo_tracing.matching import operator_of

from ..dispatch.dispatcher import run
from ..implementations.eager import ACTIVATIONS
from ..replacements.call_guard import DTYPES
from .forward_observer import ELEMENTWISE, HALVES
from .numeric_comparison import close, equal, quietly, same_gradients

_GATES: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("swiglu", ()),
    ("geglu", (("approximate", "none"),)),
    ("geglu", (("approximate", "tanh"),)),
)
_MORE = 16
"""Batches in one of a probe: of two formulas of one activation, few numbers differ in the last bit."""
_EXTREMES = (0.0, 8.0, -8.0, 12.0, -12.0, 60.0, -60.0, torch.nan)
_LARGE = (120.0, -120.0, 1.1e3, -1.1e3, 1.1e4, -1.1e4)
"""Among the numbers of a probe, the latter at the same places of all inputs: where activations that are clipped differ from
those that are not, and where half precision overflows; bfloat16 does not, but such are all that counts of a distance then."""
_PLACES = 4096
"""Among which the former are spread."""


class Found(NamedTuple):
    """A kernel that computes what a function does.

    Args:
        kernel: Its name.
        options: Of the kernel.
        order: Places of the function's inputs in the kernel's order; of one that takes halves of one value, that one's.
        gate_first: Which half is the gate.
    """

    kernel: str
    options: tuple[tuple[str, Any], ...]
    order: tuple[int, ...]
    gate_first: bool = True

    @property
    def kind(self) -> Any:
        """What it computes, wherever that stands."""
        return self.kernel, self.options, self.gate_first


class Region:
    """Operations of a graph that make one value of others.

    Args:
        root: The module whose graph it is; the modules that the operations call are run.
        output: The value.
        nodes: The operations, in order.
        inputs: The values they start from, in order.
    """

    def __init__(self, root: nn.Module, output: fx.Node, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> None:
        self.root, self.output, self.nodes, self.inputs = root, output, nodes, inputs

    def recognise(self, kinds: Collection[Any] | None = None) -> Found | None:
        """The kernel that computes the same; see ``identify``."""
        calls = [operator_of(node) for node in self.nodes if node.op != "call_module"]
        if not ELEMENTWISE.union(HALVES).issuperset(calls) or any(map(_does_more, self.nodes)):
            return None
        shapes = {tuple(node.meta["val"].shape) for node in self.inputs}
        dtypes = {node.meta["val"].dtype for node in self.inputs}
        if len(shapes) != 1 or len(dtypes) != 1:
            return None
        return identify(self, len(self.inputs), shapes.pop(), dtypes.pop(), kinds)

    def is_still(self, found: Found, dtype: torch.dtype) -> bool:
        """Whether the same kernel computes it in another dtype."""
        shape = tuple(self.inputs[0].meta["val"].shape)
        return identify(self, len(self.inputs), shape, dtype, {found.kind}) is not None

    def __call__(self, *values: torch.Tensor) -> Any:
        """Run the operations."""
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


def identify(
    function: Callable[..., Any], count: int, shape: tuple[int, ...], dtype: torch.dtype, kinds: Collection[Any] | None = None
) -> Found | None:
    """The kernel that computes what a function does, values and gradients: to the bit if one does, or but for rounding.

    Args:
        function: Of ``count`` tensors.
        count: How many.
        shape: Of each; the first dimension may be another.
        dtype: Of each.
        kinds: The only ones it may be.
    """
    if dtype not in DTYPES:
        return None
    shape = (_MORE * shape[0], *shape[1:])
    with quietly():
        values = [_probe(shape, dtype, seed) for seed in range(count)]
        try:
            result = function(*values)
        except Exception:  # whatever it makes of such numbers
            return None
        for alike in (equal, close):
            for found, kernel in _candidates(count, shape):
                if kinds is not None and found.kind not in kinds:
                    continue
                if alike(result, kernel(*values)) and (dtype is torch.bfloat16 or same_gradients(function, kernel, values)):
                    return found
    return None


def _does_more(node: fx.Node) -> bool:
    """Whether a call changes a tensor or a module, or draws random numbers."""
    return bool(node.meta.get("mutates") or node.meta.get("changes") or node.meta.get("draws"))


def _candidates(count: int, shape: tuple[int, ...]) -> Iterator[tuple[Found, Callable[..., Any]]]:
    if count == 1:
        for name in ACTIVATIONS:
            yield Found("bias_act", (("activation", name),), (0,)), _activation(name)
        for kernel, options in _GATES if shape[-1] % 2 == 0 else ():
            for first in (True, False):
                yield Found(kernel, options, (0, 0), first), _halves(kernel, options, first)
    elif count == 2:
        for kernel, options in _GATES:
            for order in ((0, 1), (1, 0)):
                yield Found(kernel, options, order), _gated(kernel, options, order)


def _probe(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of ordinary size, and a few that are not."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cpu") * 2
    flat = numbers.view(-1)
    few = min(flat.numel(), _PLACES)
    places = torch.randperm(few, generator=generator)[: len(_EXTREMES)] * (flat.numel() // few)
    flat[places] = torch.tensor(_EXTREMES[: len(places)])
    if dtype is not torch.bfloat16:
        flat[: len(_LARGE)] = torch.tensor(_LARGE)
    return numbers.to(dtype)


def _activation(name: str) -> Callable[..., Any]:
    return lambda x: run("bias_act", x, None, choice="eager", activation=name)


def _gated(kernel: str, options: Any, order: tuple[int, int]) -> Callable[..., Any]:
    return lambda *values: run(kernel, values[order[0]], values[order[1]], choice="eager", **dict(options))


def _halves(kernel: str, options: Any, gate_first: bool) -> Callable[..., Any]:
    def function(x: torch.Tensor) -> Any:
        first, second = x.chunk(2, dim=-1)
        gate, up = (first, second) if gate_first else (second, first)
        return run(kernel, gate, up, choice="eager", **dict(options))

    return function
