"""``apply_schedule``: the ready schedule of a model family, by its key; and the schedules registered in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from slapo_core import Entry, Registry, Schedule, ScheduleError, UnknownNameError, create_schedule, default_registry

from .shared_steps.configuration import CREATE_SCHEDULE_OPTIONS
from .shared_steps.precision import restored_on_error

Function = TypeVar("Function", bound=Callable[..., Any])


AUTO = "auto"
"""Key of the schedule for models without one of their own."""


def apply_schedule(model_or_schedule: nn.Module | Schedule, key: str = "auto", **config: Any) -> Schedule:
    """Schedule a model by the ready schedule of its family.

    The steps are those of primitives, each in the journal. Where one fails, those before it are undone.

    Args:
        model_or_schedule: The model, or its schedule.
        key: ``"gpt2"``, say; ``slapo models`` lists them. ``"auto"``: the schedule of the model's ``config.model_type`` if
            there is one, otherwise one for any ``nn.Module``, made from its repeated blocks and its plans.
        **config: The classic configuration names, see the README of slapo-models; and for a model ``group``, ``mesh``,
            ``example_inputs`` and ``plugins`` of ``create_schedule``. Without ``example_inputs`` those are taken that
            Transformers tries the model's class with, tokens without labels.

    Returns:
        The schedule.

    Raises:
        UnknownNameError: no such schedule, or no such configuration name.
        ScheduleError: a configuration that cannot be served, or a step that is illegal; the model is as before.
    """
    registry = _registry_of(model_or_schedule, config)
    module = model_or_schedule.mod if isinstance(model_or_schedule, Schedule) else model_or_schedule
    return _schedule_of(key_of_model(module, registry) if key == AUTO else key, registry)(model_or_schedule, **config)


def key_of_model(model: nn.Module, registry: Registry) -> str:
    """Return the key of a model: its ``config.model_type`` if there is a schedule of this name, otherwise ``"auto"``."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type if isinstance(model_type, str) and model_type in schedule_names(registry) else AUTO


def get_schedule(key: str) -> Callable[..., Schedule]:
    """The ready schedule of a key: a function of a model or schedule, and the configuration.

    Raises:
        UnknownNameError: no such schedule.
    """
    return _schedule_of(key, default_registry())


REGISTERED_SCHEDULES: dict[str, Entry] = {}
"""Key to the function that was registered in this process."""


def register_schedule(key: str | None = None) -> Callable[[Function], Function]:
    """Register a function ``(model_or_schedule, **config) -> Schedule`` in this process, by a decorator.

    It is for notebooks and tests; plugins use the hook ``slapo_models``.
    Registering a function of the same module and name once more, as notebooks do, replaces it.

    Args:
        key: What ``apply_schedule`` is to call it; by default the name of the file the function is in, without its suffix.

    Raises:
        PluginError: a plugin, or another function, has this key.
    """
    if callable(key):
        raise ScheduleError(
            "is given a function; write @register_schedule() or @register_schedule('key')", primitive="register_schedule"
        )

    def register(function: Function) -> Function:
        entry = Entry("model", Path(inspect.getfile(function)).stem if key is None else key, function)
        entry.check(())
        before = REGISTERED_SCHEDULES.get(entry.name)
        others = [each for each in default_registry().entries("model") if each.name == entry.name]
        if before is not None and _import_path(before.target) != _import_path(function):
            others.append(before)
        if others:
            raise Entry.conflict([*others, entry])
        REGISTERED_SCHEDULES[entry.name] = entry
        return function

    return register


def _schedule_of(key: str, registry: Registry) -> Callable[..., Schedule]:
    if key in REGISTERED_SCHEDULES:
        return partial(_apply_with_rollback, key, REGISTERED_SCHEDULES[key].target, True)
    try:
        function = registry.get("model", key)
    except UnknownNameError as error:
        failures = [record.failure for record in registry.records if record.failure]
        raise UnknownNameError.of("schedule", key, schedule_names(registry), failures) from error
    return partial(_apply_with_rollback, key, function, False)


def _apply_with_rollback(
    key: str, function: Callable[..., Any], classic: bool, given: nn.Module | Schedule, /, **config: Any
) -> Schedule:
    """Run a function, and undo its steps if it fails.

    A ``classic`` one takes what ``apply_schedule`` was given, and not always a schedule. ``key`` is for errors.
    """
    if not classic:
        schedule, options = _schedule_for(key, given, config)
    elif isinstance(given, Schedule):
        schedule, options = given, config
    else:
        return _require_schedule(key, function(given, **config))
    steps = len(schedule.journal)
    with restored_on_error(schedule.root_module):
        try:
            return _require_schedule(key, function(schedule, **options) or schedule)
        except BaseException:
            with suppress(ScheduleError):  # the function has built the schedule
                while len(schedule.journal) > steps:
                    schedule.undo()
            raise


def _require_schedule(key: str, found: Any) -> Schedule:
    if not isinstance(found, Schedule):
        raise ScheduleError(f"apply_schedule({key!r}): the function returned a {type(found).__name__}; return the schedule")
    return found


def _schedule_for(key: str, given: nn.Module | Schedule, config: Mapping[str, Any]) -> tuple[Schedule, dict[str, Any]]:
    """Return the schedule, and the rest of the configuration that is not for ``create_schedule``."""
    options = {name: value for name, value in config.items() if name not in CREATE_SCHEDULE_OPTIONS}
    creation = {name: value for name, value in config.items() if name in CREATE_SCHEDULE_OPTIONS and value is not None}
    if not isinstance(given, Schedule):
        schedule = create_schedule(given, **creation)
        if schedule.example_inputs is None and (inputs := _dummy_inputs(given, max(schedule.world_size, 1))) is not None:
            schedule = create_schedule(given, **creation, example_inputs=inputs)
        return schedule, options
    if creation.get("group") is given.group:
        creation.pop("group", None)
    if creation:
        message = f"{next(iter(creation))} is that of the schedule which is given; leave it out, or give the model"
        raise ScheduleError(f"apply_schedule({key!r}): {message}", path=given.path)
    return given, options


def _dummy_inputs(model: nn.Module, ranks: int) -> dict[str, torch.Tensor] | None:
    """Return Transformers' dummy tokens, made longer by the number of ranks so that the sequence can be divided.

    A model that takes images or sound has none that fit it.
    """
    inputs, config = getattr(model, "dummy_inputs", None), getattr(model, "config", None)
    takes_more = getattr(model, "main_input_name", "input_ids") != "input_ids" or hasattr(config, "vision_config")
    if not isinstance(inputs, dict) or takes_more:
        return None
    device = next((parameter.device for parameter in model.parameters() if not parameter.is_meta), "cpu")
    return {name: value.to(device).repeat(*(1,) * (value.dim() - 1), ranks) for name, value in inputs.items()}


def _registry_of(given: nn.Module | Schedule, config: Mapping[str, Any]) -> Registry:
    if isinstance(given, Schedule):
        return given.registry
    plugins = config.get("plugins")
    return plugins if isinstance(plugins, Registry) else default_registry()


def schedule_names(registry: Registry) -> list[str]:
    """Return all keys, including those of this process."""
    return sorted({*REGISTERED_SCHEDULES, *(entry.name for entry in registry.entries("model"))})


def _import_path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"
