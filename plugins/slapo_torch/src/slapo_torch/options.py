"""What an engine of this dialect can be told, and what of it makes no sense."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError, UnknownNameError

from .schedules import is_file, kind_of
from .updates import is_rate_or_factory

IGNORE_INDEX = -100
"""Label value that losses leave out unless told otherwise."""

DATA_PARALLEL = ("ddp", "fsdp")
"""How replicas keep their parameters."""


@dataclass(frozen=True)
class Options:
    """The arguments of ``build`` for target ``"torch"``.

    Args:
        optimizer: A factory ``parameters -> torch.optim.Optimizer``, or an optimizer of the unmodified model's parameters that
            has not stepped yet; None builds an engine that only evaluates.
        lr_scheduler: A factory ``optimizer -> torch.optim.lr_scheduler...``, or such an object of ``optimizer``; it steps after
            each step of the optimizer.
        loss_fn: ``loss_fn(outputs, labels)``, a mean over one micro-batch; None takes the loss from the model's output.
        microbatches: Equal parts a batch is cut into along dimension 0.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast.
        loss_scale: With ``"fp16"`` what the loss is multiplied by at first; it is halved after a gradient overflows, and that
            step is left out, and doubled after 2000 steps without.
        clip: Largest gradient norm over all ranks; 0 is off.
        ignore_index: Label value that the loss leaves out; None takes it from ``loss_fn`` where that is a module or a
            ``partial`` that has one, else -100. It is needed where a loss that is no plain ``cross_entropy`` or ``nll_loss``
            leaves out another one: it has to be a mean over equal parts, and only by this value those are told that are not,
            in the batch's ``labels``, and refused. Of the plain ones each part's labels are counted as they enter the loss.
        pipeline_schedule: One of ``schedules.KINDS``, or the path of a CSV file of ``torch.distributed.pipelining``, whose name
            ends in ``.csv``.
        data_parallel: ``"ddp"``: each replica keeps all of its parameters; ``"fsdp"``: of each parameter, its gradient and the
            optimizer's state some rows, and the parameters are gathered for a step.
        fsdp_units: Globs of the modules whose parameters are gathered and reduced together; None for the elements of lists of
            layers of one class. All other parameters are one unit more.
        record_timeline: Keep when each forward and backward of the last step ran, in ``engine.timeline``.
    """

    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    microbatches: int = 1
    precision: str = "fp32"
    loss_scale: float = 65536.0
    clip: float = 0.0
    ignore_index: int | None = None
    pipeline_schedule: str = "1f1b"
    data_parallel: str = "ddp"
    fsdp_units: Sequence[str] | None = None
    record_timeline: bool = False

    def agreed(self) -> list[str]:
        """What has to be the same on all ranks, beside what ``build`` compares already."""
        schedule = f"pipeline_schedule={self.pipeline_schedule!r}"
        if is_file(self.pipeline_schedule):  # each rank may have it elsewhere
            schedule = f"a pipeline_schedule of crc {zlib.crc32(Path(self.pipeline_schedule).read_bytes()):#x}"
        given = {"optimizer=": self.optimizer, "lr_scheduler=": self.lr_scheduler, "loss_fn=": self.loss_fn}
        return [
            f"data_parallel={self.data_parallel!r} with fsdp_units={self.fsdp_units}",
            schedule,
            f"loss_scale={float(self.loss_scale)}",
            f"ignore_index={self.ignored_label}",
            *(f"no {name}" if value is None else name for name, value in given.items()),
        ]

    @property
    def ignored_label(self) -> int:
        """The label value that the loss leaves out."""
        if self.ignore_index is not None:
            return self.ignore_index
        return int(self._of_loss("ignore_index", IGNORE_INDEX))

    def check_mean(self, num_parts: int) -> None:
        """Refuse a loss of which the mean over parts of a batch is not the loss of the batch, as far as it can be told.

        Args:
            num_parts: Micro-batches times data-parallel ranks.

        Raises:
            BuildError: the loss sums, or weights its labels.
        """
        if self._of_loss("reduction", "mean") == "sum" and num_parts > 1:
            raise BuildError(f"loss_fn has reduction='sum', but the losses of {num_parts} parts are averaged; use 'mean'")
        if self._of_loss("weight", None) is not None and num_parts > 1:
            raise BuildError(
                f"loss_fn weights its labels, so the mean over {num_parts} parts is another number; leave weight= out, "
                "or train with one micro-batch on one replica"
            )

    def _of_loss(self, name: str, default: Any) -> Any:
        """What a loss module, or a ``partial`` of a function, was made with."""
        given = self.loss_fn.keywords if isinstance(self.loss_fn, partial) else {}
        return given.get(name, getattr(self.loss_fn, name, default))

    @classmethod
    def of(cls, config: dict[str, Any]) -> Options:
        """Read a configuration.

        Raises:
            BuildError: an unknown key, or a value that cannot work.
        """
        known = [field.name for field in fields(cls)]
        for key in config:
            if key not in known:
                raise BuildError(str(UnknownNameError.of("option of target 'torch'", key, known)))
        options = cls(**config)
        options._check()
        return options

    def _check(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise BuildError(f"microbatches is {self.microbatches!r}; give a whole number from 1 on")
        if not isinstance(self.clip, (int, float)) or not self.clip >= 0:
            raise BuildError(f"clip is {self.clip!r}; give the largest gradient norm, or 0 for no clipping")
        if self.ignore_index is not None and type(self.ignore_index) is not int:
            raise BuildError(
                f"ignore_index is {self.ignore_index!r}; give the label value that the loss leaves out, a whole number"
            )
        if isinstance(self.loss_fn, nn.Module) and any(each.requires_grad for each in self.loss_fn.parameters()):
            raise BuildError("loss_fn has parameters of its own, which no optimizer would step; make them part of the model")
        kind_of(str(self.pipeline_schedule))
        if self.data_parallel not in DATA_PARALLEL:
            raise BuildError(str(UnknownNameError.of("data_parallel", str(self.data_parallel), DATA_PARALLEL)))
        if self.fsdp_units is not None and self.data_parallel != "fsdp":
            raise BuildError("fsdp_units are for data_parallel='fsdp'; give both, or none")
        if isinstance(self.fsdp_units, str):
            raise BuildError(f"fsdp_units is {self.fsdp_units!r}; give a list of globs, e.g. [{self.fsdp_units!r}]")
        if not (self.optimizer is None or callable(self.optimizer) or isinstance(self.optimizer, torch.optim.Optimizer)):
            raise BuildError(
                f"optimizer is {self.optimizer!r}; give a torch.optim.Optimizer, or a factory, e.g. lambda parameters: "
                "torch.optim.AdamW(parameters, lr=1e-3)"
            )
        if self.lr_scheduler is not None and not (self.optimizer is not None and is_rate_or_factory(self.lr_scheduler)):
            what = "there is no optimizer" if self.optimizer is None else f"lr_scheduler is {self.lr_scheduler!r}"
            raise BuildError(f"{what}; give optimizer=, and lr_scheduler= as one of torch.optim.lr_scheduler or a factory")
        if not isinstance(self.loss_scale, (int, float)) or not 1 <= self.loss_scale < float("inf"):
            raise BuildError(f"loss_scale is {self.loss_scale!r}; give a number from 1 on, e.g. 65536.0")
        if self.loss_fn is not None and not _takes_two(self.loss_fn):
            raise BuildError("loss_fn does not take (outputs, labels)")


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that has no signature
        return callable(function)
    return True
