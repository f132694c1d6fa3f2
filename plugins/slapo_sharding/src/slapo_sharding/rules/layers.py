"""Rules for Linear and Transformers' Conv1D.

Subclasses of Linear whose own forward computes the same, such as Falcon's, are found by a numeric probe. It runs the forward on
random numbers, with no attributes but weight, bias and mode. The forward may only transpose, multiply and add. Its result is
then a polynomial of these numbers, and two polynomials that agree at a random point are equal.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_core import ScheduleError
from slapo_tracing.nodes import as_layer

from .embeddings import EMBEDDING
from .sharding_rule import Cut, ShardingRule, computes_as

_POLYNOMIAL = {
    *(F.linear, torch.matmul, torch.add, torch.addmm, torch.mm, torch.t, torch.transpose, torch.swapaxes),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")),
    *(torch.Tensor.t, torch.Tensor.transpose, torch.Tensor.swapaxes),
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__, torch.Tensor.add, torch.Tensor.__add__),
}
_OF_TRACES = {*vars(fx.GraphModule({}, fx.Graph())), "_traced_class", "_variants", "_version"}
_STATE = {*vars(nn.Linear(1, 1, device="meta")), *_OF_TRACES, "_is_hf_initialized", "forward"}


def computes_linear(module: nn.Linear) -> bool:
    """Return whether the forward of the module's class computes ``input @ weight.T + bias`` for every input."""
    extra = {name for name in vars(module) if name not in _STATE and not name.startswith("_slapo")}
    state = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    return not extra and not state and _is_linear_class(type(module), module.bias is not None)


def only_input(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of a call, whatever its name; raise ``ScheduleError`` for more, which the probe does not cover."""
    signature = inspect.signature(type(module).forward)
    (_, x), *others = list(signature.bind(module, *args, **kwargs).arguments.items())[1:]
    for name, value in others:
        if value is not signature.parameters[name].default:
            given = f"a {type(module).__name__} that is split is called with {name!r} besides the input"
            raise ScheduleError(f"{given}, with which it may compute something that is not split; leave it whole")
    return x


_known: WeakKeyDictionary[type[nn.Linear], dict[bool, bool]] = WeakKeyDictionary()


def _is_linear_class(cls: type[nn.Linear], bias: bool) -> bool:
    known = _known.setdefault(cls, {})
    if bias not in known:
        cases = [(training, shape) for training in (True, False) for shape in ((3,), (2, 3), (2, 4, 3))]
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            known[bias] = all(_agrees(cls, bias, training, shape) for training, shape in cases)
    return known[bias]


def _agrees(cls: Any, bias: bool, training: bool, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.requires_grad_()

    probe: Any = cls.__new__(cls)
    nn.Module.__init__(probe)
    probe.weight = nn.Parameter(draw(5, 3).detach())
    probe.bias = nn.Parameter(draw(5).detach()) if bias else None
    probe.training = training
    numbers = [draw(*shape), *probe.parameters()]
    try:
        with _Polynomials():
            found = probe.forward(numbers[0])
        expected, weights = F.linear(numbers[0], probe.weight, probe.bias), draw(*shape[:-1], 5)
        values = [[of, *torch.autograd.grad((of * weights).sum(), numbers)] for of in (found, expected)]
        return all(one.shape == other.shape and torch.allclose(one, other) for one, other in zip(*values, strict=True))
    except Exception:  # an unknown forward may raise anything without the rest of its module
        return False


class _Polynomials(TorchFunctionMode):
    """Mode that refuses functions other than transposes, products and sums."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _POLYNOMIAL:
            raise TypeError(f"{func} is not a polynomial")
        return func(*args, **(kwargs or {}))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear, or a subclass that computes the same."""
    return computes_as(module, nn.Linear) or (isinstance(module, nn.Linear) and computes_linear(module))


def is_linear_of_op(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of ``slapo.op`` without dropout and ``sync_fn``; compared by name."""
    known = isinstance(module, nn.Linear) and type(module).__module__ == "slapo_kernels.layers.linear"
    return known and getattr(module, "sync_fn", None) is None and not getattr(module, "p", 0)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' Conv1D, a linear layer with ``weight[in, out]``; compared by name."""
    cls = type(as_layer(module))
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def linear_without_bias(module: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a row-parallel Linear: a partial output. A subclass may name its input differently."""
    x = args[0] if len(args) == 1 and not kwargs else only_input(module, args, kwargs)
    return F.linear(x, module.weight)


def conv1d_without_bias(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a row-parallel Conv1D: a partial output."""
    return torch.matmul(x, module.weight)


LINEAR = ShardingRule(
    "Linear",
    is_linear,
    (
        Cut({"weight": 0, "bias": 0}, "replicated", "sharded", ("out_features",), uneven=True),
        Cut({"weight": 1}, "sharded", "partial", ("in_features",), linear_without_bias, late_bias=True, uneven=True),
    ),
)
RULES = (
    LINEAR,
    # an activation needs the reduced sum, so such a layer is split along its output alone
    ShardingRule("LinearWithAct", lambda each: is_linear_of_op(each) and hasattr(each, "activation"), LINEAR.cuts[:1]),
    ShardingRule("LinearWithSeparateBias", is_linear_of_op, LINEAR.cuts),
    EMBEDDING,
    ShardingRule(
        "Transformers Conv1D",
        is_conv1d,
        (
            Cut({"weight": 1, "bias": 0}, "replicated", "sharded", ("nf",), uneven=True),
            Cut({"weight": 0}, "sharded", "partial", ("nx",), conv1d_without_bias, late_bias=True, uneven=True),
        ),
    ),
)
