"""Construction of a rank's optimizer, from a factory or an object, and of whole tensors where an update depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core import BuildError

from ..distributed.ranks import on_all
from ..options.common_options import CommonOptions
from .introspection.nested_optimizers import groups_in, optimizers_in
from .probe.update_probe import Finding
from .rank_optimizer import keep_types, made, scheduled_rate
from .whole_tensor_construction import Layout, WholeSteps, examined
from .whole_tensor_optimizer import WholeTensorOptimizer


class OptimizerMaking:
    """Makes one rank's optimizer: ``begin``, ``step_whole``, ``finish`` and ``discard_unstepped``, in this order on all ranks.

    Args:
        given: A factory, or an optimizer.
        layout: The parameters that the rank holds.
        module: This rank's stages.
        trainable: Parameters for the factory; empty on a rank that has nothing to train, or that has its optimizer.
        is_adopted: Whether an optimizer that was given has this rank's parameters already.

    Attributes:
        optimizer: The optimizer that was made; None where there is nothing to train.
        rate: The schedule of its learning rate, or None.
    """

    def __init__(
        self, given: Any, layout: Layout, module: nn.Module, trainable: Sequence[nn.Parameter], is_adopted: bool = False
    ) -> None:
        self._given, self._layout, self._module, self._trainable = given, layout, module, list(trainable)
        self._is_object = isinstance(given, torch.optim.Optimizer)
        self._is_adopted = is_adopted and self._is_object
        self._finding: Finding | None = None
        self._whole: WholeSteps | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.rate: Any = None

    def begin(self) -> None:
        """Make an optimizer of the rank's parameters, and probe its updates; touches no other rank."""
        if self._trainable:
            program, given = self._layout.program, self._given
            self.optimizer = given if self._is_adopted else made(given, self._trainable, program.module, self._module)
            self._finding = examined(self.optimizer, self._layout)

    def step_whole(self) -> None:
        """Prepare whole tensors where the optimizer needs them. Collective.

        Raises:
            BuildError: on every rank: its updates cannot be right on this layout.
        """
        self._whole = WholeSteps(self.optimizer, self._finding, self._layout)

    def finish(self, rate: Any, fits: Callable[[torch.optim.Optimizer], None] | None = None) -> None:
        """Make the optimizer of whole tensors, if it is one, and the schedule of its rate; touches no other rank.

        Args:
            rate: A schedule of the learning rate, a factory of one, or None.
            fits: Raises for an optimizer that the engine cannot take, or makes it fit, before the schedule is made.
        """
        if self.optimizer is None:
            return
        if self._whole is not None and self._whole.is_needed:
            make: Callable[[list[nn.Parameter]], Any] | None = None if self._is_object else self._given
            self.optimizer = self._whole.optimizer(self.optimizer, make, self._trainable)
        if fits is not None:
            fits(self.optimizer)
        keep_types(WholeTensorOptimizer.unwrap(self.optimizer))
        if rate is not None:
            self.rate = scheduled_rate(rate, self.optimizer)

    def discard_unstepped(self) -> None:
        """Discard whole tensors that the optimizer does not step. Collective."""
        if isinstance(self.optimizer, WholeTensorOptimizer):
            assert self._whole is not None
            self._whole.discard_unstepped(self.optimizer)


def made_on_all(
    options: CommonOptions, layout: Layout, mine: nn.Module, fits: Callable[[torch.optim.Optimizer], None]
) -> tuple[torch.optim.Optimizer | None, Any]:
    """Return this rank's optimizer and the schedule of its learning rate, each None where none is given. Collective.

    Args:
        options: Options of the engine.
        layout: The parameters that the rank holds.
        mine: This rank's stages.
        fits: Raises for an optimizer that the engine cannot take, or makes it fit, before the learning rate's schedule is made.

    Raises:
        BuildError: some rank cannot have them; an optimizer that was given is unchanged on all then.
    """
    if options.optimizer is None:
        return None, None
    trainable = [parameter for parameter in mine.parameters() if parameter.requires_grad]
    making = OptimizerMaking(options.optimizer, layout.with_blocks(options.optimizer_blocks), mine, trainable)

    def finish() -> None:
        making.finish(options.lr_scheduler, fits)
        if isinstance(making.rate, ReduceLROnPlateau):
            raise BuildError("lr_scheduler= gave a ReduceLROnPlateau, which is stepped without the loss here; give another")

    before = _Groups(options.optimizer) if isinstance(options.optimizer, torch.optim.Optimizer) else None
    try:
        on_all(making.begin, layout.program)
        making.step_whole()
        on_all(finish, layout.program)
        making.discard_unstepped()
    except Exception:
        if before is not None:
            before.restore()
        raise
    return making.optimizer, making.rate


class _Groups:
    """Snapshot of the parameter groups of an optimizer and of those inside it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._lists = [(each.param_groups, list(each.param_groups)) for each in optimizers_in(optimizer)]
        self._groups = [(group, dict(group)) for group in groups_in(optimizer)]

    def restore(self) -> None:
        """Restore the groups as they were."""
        for groups, before in self._lists:
            groups[:] = before
        for group, options in self._groups:
            group.clear()
            group.update(options)
