"""Messages of the first-step checks, as warnings or errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import nn

from slapo_core import BuildError, Program, get_logger

from .row_mixing import over_replicas

Pair = tuple[float, float]
"""Loss of some rows, and mean loss of their parts."""
_MOST_NAMES = 4
_PARTS = 2
_ALMOST = 1e-3
IN_FP16 = (
    "the model injects gradients into its backward, which the loss scale of precision='fp16' would not scale; use "
    "precision='bf16', or add the auxiliary loss to the loss"
)
"""Message of the error for injected gradients with a loss scale, which does not scale them."""
INNER_BACKWARD = (
    "gradients that the model injects are not seen behind torch.utils.checkpoint with use_reentrant=True, and weighted wrong; "
    "use use_reentrant=False"
)
"""Message for a backward that cannot run without accumulating gradients that the engine would take."""


class Partition(NamedTuple):
    """Parts that a batch is split into; ``microbatches`` is their number in each replica."""

    microbatches: int
    replicas: int

    def __str__(self) -> str:
        number = f"{self.microbatches} micro-batch{'es' if self.microbatches > 1 else ''}"
        return f"{number} on {self.replicas} replica{'s' if self.replicas > 1 else ''}"


def warn_or_refuse(text: str, program: Program, is_strict: bool) -> None:
    """Log a finding as a warning of the first rank; raise it as a ``BuildError`` with ``is_strict``."""
    if is_strict:
        raise BuildError(text)
    if is_first_rank(program):
        get_logger().warning("%s", text)


def is_first_rank(program: Program) -> bool:
    return not any(program.axis_rank(axis) for axis in ("pp", "dp", "tp"))


def loss_is_no_mean(pair: Pair, rows: int, cut: Partition) -> str:
    """Return the error message for a loss that is not a mean over rows."""
    is_sum = abs(pair[0] - _PARTS * pair[1]) < _ALMOST * abs(pair[0])
    divided = (
        "let a sum be a mean over the rows or labels it is given, not divided by a number for the whole batch, as "
        "num_items_in_batch; "
    )
    return (
        f"the loss is not a mean over rows: it is {pair[0]:.6g} for {rows} rows, and the losses of their parts have the mean "
        f"{pair[1]:.6g}, so training in {cut} would minimise another loss than the whole batch's; "
        f"{divided if is_sum else ''}use loss_over='replicas' with microbatches=1 for a loss that compares rows, "
        "loss_weights= for terms that are means over counts of their own, or one micro-batch on one replica; "
        "SLAPO_DISABLE_CHECKS=rows trains the mean over parts"
    )


def term_is_no_mean(name: str, pair: Pair, cut: Partition) -> str:
    """Return the warning for a term beside the loss in the model's output, e.g. a router's balance loss."""
    return (
        f"the model's output {name!r} is not a mean over rows: it is {pair[0]:.6g} for some rows, and {pair[1]:.6g} on average "
        f"for their parts; if it is in the loss, training in {cut} gives that term other gradients than the whole batch "
        "does, and one micro-batch on one replica the same"
    )


def buffers_are_updated(names: Sequence[str], cut: Partition) -> str:
    """Return the warning for buffers that a forward updates from its rows."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES])) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")
    whose = " and ".join(
        text
        for text, number in (
            ("by each micro-batch in turn", cut.microbatches),
            ("on each replica by its own rows", cut.replicas),
        )
        if number > 1
    )
    return (
        f"the forward updates the buffer{'s' if len(names) > 1 else ''} {shown} from the rows it is given; in {cut} that "
        f"happens {whose}, and gives other numbers than the whole batch at once; one micro-batch on one replica updates by all "
        "rows"
    )


def injected_is_no_mean(cut: Partition) -> str:
    """Return the warning for injected gradients that are not means over rows, e.g. of a balance loss of batch statistics."""
    return (
        "the gradients that the model injects into its backward for some rows are not the mean of those for their parts, so "
        f"those of {cut} are others than the whole batch's; with one micro-batch on one replica they are of the whole batch"
    )


def rows_are_mixed(
    root: nn.Module, paths: Sequence[str], pair: Pair | None, cut: Partition, norms: Collection[nn.Module]
) -> str:
    """Return the warning for modules that mix rows; ``norms`` are the BatchNorms among them."""
    named = dict(root.named_modules())
    shown = [_module_label(path, named) for path in paths[:_MOST_NAMES]]
    more = [f"{len(paths) - _MOST_NAMES} more"] if len(paths) > _MOST_NAMES else []
    names = " and ".join([", ".join([*shown, *more][:-1]), [*shown, *more][-1]]) if len(paths) > 1 else shown[0]
    numbers = f" ({pair[0]:.6g} for a micro-batch, {pair[1]:.6g} for the mean of its parts)" if pair is not None else ""
    what = f"{names} mix{'es' if len(paths) == 1 else ''} the rows of a micro-batch"
    effect = f"training in {cut} gives another loss than the whole batch{numbers}"
    if not norms:
        return f"{what}, so {effect}; one micro-batch on one replica mixes the rows of the whole batch"
    ways, synchronized = [], cut.replicas == 1 or all(map(over_replicas, norms))
    if not synchronized:
        ways.append("sch.sync_batch_norm() takes BatchNorm's statistics over all replicas")
    if cut.microbatches > 1:
        ways.append(
            f"with microbatches=1 BatchNorm's statistics are over {'the whole batch' if synchronized else 'the replica'}"
        )
    return f"{what}, so {effect}; {'; '.join(ways)}"


def _module_label(path: str, named: dict[str, nn.Module]) -> str:
    kind = type(named[path]).__name__ if path in named else "module"
    return f"{kind} {path!r}" if path else f"the forward of {kind}"
