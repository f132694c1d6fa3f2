"""From a batch to micro-batches."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from slapo_core import BuildError, forward_signature

from .nested_tensors import tensors_of
from .rows import Batch as Batch
from .rows import BatchRows


def split(batch: Mapping[str, Any], parts: int, several: str | None = None, rows: BatchRows | None = None) -> list[Batch]:
    """Cut every tensor of a batch into parts of equally many rows; other values go to each part.

    Args:
        batch: Arguments by name.
        parts: How many.
        several: Name of the argument that has a tuple of arguments, ``*args``.
        rows: Says where the rows are; None for dimension 0 of each tensor.

    Raises:
        BuildError: for more than one part, the rows of an argument cannot be told, or their number is not divisible; or values
            may be one per row and yet would not be cut as rows.
    """
    rows = rows or BatchRows()
    if parts > 1:
        _check_rows_are_tensors({name: value for name, value in batch.items() if not rows.is_given(name)}, several)
    return rows.split(batch, parts)


def _check_rows_are_tensors(batch: Mapping[str, Any], several: str | None) -> None:
    rows_apart = {several: dict(enumerate(batch[several]))} if several is not None and several in batch else {}
    values = dict(_flatten_mappings({**batch, **rows_apart}))
    rows = {value.shape[0] for value in values.values() if _has_rows(value)}
    for name, value in values.items():
        tensors = [leaf for leaf in tree_flatten(value)[0] if _has_rows(leaf)]
        if _has_rows(value):
            continue
        if tensors and not rows:
            raise BuildError(
                f"{name!r} is a {type(value).__name__} of tensors, which may be one per row; give tensors by name, with the "
                "batch in dimension 0, build with loss_fn= if the last one has labels, or use microbatches=1"
            )
        if _length(value) in rows and (not tensors or isinstance(value, list)):
            raise BuildError(
                f"{name!r} is a {type(value).__name__} with as many items as the batch has rows, {_length(value)}, and would "
                "go whole to each micro-batch; give one tensor with the batch in dimension 0, or use microbatches=1"
            )


def _flatten_mappings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten_mappings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _length(value: Any) -> int | None:
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = getattr(value, "shape", None)  # an array of another library
    return shape[0] if isinstance(shape, tuple) and shape else None


def signature(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides how a stage is traced: names, shapes, dtypes and values that are no tensors."""
    leaves, structure = tree_flatten(dict(sorted(batch.items())))
    return str(structure), *(
        (tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else repr(leaf)
        for leaf in leaves
    )


def fingerprint(value: Any) -> int:
    """A number that is equal in every process for equal values."""
    return zlib.crc32(repr(value).encode())


def content_fingerprint(batch: Mapping[str, Any]) -> int:
    """A number made from up to a thousand values of each tensor: equal on ranks that were given the same batch."""
    number = 0
    for leaf in tree_flatten(dict(sorted(batch.items())))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.layout is torch.strided:
            values = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
            sample = values[:: max(1, len(values) // _SAMPLE)].cpu().contiguous()
            number = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), number)
    return number


_SAMPLE = 1000


def labels_of(parts: list[Batch], ignored: int) -> list[tuple[int, int]]:
    """Return how many labels of each micro-batch enter its mean: all, and without each row's first (next-token losses).

    Labels are the argument ``labels``, and every other integer one that holds the ignored value, where that is negative:
    0 and more are ordinary numbers there.

    Args:
        parts: The micro-batches.
        ignored: Label value that the loss leaves out.
    """
    asked = [(index, name) for index, part in enumerate(parts) for name in part if ignored < 0 or name == "labels"]
    numbered = [(index, name) for index, name in asked if _is_numbers(parts[index][name])]
    found = dict(zip(numbered, _label_counts([parts[index][name] for index, name in numbered], ignored), strict=True))
    names = {"labels"} | {name for (_, name), (left_out, _, _) in found.items() if left_out}
    counts = [[found.get((index, name), (0, 0, 0)) for name in names] for index in range(len(parts))]
    return [(sum(each[1] for each in row), sum(each[2] for each in row)) for row in counts]


LabelKey = tuple[str, int]
"""Labels that a loss may be a mean over: an argument's path, empty for those of ``labels_of``, and 1 without firsts."""


def label_counts(parts: list[Batch], ignored: int, is_told: bool) -> tuple[list[LabelKey], list[tuple[int, ...]]]:
    """Return what the loss may be a mean over, and how many labels each micro-batch has by each of these.

    Args:
        parts: The micro-batches.
        ignored: Label value that the loss leaves out.
        is_told: Whether a loss told that value; else one from 0 on, an ordinary number, is looked for in ``labels`` alone.
    """
    tensors = [tensors_of(part) for part in parts]
    names = [name for name, value in tensors[0].items() if _is_numbers(value) and value.dtype is not torch.bool]
    names = names if is_told or ignored < 0 else []
    found = iter(_label_counts([own[name] for own in tensors for name in names], ignored))
    counts = [(*union, *(number for _ in names for number in next(found)[1:])) for union in labels_of(parts, ignored)]
    return [(name, kind) for name in ("", *names) for kind in (0, 1)], counts


def label_count_range(parts: list[Batch], ignored: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest and the largest of both numbers of ``labels_of`` over the micro-batches."""
    wholes, rests = zip(*labels_of(parts, ignored), strict=True)
    return (min(wholes), min(rests)), (max(wholes), max(rests))


def check_labels(
    batch: Mapping[str, Any], module: nn.Module, loss_fn: Callable[..., Any] | None, needs_labels: bool = True
) -> None:
    """Raise ``BuildError`` where the loss function has no labels but needs them, or the labels nobody who takes them."""
    if loss_fn is not None and needs_labels and "labels" not in batch:
        raise BuildError(
            "loss_fn needs labels, but the batch has none; pass labels=, or build with loss_over='replicas' where the loss is "
            "made of the outputs alone"
        )
    if loss_fn is None and "labels" in batch and not _accepts_argument(module, "labels"):
        raise BuildError(
            f"the forward of {type(module).__name__} takes {', '.join(forward_signature(module).parameters)} and no 'labels'; "
            "build with loss_fn=, a function of (outputs, labels), or give the labels under the forward's own name for them"
        )


def _accepts_argument(module: nn.Module, name: str) -> bool:
    """Return whether the module takes an argument of this name, as far as its signature tells."""
    if "forward" in module.__dict__ or module._forward_pre_hooks or isinstance(module, fx.GraphModule):
        return True  # what these do with an argument, only a call shows
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(it.kind is it.VAR_KEYWORD for it in parameters.values())


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _label_counts(values: list[torch.Tensor], ignored: int) -> list[tuple[int, int, int]]:
    """Count how many of each are left out, enter, and enter without each row's first; the host waits for a device once."""
    rows = []
    for value in values:
        used = value != ignored
        entering = (used.sum(), used[..., 1:].sum()) if used.dim() else (used.new_zeros((), dtype=torch.int64),) * 2
        rows.append(torch.stack([(~used).sum(), *entering]).to(values[0].device))
    return [(left_out, whole, rest) for left_out, whole, rest in torch.stack(rows).tolist()] if rows else []


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def variadic_argument(model: nn.Module) -> str | None:
    """Return the name of the forward's ``*args``, under which ``named_inputs`` has a tuple; None where it has none."""
    return next((name for name, each in forward_signature(model).parameters.items() if each.kind is each.VAR_POSITIONAL), None)
