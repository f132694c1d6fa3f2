"""Optimizer of one rank, from a factory or from an optimizer of the whole model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from slapo_core import BuildError, parameter_facts

from ..options.common_options import is_lr_scheduler
from .introspection.nested_optimizers import groups_in, optimizers_in
from .introspection.parameter_tables import has_state, replace_parameters


def make_optimizer(given: Any, trainable: Sequence[nn.Parameter], model: nn.Module, mine: nn.Module) -> torch.optim.Optimizer:
    """Make this rank's optimizer by a factory, or of an optimizer of the unmodified model's parameters.

    Raises:
        BuildError: it is no optimizer, it is LBFGS, or it has parameters of other ranks; a given optimizer is then unchanged.
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
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the scheduled model's; "
                    "make it of that model's parameters(), or give a factory, lambda parameters: ..."
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
                if (
                    key != "step"
                    and isinstance(now, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and now.dtype != value.dtype
                ):
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
        BuildError: it is no schedule, or it is a schedule of another optimizer.
    """
    result = given if is_lr_scheduler(given) else given(optimizer)
    if not is_lr_scheduler(result):
        raise BuildError(f"lr_scheduler= gave a {type(result).__name__}; it must return one of torch.optim.lr_scheduler")
    if result.optimizer not in (optimizer, getattr(optimizer, "inner", None)):
        raise BuildError("lr_scheduler= is a schedule of another optimizer; give a factory, lambda optimizer: ...")
    return result
