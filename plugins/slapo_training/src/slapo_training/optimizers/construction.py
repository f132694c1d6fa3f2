"""Construction of a rank's optimizer, from a factory or an optimizer of the whole model, and of its learning-rate schedule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from slapo_core import BuildError, parameter_facts

from ..distributed.ranks import run_on_all_ranks
from ..options.common_options import CommonOptions, is_lr_scheduler
from .probe.introspection import groups_in, has_state, optimizers_in, replace_parameters
from .probe.update_probe import UpdateDependence
from .whole_tensor_construction import ParameterLayout, WholeTensorConstruction, probe_optimizer
from .whole_tensor_optimizer import WholeTensorOptimizer


def make_optimizer(given: Any, trainable: Sequence[nn.Parameter], model: nn.Module, mine: nn.Module) -> torch.optim.Optimizer:
    """Make this rank's optimizer by a factory, or of an optimizer of the unmodified model's parameters.

    Raises:
        BuildError: it is not an optimizer, is LBFGS, or has parameters of other ranks; a given optimizer is then unchanged.
    """
    result = given if isinstance(given, torch.optim.Optimizer) else given(list(trainable))
    if not isinstance(result, torch.optim.Optimizer):
        raise BuildError(f"optimizer= gave a {type(result).__name__}; it must return a torch.optim.Optimizer")
    if result is given:
        return adopt_optimizer(result, model, mine)
    _check_steps_once(result)
    _add_hook_tables(result)
    known = {id(each) for each in (*trainable, *mine.parameters())}
    if any(id(each) not in known for group in result.param_groups for each in group["params"]):
        raise BuildError("optimizer= gave an optimizer of other parameters than it was given; make it of these")
    return result


def _check_steps_once(optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers_in(optimizer)):
        raise BuildError("LBFGS computes the loss several times in a step, which no engine does; give another optimizer")


def _add_hook_tables(optimizer: torch.optim.Optimizer) -> None:
    """Add the hook tables of ``torch.optim.Optimizer`` to wrappers that do not call its ``__init__``."""
    tables = [
        name for name in vars(torch.optim.SGD([torch.zeros(())])) if name.startswith("_optimizer_") and name.endswith("hooks")
    ]
    for each in optimizers_in(optimizer):
        for name in tables:
            if not hasattr(each, name):
                setattr(each, name, OrderedDict())


def adopt_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, mine: nn.Module) -> torch.optim.Optimizer:
    """Replace the unmodified model's parameters in an optimizer by this rank's, in place, so that references stay valid.

    Raises:
        BuildError: the optimizer has stepped, or has parameters of another model; it is then unchanged.
    """
    _check_steps_once(optimizer)
    _add_hook_tables(optimizer)
    if has_state(optimizer):
        raise BuildError(
            "the optimizer has stepped already, or made its state at once, for parameters as they were; give a factory, "
            "lambda parameters: ..."
        )
    known = {parameter_facts(parameter).names for parameter in model.parameters()} - {()}
    held = {parameter_facts(parameter).names: parameter for parameter in mine.parameters() if parameter_facts(parameter).names}
    own = {id(parameter): parameter for parameter in mine.parameters()}
    for group in groups_in(optimizer):
        for parameter in group["params"]:
            if id(parameter) not in own and parameter_facts(parameter).names not in known:
                raise BuildError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not a parameter of the "
                    "scheduled model; make it of that model's parameters(), or give a factory, lambda parameters: ..."
                )

    def successors(parameter: nn.Parameter) -> list[nn.Parameter]:
        found = own.get(id(parameter), held.get(parameter_facts(parameter).names))
        return [] if found is None else [found]

    replace_parameters(optimizer, successors)
    return optimizer


def keep_state_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """Make ``load_state_dict`` keep the saved dtypes of an optimizer's state; torch casts it to the parameters' dtypes.

    An example is an fp32 momentum of bf16 weights. Torch keeps the dtype of ``step`` itself.
    """
    _add_hook_tables(optimizer)
    given: list[Mapping[str, Any]] = []

    def before(_: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
        given[:] = [packed]

    def after(loaded: torch.optim.Optimizer) -> None:
        for state, saved in _pairs(loaded, given.pop()):
            for key, value in saved.items():
                now = state.get(key)
                if key == "step" or not (isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)):
                    continue
                if now.dtype != value.dtype:
                    state[key] = value.to(now.device, copy=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _pairs(optimizer: torch.optim.Optimizer, packed: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Iterate over the state of each parameter and its saved state."""
    numbers = chain.from_iterable(group["params"] for group in packed["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, own, strict=True):
        if number in packed["state"]:
            yield optimizer.state[parameter], packed["state"][number]


def lr_scheduler_class(schedule: Any) -> str:
    """Return the class name of a learning-rate schedule, with the class names of its nested schedules."""
    inner = getattr(schedule, "_schedulers", ())
    return type(schedule).__name__ + (f"({', '.join(map(lr_scheduler_class, inner))})" if inner else "")


def make_lr_scheduler(given: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule, from an object or a factory ``optimizer -> schedule``.

    Raises:
        BuildError: it is not a schedule, or it is a schedule of another optimizer.
    """
    result = given if is_lr_scheduler(given) else given(optimizer)
    if not is_lr_scheduler(result):
        raise BuildError(f"lr_scheduler= gave a {type(result).__name__}; it must return one of torch.optim.lr_scheduler")
    if result.optimizer not in (optimizer, getattr(optimizer, "inner", None)):
        raise BuildError("lr_scheduler= is a schedule of another optimizer; give a factory, lambda optimizer: ...")
    return result


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
