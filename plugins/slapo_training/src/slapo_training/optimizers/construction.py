"""Construction of a rank's optimizer, from a factory or an object, and of whole tensors if its updates depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core import BuildError

from ..distributed.ranks import run_on_all_ranks
from ..options.common_options import CommonOptions
from .introspection.nested_optimizers import groups_in, optimizers_in
from .probe.update_probe import UpdateDependence
from .rank_optimizer import keep_state_dtypes, make_lr_scheduler, make_optimizer
from .whole_tensor_construction import ParameterLayout, WholeTensorConstruction, probe_optimizer
from .whole_tensor_optimizer import WholeTensorOptimizer


class OptimizerConstruction:
    """Makes one rank's optimizer: ``begin``, ``step_whole``, ``finish`` and ``discard_unstepped``, in this order on all ranks.

    Args:
        given: A factory, or an optimizer.
        trainable: Parameters for the factory; empty without trainable parameters, or on a rank that has its optimizer.
        is_adopted: True if the given optimizer already has this rank's parameters.

    Attributes:
        rate: Learning-rate schedule of the optimizer, or None.
    """

    def __init__(
        self,
        given: Any,
        layout: ParameterLayout,
        module: nn.Module,
        trainable: Sequence[nn.Parameter],
        is_adopted: bool = False,
    ) -> None:
        self._given, self._layout, self._module, self._trainable = given, layout, module, list(trainable)
        self._is_object = isinstance(given, torch.optim.Optimizer)
        self._is_adopted = is_adopted and self._is_object
        self._finding: UpdateDependence | None = None
        self._whole: WholeTensorConstruction | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.rate: Any = None

    def begin(self) -> None:
        """Make an optimizer of the rank's parameters and probe its updates, with no message to other ranks."""
        if self._trainable:
            program, given = self._layout.program, self._given
            self.optimizer = given if self._is_adopted else make_optimizer(given, self._trainable, program.module, self._module)
            self._finding = probe_optimizer(self.optimizer, self._layout)

    def step_whole(self) -> None:
        """Make whole tensors if the optimizer needs them. Collective.

        Raises:
            BuildError: on every rank: the optimizer's updates cannot be right on this layout.
        """
        self._whole = WholeTensorConstruction(self.optimizer, self._finding, self._layout)

    def finish(self, rate: Any, fits: Callable[[torch.optim.Optimizer], None] | None = None) -> None:
        """Make the optimizer of whole tensors if needed, and the learning-rate schedule, with no message to other ranks.

        ``fits`` is called with the optimizer before the schedule is made; it adapts it, or raises if the engine cannot step
        it.
        """
        if self.optimizer is None:
            return
        if self._whole is not None and self._whole.is_needed:
            make: Callable[[list[nn.Parameter]], Any] | None = None if self._is_object else self._given
            self.optimizer = self._whole.optimizer(self.optimizer, make, self._trainable)
        if fits is not None:
            fits(self.optimizer)
        keep_state_dtypes(WholeTensorOptimizer.unwrap(self.optimizer))
        if rate is not None:
            self.rate = make_lr_scheduler(rate, self.optimizer)

    def discard_unstepped(self) -> None:
        """Discard whole tensors that the optimizer does not step. Collective."""
        if isinstance(self.optimizer, WholeTensorOptimizer):
            assert self._whole is not None
            self._whole.discard_unstepped(self.optimizer)


def make_on_all_ranks(
    options: CommonOptions, layout: ParameterLayout, mine: nn.Module, fits: Callable[[torch.optim.Optimizer], None]
) -> tuple[torch.optim.Optimizer | None, Any]:
    """Return this rank's optimizer and its learning-rate schedule; None for each option that is not set. Collective.

    Raises:
        BuildError: on every rank, if one fails; a given optimizer is then unchanged on all ranks.
    """
    if options.optimizer is None:
        return None, None
    trainable = [parameter for parameter in mine.parameters() if parameter.requires_grad]
    making = OptimizerConstruction(options.optimizer, layout.with_blocks(options.optimizer_blocks), mine, trainable)

    def finish() -> None:
        making.finish(options.lr_scheduler, fits)
        if isinstance(making.rate, ReduceLROnPlateau):
            raise BuildError("lr_scheduler= gave a ReduceLROnPlateau, which is stepped without the loss here; give another")

    given = options.optimizer
    with _restore_groups_on_error(given) if isinstance(given, torch.optim.Optimizer) else nullcontext():
        run_on_all_ranks(making.begin, layout.program)
        making.step_whole()
        run_on_all_ranks(finish, layout.program)
        making.discard_unstepped()
    return making.optimizer, making.rate


@contextmanager
def _restore_groups_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore the parameter groups of an optimizer and its nested optimizers after an error."""
    lists = [(each.param_groups, list(each.param_groups)) for each in optimizers_in(optimizer)]
    options = [(group, dict(group)) for group in groups_in(optimizer)]
    try:
        yield
    except Exception:
        for groups, before in lists:
            groups[:] = before
        for group, own in options:
            group.clear()
            group.update(own)
        raise
