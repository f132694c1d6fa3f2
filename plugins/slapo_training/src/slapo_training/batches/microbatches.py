"""Split of a batch into micro-batches, label counts, and fingerprints."""

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
    """Split every tensor of a batch into parts with equally many rows; other values go to each part.

    Args:
        several: Name of the variadic argument ``*args``, whose value is a tuple.
        rows: Locates the rows; None for dimension 0 of each tensor.

    Raises:
        BuildError: with several parts, the rows of an argument cannot be located, their number is not divisible, or a list may
            have one item per row.
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
    """Iterate over the values of nested mappings by dotted names."""
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
    """Return the facts that a trace of a stage depends on: names, shapes, dtypes, and values that are not tensors."""
    leaves, structure = tree_flatten(dict(sorted(batch.items())))
    return str(structure), *(
        (tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else repr(leaf)
        for leaf in leaves
    )


def fingerprint(value: Any) -> int:
    """Return a number that is equal in every process for equal values."""
    return zlib.crc32(repr(value).encode())


def content_fingerprint(batch: Mapping[str, Any]) -> int:
    """Return a number from up to a thousand values of each tensor, equal on ranks with the same batch."""
    number = 0
    for leaf in tree_flatten(dict(sorted(batch.items())))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.layout is torch.strided:
            values = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
            sample = values[:: max(1, len(values) // _SAMPLE)].cpu().contiguous()
            number = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), number)
    return number


_SAMPLE = 1000


def labels_of(parts: list[Batch], ignored: int) -> list[tuple[int, int]]:
    """Return two label counts of each micro-batch: all labels, and all but the first of each row (next-token losses).

    Labels are the argument ``labels`` and every other integer argument that holds ``ignored``, if ``ignored`` is negative;
    values from 0 on are ordinary in other arguments.
    """
    asked = [(index, name) for index, part in enumerate(parts) for name in part if ignored < 0 or name == "labels"]
    numbered = [(index, name) for index, name in asked if _is_numbers(parts[index][name])]
    found = dict(zip(numbered, _label_counts([parts[index][name] for index, name in numbered], ignored), strict=True))
    names = {"labels"} | {name for (_, name), (left_out, _, _) in found.items() if left_out}
    counts = [[found.get((index, name), (0, 0, 0)) for name in names] for index in range(len(parts))]
    return [(sum(each[1] for each in row), sum(each[2] for each in row)) for row in counts]


LabelKey = tuple[str, int]
"""Labels that a loss may be a mean over: path of an argument, empty for ``labels_of``; and 1 without first labels."""


def label_counts(parts: list[Batch], ignored: int, is_told: bool) -> tuple[list[LabelKey], list[tuple[int, ...]]]:
    """Return the labels that the loss may be a mean over, and their counts in each micro-batch.

    ``is_told`` says that a loss has shown the ignored value; if not, a value from 0 on is counted in ``labels`` only.
    """
    tensors = [tensors_of(part) for part in parts]
    names = [name for name, value in tensors[0].items() if _is_numbers(value) and value.dtype is not torch.bool]
    names = names if is_told or ignored < 0 else []
    found = iter(_label_counts([own[name] for own in tensors for name in names], ignored))
    counts = [(*union, *(number for _ in names for number in next(found)[1:])) for union in labels_of(parts, ignored)]
    return [(name, kind) for name in ("", *names) for kind in (0, 1)], counts


def label_count_range(parts: list[Batch], ignored: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the smallest and the largest counts of ``labels_of`` over the micro-batches."""
    wholes, rests = zip(*labels_of(parts, ignored), strict=True)
    return (min(wholes), min(rests)), (max(wholes), max(rests))


def check_labels(
    batch: Mapping[str, Any], module: nn.Module, loss_fn: Callable[..., Any] | None, needs_labels: bool = True
) -> None:
    """Raise ``BuildError`` if the loss function needs labels and has none, or if the model does not accept given labels."""
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
    """Return True if the module may accept an argument of this name."""
    if "forward" in module.__dict__ or module._forward_pre_hooks or isinstance(module, fx.GraphModule):
        return True  # their signatures do not show which arguments they use
    parameters = inspect.signature(type(module).forward).parameters
    return name in parameters or any(it.kind is it.VAR_KEYWORD for it in parameters.values())


def _is_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _label_counts(values: list[torch.Tensor], ignored: int) -> list[tuple[int, int, int]]:
    """Return counts per tensor: ignored labels, labels, labels but the first of each row; waits for the device once."""
    rows = []
    for value in values:
        used = value != ignored
        entering = (used.sum(), used[..., 1:].sum()) if used.dim() else (used.new_zeros((), dtype=torch.int64),) * 2
        rows.append(torch.stack([(~used).sum(), *entering]).to(values[0].device))
    return [(left_out, whole, rest) for left_out, whole, rest in torch.stack(rows).tolist()] if rows else []


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def variadic_argument(model: nn.Module) -> str | None:
    """Return the name of the forward's ``*args``, under which ``named_inputs`` has a tuple; or None."""
    return next((name for name, each in forward_signature(model).parameters.items() if each.kind is each.VAR_POSITIONAL), None)
