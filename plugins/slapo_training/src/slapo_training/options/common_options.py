"""Options that every engine takes, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from slapo_core import BuildError, UnknownNameError

from ..batches.row_dims import Dim
from ..batches.rows import Batch, BatchRows, check_dims
from ..losses.output_loss import LossChoice, OutputLoss, check_choice
from ..losses.replica_loss import OVER_REPLICAS
from ..losses.weighted_terms import Count, check_counts
from .check_switches import VARIABLE, disabled_checks
from .optimizer_blocks import check_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision to the type of floating-point weights."""


IGNORE_INDEX = -100
"""Label value that losses exclude by default."""

ENGINES_OWN = "config= is of targets that hand it to their engine, 'deepspeed' and 'megatron'"
"""Note of the error for other targets."""

T = TypeVar("T", bound="CommonOptions")


@dataclass(frozen=True)
class CommonOptions:
    """Arguments of ``build`` with the same meaning for every target; base class of each dialect's options.

    Args:
        optimizer: A factory ``parameters -> torch.optim.Optimizer``, or an optimizer of the unmodified model's parameters that
            has not stepped yet; None builds an engine that only evaluates.
        lr_scheduler: A factory ``optimizer -> torch.optim.lr_scheduler...``, or a schedule of ``optimizer``; it steps after
            each step of the optimizer.
        loss_fn: ``loss_fn(outputs, labels)``, a mean over one micro-batch unless ``loss_weights`` or ``loss_over`` is given;
            None takes the loss from the model's output.
        loss: The part of the model's output that is the loss: a key or field, a position, or a function of the output. None
            takes the part called ``loss``, or the only number with a gradient.
        microbatches: Number of parts with equally many rows that a batch is split into.
        batch_dims: Places of the batch's rows in its arguments, by name: a dimension; None for an argument that goes whole to
            each micro-batch; or, if rows have different numbers of entries in dimension 0 (e.g. patches of images), a count
            of entries. The count is the name of an argument with an integer per row or entry (several sizes of an entry are
            multiplied), or a function of arguments of the batch, by name, that returns such a tensor. By default rows are in
            dimension 0, or in dimension 1 of tensors shaped like others from there on; a dimension 0 of size 1 goes whole;
            images and videos follow their tokens in ``input_ids``. Ambiguous arguments are refused.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        clip: Largest gradient norm over all ranks; 0 is off.
        ignore_index: Label value that the loss excludes; None takes it from ``loss_fn`` if that is a module or ``partial`` with
            one, otherwise -100. Set it for other losses than plain ``cross_entropy`` and ``nll_loss`` that exclude another
            value. Such losses must be means over equal numbers of labels; uneven numbers in the batch's ``labels`` are found by
            this value and refused. Labels of the plain losses are counted in the loss itself.
        loss_weights: The count that the loss is a mean over: a function of arguments of a micro-batch, by name, that returns a
            number; or the name of an argument. Integer labels count those that are not ignored; a mask (bool, floating-point,
            or by its name) counts its sum. A dict has counts by the names of terms: the model's output, or the result of
            ``loss_fn``, has these terms, each a mean over its count, and the loss is their sum. None counts the labels of
            plain ``cross_entropy`` and ``nll_loss``.
        loss_over: ``"replicas"`` calls ``loss_fn`` with the outputs and labels of all micro-batches and replicas together, for
            in-batch contrastive losses. Outputs have the batch in dimension 0, or are the same for every micro-batch; the batch
            may have no labels. Each of several micro-batches runs forward twice. None calls it for each micro-batch.
        gradient_hooks: ``"step"`` runs hooks that the model's parameters had before ``build`` once per step, on the whole
            reduced gradient before clipping, as in one process with the whole batch. ``"microbatch"`` leaves them to torch,
            which runs them in each micro-batch's backward on each replica.
        check: Check the first step that splits a batch, before it is trained: a loss that is not a mean over rows is refused,
            modules that mix rows are named in a warning, and injected gradients are weighted right. It costs at most two
            steps, once. ``{"rows": False}``, or the environment variable ``SLAPO_DISABLE_CHECKS``, switches off
            checks by name: ``rows``, ``injected`` and those of plugins.
        strict: Raise an error instead of the warnings of the first step's checks.
        optimizer_blocks: For optimizers that step a whole tensor: globs of the names of the model's own fused parameters, each
            with ``(dim, blocks)``: the number or the sizes of blocks along a dimension that are stepped as separate tensors.
            For GPT-2 ``{"*.c_attn.weight": (1, 3)}`` has one block for each of q, k and v, ``(1, 36)`` one for each of 12
            heads. Parameters that a schedule fused are stepped as the unmodified model's, without an entry here.
    """

    target: ClassVar[str] = ""
    """Name of the dialect."""

    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    loss: LossChoice | None = None
    microbatches: int = 1
    batch_dims: Mapping[str, Dim] | None = None
    precision: str = "fp32"
    clip: float = 0.0
    ignore_index: int | None = None
    loss_weights: Count | Mapping[str, Count] | None = None
    loss_over: str | None = None
    gradient_hooks: str = "step"
    check: bool | Mapping[str, bool] = True
    strict: bool = False
    optimizer_blocks: Mapping[str, tuple[int, int | Sequence[int]]] | None = None

    @classmethod
    def of(cls: type[T], config: Mapping[str, Any]) -> T:
        """Read a configuration.

        Raises:
            BuildError: an unknown key, or a value that cannot work.
        """
        known = [field.name for field in fields(cls)]
        for key in config:
            if key not in known:
                notes = [ENGINES_OWN] if key == "config" else []
                raise BuildError(str(UnknownNameError.of("option", key, known, notes, f"target {cls.target!r}")))
        options = cls(**config)
        options.validate()
        return options

    def rank_invariants(self) -> list[str]:
        """Return the options that must be equal on all ranks, beside those that ``build`` compares."""
        given = {"optimizer=": self.optimizer, "lr_scheduler=": self.lr_scheduler, "loss_fn=": self.loss_fn}
        weights = self.loss_weights if isinstance(self.loss_weights, Mapping) else {"the loss": self.loss_weights}
        counts = {name: count if isinstance(count, str) or count is None else "a function" for name, count in weights.items()}
        return [
            f"ignore_index={self.ignored_label}",
            f"loss={'a function' if callable(self.loss) else repr(self.loss)}",
            f"loss_over={self.loss_over!r} and loss_weights= of {counts}",
            f"gradient_hooks={self.gradient_hooks!r}",
            f"batch_dims of {sorted(self.batch_dims or {})}",
            f"check={self.check} with {VARIABLE}={','.join(disabled_checks())!r} and strict={self.strict}",
            *([f"optimizer_blocks={dict(self.optimizer_blocks)}"] if self.optimizer_blocks else []),
            *(f"no {name}" if value is None else name for name, value in given.items()),
        ]

    @cached_property
    def batch_rows(self) -> BatchRows:
        """Splitter of batches; one per engine, since it compares each batch's rows with those of earlier batches."""
        return BatchRows(self.batch_dims)

    @cached_property
    def output_loss(self) -> OutputLoss:
        """Finder of the loss in outputs; one per engine, so that evaluation uses the path that training found."""
        return OutputLoss(self.loss)

    def model_arguments(self, part: Batch) -> Batch:
        """Return the arguments of the model's forward in a micro-batch: all but the labels of ``loss_fn``."""
        return {name: value for name, value in part.items() if self.loss_fn is None or name != "labels"}

    @property
    def ignored_label(self) -> int:
        """Label value that the loss excludes."""
        if self.ignore_index is not None:
            return self.ignore_index
        return int(self._loss_fn_argument("ignore_index", IGNORE_INDEX))

    def check_mean(self, num_parts: int) -> None:
        """Refuse a loss whose mean over parts of a batch is known to differ from the loss of the batch.

        Args:
            num_parts: Micro-batches times data-parallel ranks.

        Raises:
            BuildError: the loss is a sum, or weights its labels.
        """
        if self.loss_over is not None:
            return
        if self._loss_fn_argument("reduction", "mean") == "sum" and num_parts > 1:
            raise BuildError(f"loss_fn has reduction='sum', but the losses of {num_parts} parts are averaged; use 'mean'")
        if self._loss_fn_argument("weight", None) is not None and self.loss_weights is None and num_parts > 1:
            raise BuildError(
                f"loss_fn weights its labels, so the mean over {num_parts} parts is another number; leave weight= out, "
                "say with loss_weights= what it is a mean over, or train with one micro-batch on one replica"
            )

    def _loss_fn_argument(self, name: str, default: Any) -> Any:
        """Return an argument of the loss module or ``partial``, or the default."""
        given = self.loss_fn.keywords if isinstance(self.loss_fn, partial) else {}
        return given.get(name, getattr(self.loss_fn, name, default))

    def validate(self) -> None:
        """Raise ``BuildError`` for a value that cannot work."""
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise BuildError(f"microbatches is {self.microbatches!r}; give a whole number from 1 on")
        if isinstance(self.clip, bool) or not isinstance(self.clip, (int, float)) or not self.clip >= 0:
            raise BuildError(f"clip is {self.clip!r}; give the maximum gradient norm, or 0 for no clipping")
        disabled_checks(self.check)
        if type(self.strict) is not bool:
            raise BuildError(f"strict is {self.strict!r}; give True or False")
        if self.ignore_index is not None and type(self.ignore_index) is not int:
            raise BuildError(
                f"ignore_index is {self.ignore_index!r}; give the label value that the loss leaves out, a whole number"
            )
        if self.gradient_hooks not in ("step", "microbatch"):
            raise BuildError(f"gradient_hooks is {self.gradient_hooks!r}; give 'step' or 'microbatch'")
        if isinstance(self.loss_fn, nn.Module) and any(each.requires_grad for each in self.loss_fn.parameters()):
            raise BuildError("loss_fn has parameters of its own, which no optimizer would step; make them part of the model")
        if not (self.optimizer is None or callable(self.optimizer) or isinstance(self.optimizer, torch.optim.Optimizer)):
            raise BuildError(
                f"optimizer is {self.optimizer!r}; give a torch.optim.Optimizer, or a factory, e.g. lambda parameters: "
                "torch.optim.AdamW(parameters, lr=1e-3)"
            )
        check_blocks(self.optimizer_blocks)
        check_dims(self.batch_dims)
        self._check_rate()
        if self.loss_fn is not None and not _accepts_two_arguments(self.loss_fn):
            raise BuildError("loss_fn does not take (outputs, labels)")
        check_choice(self.loss)
        if self.loss is not None and self.loss_fn is not None:
            raise BuildError("loss= says which part of the output is the loss, and loss_fn= computes it; give one of them")
        self._check_weights()

    def _check_weights(self) -> None:
        if self.loss_weights is not None:
            check_counts(self.loss_weights)
            if self.loss is not None and isinstance(self.loss_weights, Mapping):
                raise BuildError("loss_weights= names the terms whose sum is the loss; leave out loss=, or give one count")
        if self.loss_over is None:
            return
        if self.loss_over != OVER_REPLICAS:
            raise BuildError(f"loss_over is {self.loss_over!r}; give {OVER_REPLICAS!r}, or None for a loss of each micro-batch")
        if self.loss_fn is None:
            raise BuildError(
                "loss_over='replicas' computes the loss of the outputs of all replicas, and a model that computes it itself "
                "has its own alone; let it return what the loss is made of, and give loss_fn=, a function of (outputs, labels)"
            )
        if self.loss_weights is not None:
            raise BuildError(
                "loss_over='replicas' computes the loss of the whole batch at once, so no term needs a weight; leave out "
                "loss_weights="
            )

    def _check_rate(self) -> None:
        rate = self.lr_scheduler
        if rate is not None and not (self.optimizer is not None and (is_lr_scheduler(rate) or callable(rate))):
            what = (
                "lr_scheduler= is of optimizer=, which is not given" if self.optimizer is None else f"lr_scheduler is {rate!r}"
            )
            raise BuildError(f"{what}; give optimizer=, and lr_scheduler= as one of torch.optim.lr_scheduler or a factory")


def is_lr_scheduler(value: Any) -> bool:
    return isinstance(value, (LRScheduler, ReduceLROnPlateau))


def _accepts_two_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return callable(function)
    return True


@dataclass(frozen=True)
class EngineOptions(CommonOptions):
    """The arguments of ``build`` for an engine that sums gradients by itself, and whose own configuration may say them, too."""

    @property
    def trains(self) -> bool:
        """True if there is an optimizer, ours or the engine's own."""
        return self.optimizer is not None

    @property
    def parts(self) -> int:
        return self.microbatches

    @property
    def settled_precision(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self.precision

    @property
    def largest_norm(self) -> float:
        """Largest gradient norm; 0 is off."""
        return float(self.clip)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.settled_precision]
