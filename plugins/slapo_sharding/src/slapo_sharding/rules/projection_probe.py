"""Numeric probe that finds how a projection can be split: which tensors, and along which dimensions."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from ..communication.sharded_weight_norm import given_norms, recorded_norms, reduced_norms
from .parametrizations import piece_of
from .sharding_rule import Cut, applied_cut, holder_of, tensor_of

_INPUTS = (((2, 3), 1.0), ((5,), 1e5))
"""Shapes and magnitudes of inputs; the large one finds code that clips values."""
_LARGE = 1e2
"""Factor of the weights in one more case, which finds a bound on their norm."""
_TOLERANCE = 1e-5
NAMES = (("in_features", "infeatures", "in_dim", "input_size"), ("out_features", "outfeatures", "out_dim", "output_size"))
"""Attributes that hold the width of the input, and of the output."""


def row_parallel_forward(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a row-parallel projection with an added term: each rank adds an equal share of the term."""
    applied = applied_cut(module)
    assert applied is not None
    return _with_shared_term(module, x, applied.spec.num_shards, *args, **kwargs)


def _with_shared_term(module: Any, x: torch.Tensor, ranks: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    forward = type(module).forward
    nothing = x.new_zeros(*(1,) * (x.dim() - 1), x.shape[-1])
    added = forward(module, nothing, *args, **kwargs)
    found: torch.Tensor = forward(module, x, *args, **kwargs)
    part: torch.Tensor = found - added * ((ranks - 1) / ranks)
    return part


def row_parallel_norm_forward(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a row-parallel projection that divides by norms of its weights, reduced over the ranks."""
    with reduced_norms(applied_cut(module).spec.group):  # type: ignore[union-attr]
        return type(module).forward(module, x, *args, **kwargs)  # type: ignore[no-any-return]


def row_parallel_bias_norm_forward(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a row-parallel projection that divides by norms of its weights and has an added term."""
    with reduced_norms(applied_cut(module).spec.group):  # type: ignore[union-attr]
        return row_parallel_forward(module, x, *args, **kwargs)


_ADDING = (row_parallel_forward, row_parallel_bias_norm_forward)
_WITH_NORMS = (row_parallel_norm_forward, row_parallel_bias_norm_forward)


class ProjectionProbe:
    """Numeric probe of one module.

    Args:
        module: The projection; it is not changed.
        ranks: Number of shards. If the widths are not divisible, which ``shard`` refuses, fewer are tried.
        inputs: Width of its input.
        outputs: Width of its output.
    """

    def __init__(self, module: nn.Module, ranks: int, inputs: int, outputs: int) -> None:
        self.shares = (2, ranks, 3)
        self.generator = torch.Generator().manual_seed(0)
        self.widths = {"sharded": outputs, "partial": inputs}
        self.real = copy.deepcopy(module).cpu().double().requires_grad_(False)
        self.probe = copy.deepcopy(self.real)
        named = {**dict(self.probe.named_parameters()), **dict(self.probe.named_buffers())}
        self.tensors: dict[str, torch.Tensor] = {name: each for name, each in named.items() if each.dim()}
        for each in named.values():
            each.copy_(self._random_like(each))
        self.x = self._random(*_INPUTS[0][0], inputs)
        self.large = copy.deepcopy(self.probe)
        for each in (*self.large.parameters(), *self.large.buffers()):
            if each.is_floating_point() and each.dim() > 1:
                each.mul_(_LARGE)
        self.norms: list[torch.Tensor] = []

    def is_needed(self) -> bool:
        """Return whether the module does more than call layers: it uses tensors of its own, or changes itself."""
        called: set[nn.Module] = set()
        before, module = repr(_plain_attributes(self.probe)), copy.deepcopy(self.probe)
        for each in module.modules():
            each.register_forward_pre_hook(lambda layer, args: called.add(layer))
        found = module(self.x)
        if found.shape != (*self.x.shape[:-1], self.widths["sharded"]) or not found.isfinite().all():
            return False
        if not all(torch.equal(found, copy.deepcopy(self.probe)(self.x)) for _ in range(2)):  # it draws random numbers
            return False
        (trained := copy.deepcopy(self.probe).train())(self.x)
        for used in (module, trained):  # it keeps statistics
            if not all(torch.equal(*each) for each in zip(used.buffers(), self.probe.buffers(), strict=True)):
                return False
        layers = {layer for layer in called if type(layer) is nn.Linear and layer is not module}
        loose = [name for name in self.tensors if holder_of(module, name)[0] not in layers]
        return any(self._changes_output(name) for name in loose) or repr(_plain_attributes(module)) != before

    def mixes_rows(self) -> bool:
        """Return whether a row of the output depends on other rows, as in attention."""
        return _differs(self._run(self.x)[..., :1, :], self._run(self.x[..., :1, :]))

    def cuts(self) -> Iterator[Cut]:
        """Yield the ways to split the module."""
        for output, names in (("sharded", NAMES[1]), ("partial", NAMES[0])):
            cut = self._cut(output, names)
            if cut is None and output == "partial" and (norms := self._norms(self.probe, self.x)):
                self.norms = norms  # treated as constants, which no split of the weight changes
                cut = self._cut(output, names)
            if cut is not None:
                yield cut

    def _cut(self, output: str, names: Sequence[str]) -> Cut | None:
        dims_of = self._column_dim if output == "sharded" else self._row_dim
        dims = {name: dim for name in self.tensors if (dim := dims_of(name)) is not None}
        main = [name for name, dim in dims.items() if self.tensors[name].shape[dim] == self.widths[output]]
        if not main:
            return None
        main.sort(key=lambda name: -self.tensors[name].numel())
        ordered = {name: dims[name] for name in dict.fromkeys([main[0], *dims])}
        summed = tuple(name for name, _ in self.probe.named_parameters() if name not in dims and self._changes_output(name))
        cut = Cut(
            ordered,
            "replicated" if output == "sharded" else "sharded",
            output,  # type: ignore[arg-type]
            tuple(name for name in names if type(getattr(self.probe, name, None)) is int),
            self._forward(output),
            fusable=output == "sharded"
            and all(each.shape[dims[name]] == self.widths[output] for name, each in self.tensors.items() if name in dims),
            summed=tuple(name for name in summed if self.tensors.get(name, self.x).is_floating_point()),
            shown=True,
        )
        return cut if self._holds(cut) else None

    def _forward(self, output: str) -> Callable[..., Any] | None:
        adds = output == "partial" and bool(self._run(torch.zeros_like(self.x)).any())
        if self.norms:
            return row_parallel_bias_norm_forward if adds else row_parallel_norm_forward
        return row_parallel_forward if adds else None

    def _norms(self, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        with recorded_norms(found), torch.no_grad():
            module(x)
        return found

    def _random_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return random values of the same kind: positive for a possible scale, integers in the range of the tensor."""
        if tensor.is_floating_point():
            is_matrix = sum(size > 1 for size in tensor.shape) > 1
            drawn = self._random(*tensor.shape) if is_matrix else self._random(*tensor.shape).abs() + 0.5
            return drawn.to(tensor.dtype)
        low, high = int(tensor.min()), int(tensor.max()) + 1
        return torch.randint(low, high, tensor.shape, generator=self.generator).to(tensor.dtype)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _run(self, x: torch.Tensor, changed: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        module = _copy_sharing_memory(self.probe)
        for name, tensor in (changed or {}).items():
            _replace_tensor(module, name, tensor)
        with torch.no_grad(), given_norms(self.norms):
            found: torch.Tensor = module(x)
        return found

    def _changes_output(self, name: str) -> bool:
        tensor = tensor_of(self.probe, name)
        assert tensor is not None
        return _differs(self._run(self.x), self._run(self.x, {name: self._random_like(tensor)}))

    def _redraw_halves(self, name: str, dim: int) -> list[torch.Tensor]:
        tensor = self.tensors[name]
        half, other = tensor.shape[dim] // 2, self._random_like(tensor)
        halves = [tensor.narrow(dim, 0, half), tensor.narrow(dim, half, half)]
        others = [other.narrow(dim, 0, half), other.narrow(dim, half, half)]
        return [torch.cat([others[0], halves[1]], dim), torch.cat([halves[0], others[1]], dim)]

    def _even_dims(self, name: str) -> list[int]:
        return [dim for dim, size in enumerate(self.tensors[name].shape) if size > 1 and size % 2 == 0]

    def _column_dim(self, name: str) -> int | None:
        """Return the dimension along which each half determines one half of the output and does not change the other."""
        before, half = self._run(self.x), self.widths["sharded"] // 2
        for dim in self._even_dims(name):
            first, second = (self._run(self.x, {name: each}) for each in self._redraw_halves(name, dim))
            cases = product((first, second), (slice(half), slice(half, None)))
            apart = [_differs(found[..., own], before[..., own]) for found, own in cases]
            if apart == [True, False, False, True]:
                return dim
        return None

    def _row_dim(self, name: str) -> int | None:
        """Return the dimension along which each half is used with one half of the input only."""
        half = self.widths["partial"] // 2
        masks = [torch.arange(self.widths["partial"]) < half, torch.arange(self.widths["partial"]) >= half]
        given = [self.x * mask for mask in masks]
        before = [self._run(each) for each in given]
        for dim in self._even_dims(name):
            cases = product(self._redraw_halves(name, dim), zip(given, before, strict=True))
            apart = [_differs(self._run(x, {name: each}), own) for each, (x, own) in cases]
            if apart == [True, False, False, True]:
                return dim
        return None

    def _holds(self, cut: Cut) -> bool:
        """Return whether outputs and all gradients of parts are those of the whole, for two parts and for as many as ranks."""
        sizes = [self.tensors[name].shape[dim] for name, dim in cut.dims.items()] + [self.widths[cut.output]]
        shares = [number for number in self.shares if all(size % number == 0 for size in sizes)]
        cases = product({*shares[:2]}, _INPUTS, (True, False), (self.probe, self.large, self.real))
        return bool(shares) and all(self._holds_in_case(cut, *case) for case in cases)

    def _holds_in_case(
        self, cut: Cut, ranks: int, given: tuple[tuple[int, ...], float], training: bool, source: nn.Module
    ) -> bool:
        shape, scale = given
        x = (self._random(*shape, self.widths["partial"]) * scale).requires_grad_()
        whole = _require_gradients(_copy_sharing_memory(source).train(training))
        out = whole(x)
        weights = self._random(*out.shape)
        wanted = _gradients(out, whole, x, weights)
        parts, columns = [], cut.output == "sharded"
        modules = [self._part(cut, ranks, rank, source).train(training) for rank in range(ranks)]
        given_parts = [x.detach() if columns else piece_of(x.detach(), -1, ranks, rank).clone() for rank in range(ranks)]
        norms: list[torch.Tensor] = []
        if cut.forward in _WITH_NORMS:
            of_ranks = [self._norms(*each) for each in zip(modules, given_parts, strict=True)]
            norms = [torch.stack(each).square().sum(0).sqrt() for each in zip(*of_ranks, strict=True)]
        for rank, (module, own) in enumerate(zip(modules, given_parts, strict=True)):
            with given_norms(norms):
                part = module(own.requires_grad_())
            grads = _gradients(part, module, own, piece_of(weights, -1, ranks, rank) if columns else weights)
            parts.append((part, grads))
        outs = [part for part, _ in parts]
        if _differs(torch.cat(outs, -1) if columns else torch.stack(outs).sum(0), out):
            return False
        for name, want in wanted.items():
            shares = [each[name] for _, each in parts]
            dim = cut.dims.get(name, -1 if name == "" and not columns else None)
            found = torch.stack(shares).sum(0) if dim is None else torch.cat(shares, dim)
            if found.shape != want.shape or _differs(found, want):
                return False
        return True

    def _part(self, cut: Cut, ranks: int, rank: int, source: nn.Module) -> nn.Module:
        module = _copy_sharing_memory(source)
        for name, dim in cut.dims.items():
            whole = tensor_of(source, name)
            assert whole is not None
            _replace_tensor(module, name, piece_of(whole, dim, ranks, rank).clone())
        for name in cut.attributes:
            setattr(module, name, self.widths[cut.output] // ranks)
        if cut.forward in _ADDING:
            module.__dict__["forward"] = types.MethodType(lambda own, x: _with_shared_term(own, x, ranks), module)
        return _require_gradients(module)


def _copy_sharing_memory(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose parameters and buffers share memory with the module's."""
    held = {id(each): each.detach() for each in module.buffers()}
    held |= {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()}
    return copy.deepcopy(module, held)


def _replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    holder, own = holder_of(module, name)
    if own in holder._parameters:
        holder._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    else:
        holder._buffers[own] = tensor


def _require_gradients(module: nn.Module) -> nn.Module:
    for each in module.parameters():
        each.requires_grad_(each.is_floating_point())
    return module


def _gradients(out: torch.Tensor, module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of the input, called ``""``, and of all parameters of floating point."""
    named = {"": x, **{name: each for name, each in module.named_parameters() if each.is_floating_point()}}
    grads = torch.autograd.grad(out, [*named.values()], weights, allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True))


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.detach(), other.detach()
    scale = float(torch.maximum(one.abs().max(), other.abs().max())) if one.numel() else 0.0
    return not torch.allclose(one, other, rtol=0, atol=_TOLERANCE * scale)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of all modules inside that are numbers, strings or containers."""
    kinds = (int, float, bool, str, type(None), tuple, list, dict)
    return {
        f"{path}.{name}": value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if not name.startswith("_") and isinstance(value, kinds)
    }
