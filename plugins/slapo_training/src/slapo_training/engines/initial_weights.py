"""Check that ranks which hold the same parameters start from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, Program, is_sharded, raise_on_all_ranks

from ..batches.microbatches import fingerprint
from ..model.named_tensors import is_wrapper_subclass


def check_same_start(
    program: Program,
    named: Mapping[str, nn.Parameter],
    replicas: bool = True,
    replica_tensor: Callable[[nn.Parameter], torch.Tensor] = lambda parameter: parameter,
) -> None:
    """Refuse to train when ranks that hold the same parameters start from different numbers. Collective.

    Compares replicas, what tensor-parallel ranks hold whole, and the stages of a tie.

    Args:
        replicas: Whether these are compared; some engines give all of them the first one's.
        replica_tensor: Returns the tensor of which each replica holds some rows, or a parameter that replicas hold whole.

    Raises:
        BuildError: on every rank; names a parameter, or says that the replicas' parameters are not the same ones.
    """
    shapes = {name: replica_tensor(parameter) for name, parameter in named.items()}
    whole = {name: parameter for name, parameter in named.items() if not is_sharded(shapes[name])}
    error = _equal(program, "dp", "replicas", named, shapes) if replicas else None
    error = _equal(program, "tp", "tensor-parallel ranks", whole, shapes) or error
    raise_on_all_ranks(_tie_error(program, named) or error, program.mesh)


def _equal(
    program: Program, axis: str, ranks: str, named: Mapping[str, nn.Parameter], shapes: Mapping[str, torch.Tensor]
) -> BuildError | None:
    mesh = program.mesh
    if mesh is None or program.axis_size(axis) == 1:
        return None
    group = mesh.get_group(axis)
    mark = fingerprint([(name, tuple(shapes[name].shape), parameter.requires_grad) for name, parameter in named.items()])
    marks = torch.tensor([mark, -mark], device=mesh.device_type)
    dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
    if marks.sum().item():
        return BuildError(
            f"the {ranks} have parameters of different names, shapes or requires_grad; build and freeze alike on all ranks"
        )
    if axis == "dp":  # replicas hold different rows of the others
        named = {name: parameter for name, parameter in named.items() if shapes[name] is parameter}
    if not named or not (wrong := _different([*named.values()], group, mesh.device_type)):
        return None
    return BuildError(f"the {ranks} start from different values of {[*named][wrong[0]]!r}; seed all ranks alike")


def _tie_error(program: Program, named: Mapping[str, nn.Parameter]) -> BuildError | None:
    mesh, ties = program.mesh, program.ties
    if mesh is None or not ties or program.axis_size("pp") == 1:
        return None
    held = [next((named[name] for name in tie.names if name in named), None) for tie in ties]
    if not (wrong := _different(held, mesh.get_group("pp"), mesh.device_type)):
        return None
    tie = ties[wrong[0]]
    return BuildError(
        f"stages {tie.stages} have different values, or requires_grad, of the tied {tie.names[0]!r}; seed and freeze alike on "
        "all ranks"
    )


def _different(parameters: Sequence[nn.Parameter | None], group: dist.ProcessGroup, device: str) -> list[int]:
    """Indices of the parameters that are not the same on all ranks of a group that hold them. Collective."""
    absent = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)
    marks = [None if parameter is None else _marks(parameter) for parameter in parameters]
    high = torch.stack([absent if mark is None else mark for mark in marks])
    low = torch.stack([absent if mark is None else -mark for mark in marks])
    largest = torch.stack([high, low])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [index for index, same in enumerate((largest[0] == -largest[1]).all(1).tolist()) if not same]


def _marks(parameter: nn.Parameter) -> torch.Tensor:
    """Three numbers that differ where values or requires_grad do."""
    parts = [_real_values(each) for each in _tensors_in(parameter.detach())]
    sums = torch.stack([values.sum(dtype=torch.float64) for values in parts])
    norms = torch.stack([torch.linalg.vector_norm(values, dtype=torch.float64) for values in parts])
    is_trained = torch.tensor(parameter.requires_grad, dtype=torch.float64, device=sums.device)
    return torch.stack([sums.sum(), norms.norm(), is_trained])


def _real_values(values: torch.Tensor) -> torch.Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    # norms of other types are not to be had
    return values if values.is_floating_point() and values.element_size() > 1 else values.double()


def _tensors_in(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that one of a subclass wraps, such as a quantised weight's numbers and scales; any other itself."""
    if not is_wrapper_subclass(tensor):
        yield tensor
    else:
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _tensors_in(getattr(tensor, name))
