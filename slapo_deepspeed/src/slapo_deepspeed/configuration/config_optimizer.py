"""Checks of the optimizer and scheduler in DeepSpeed's config: DeepSpeed fails late, on some ranks first, and names no key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from slapo_core import BuildError, UnknownNameError

from ..process_state._deepspeed_private import optimizer_class, optimizer_names, schedule_classes

ADAM = ("adam", "adamw")
_COMPILED = ("lamb", "lion", "muon")
_OF_MUP = ("muadam", "muadamw", "musgd")
_OFFLOADED = ("cpu", "nvme")


def check_section(name: str, section: Mapping[str, Any]) -> None:
    """Refuse an optimizer or a scheduler of DeepSpeed's config without a type, or with a string for a number.

    Raises:
        BuildError: the type is missing, ``params`` is not an object, or a parameter is a string instead of a number.
    """
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(kind, str):
        found = "no type" if kind is None else f"type {kind!r}"
        raise BuildError(f"the {name} in DeepSpeed's config has {found}; give the name of its class")
    if not isinstance(params, Mapping):
        raise BuildError(f"params of the {name} in DeepSpeed's config is {params!r}; it has to be an object")
    for key, value in params.items():
        if isinstance(value, str) and _is_number(key, value):
            raise BuildError(f"{key} of the {name} in DeepSpeed's config is {value!r}; it has to be a number")


def compiled_on_cpu(given: Mapping[str, Any]) -> str:
    """Return the optimizer or setting in DeepSpeed's config that needs compilation on a CPU, or ''."""
    kind, params = _kind(given), given.get("optimizer", {}).get("params", {})
    if kind in _COMPILED or (kind == "adagrad" and is_offloaded(given)):
        return str(given["optimizer"]["type"])
    return "torch_adam off" if kind in ADAM and not params.get("torch_adam", True) else ""


def with_torch_adam(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section, with Adam and AdamW set to torch's, because DeepSpeed compiles its own."""
    if str(section["type"]).lower() not in ADAM:
        return dict(section)
    return {**section, "params": {**section.get("params", {}), "torch_adam": True}}


def factory_of(settled: Mapping[str, Any], has_parts: bool) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None:
    """Return a factory of the config's optimizer if it may need whole tensors, but DeepSpeed would step shards; else None.

    With ``has_parts``, ranks hold tensor-parallel shards.

    Raises:
        BuildError: the optimizer is Muon, and ranks hold shards of the matrices that it steps.
    """
    if (kind := _kind(settled)) == "muon" and has_parts:
        raise BuildError(
            "Muon in DeepSpeed's config steps each rank's tensor-parallel parts of the matrices; give optimizer=, e.g. "
            "torch.optim.Muon"
        )
    if is_offloaded(settled) or kind in (*ADAM, *_OF_MUP, "muon", "lion", "adagrad", ""):
        return None
    section = settled["optimizer"]
    name, params = section["type"], dict(section.get("params", {}))
    if kind == "lamb":
        return partial(_class_of(kind, settled, params), **params)
    return None if kind in optimizer_names() else partial(getattr(torch.optim, name), **params)


def is_offloaded(given: Mapping[str, Any]) -> bool:
    """Return True if ZeRO keeps the optimizer's states outside the accelerator."""
    section = given.get("zero_optimization", {}).get("offload_optimizer")
    return isinstance(section, Mapping) and section.get("device") in _OFFLOADED


def check_made(settled: Mapping[str, Any]) -> None:
    """Refuse an optimizer or a scheduler in the settled configuration that DeepSpeed could not make.

    Raises:
        BuildError: the type is unknown, or the class takes other parameters.
    """
    if "optimizer" in settled:
        _check_optimizer(settled)
    if "scheduler" in settled:
        _check_scheduler(settled)


def _check_optimizer(settled: Mapping[str, Any]) -> None:
    section, kind = settled["optimizer"], _kind(settled)
    params = dict(section.get("params", {}))
    if kind in _OF_MUP:
        if find_spec("mup") is None:
            raise BuildError(f"the optimizer {section['type']!r} in DeepSpeed's config needs the package mup; install it")
        return
    if kind == "muon":
        return  # Muon distributes its parameters over two optimizers
    own = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lamb": "Lamb", "lion": "Lion"}
    torchs = [name for name, each in vars(torch.optim).items() if _is_class(each, torch.optim.Optimizer)]
    if kind not in optimizer_names() and section["type"] not in torchs:
        known = {*torchs, *(own.get(each, each) for each in optimizer_names())} - {"Optimizer"}
        raise _unknown("optimizer", section["type"], known)
    extra = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"} if kind in ADAM else set[str]()
    made = _class_of(kind, settled, params) if kind in optimizer_names() else getattr(torch.optim, section["type"])
    _check_params("optimizer", section["type"], made, {key: params[key] for key in params.keys() - extra}, extra)


def _class_of(kind: str, settled: Mapping[str, Any], params: Mapping[str, Any]) -> Any:
    """Return the class that DeepSpeed uses for one of its own optimizer types."""
    if kind in ADAM and params.get("torch_adam"):
        return torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return optimizer_class(kind, is_offloaded(settled))


def _check_scheduler(settled: Mapping[str, Any]) -> None:
    kind, params, own = settled["scheduler"]["type"], settled["scheduler"].get("params", {}), schedule_classes()
    if kind in own:
        _check_params("scheduler", kind, own[kind], params)
        return
    torchs = [name for name, each in vars(torch.optim.lr_scheduler).items() if _is_class(each, LRScheduler)]
    if kind not in torchs:
        raise _unknown("scheduler", kind, {*torchs, *own} - {"LRScheduler", "_LRScheduler"})
    if settled["zero_optimization"]["stage"]:
        raise BuildError(
            f"the scheduler {kind!r} in DeepSpeed's config is torch's, which takes no optimizer of ZeRO; give optimizer= and "
            f"lr_scheduler=, or one of {', '.join(own)}"
        )
    _check_params("scheduler", kind, getattr(torch.optim.lr_scheduler, kind), params)


def _check_params(name: str, kind: str, made: Any, params: Mapping[str, Any], extra: set[str] | None = None) -> None:
    """Refuse parameters that a class does not take, and the lack of required ones."""
    first, *known = inspect.signature(made).parameters.values()
    names = {each.name for each in known} | (extra or set())
    for key in params:
        if key not in names:
            notes = ["give gradient_clipping"] if key == "max_grad_norm" else []
            raise BuildError(
                str(UnknownNameError.of("parameter", key, names, notes, f"the {name} {kind!r} in DeepSpeed's config"))
            )
    missing = [each.name for each in known if each.default is each.empty and each.name not in params]
    if missing:
        raise BuildError(f"the {name} {kind!r} in DeepSpeed's config needs {' and '.join(missing)}; give it in its params")


def _unknown(name: str, kind: str, known: set[str]) -> BuildError:
    return BuildError(str(UnknownNameError.of(name, kind, known, whose="DeepSpeed's config")))


def _is_class(value: Any, of: type) -> bool:
    return isinstance(value, type) and issubclass(value, of)


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get("optimizer", {}).get("type", "")).lower()


def _is_number(key: str, value: str) -> bool:
    """Return True if a string stands in place of a number."""
    try:
        float(value)
    except ValueError:
        return value == "auto" or key == "lr"
    return True
