"""Examples for the conformance kit: models, calls on them, and calls that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .validation import check_fields

if TYPE_CHECKING:
    from slapo_core import Schedule

CHANGES = ("values", "names", "ties", "requires_grad", "training", "state_dict")
"""Properties that a primitive may change on purpose; see ``Example.changes``."""

NUMERICS = ("equal", "outputs", "distribution", "none")
"""Kinds of comparison with the unmodified model; see ``Example.numerics``."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Refused:
    """A call that the primitive must refuse in one sentence, before anything has changed.

    Args:
        match: Regular expression that matches a part of the message.
        args: Positional arguments, or a function of the schedule that returns them.
        kwargs: Keyword arguments.
        path: Path of the module it is called on; default: the example's.
    """

    match: str
    args: Arguments | Callable[[Schedule], Arguments] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Example:
    """One call of a primitive. With several ``ranks``, all functions are at module level and all values can be pickled.

    Args:
        model: Makes the unmodified model, with few parameters. It runs with a seed, so that all models are equal.
        inputs: One batch: a tuple of positional or a dict of keyword arguments, or a function that returns one.
        path: Path of the module the primitive is called on.
        args: Positional arguments, or a function of the schedule that returns them, as ``lambda sch: (sch.find("relu"),)``.
        kwargs: Keyword arguments.
        before: Takes the preceding steps, given the top schedule.
        after: Takes the steps that complete the model, such as the syncs of a sharded layer.
        refused: Calls that are refused. A primitive with parameters needs at least one in one of its examples.
        changes: Properties that the step changes on purpose: ``"values"`` of parameters, ``"names"`` (parameters disappear),
            ``"ties"``, ``"requires_grad"``, ``"training"`` modes, ``"state_dict"`` keys. The step must change each.
        numerics: ``"equal"``: outputs and gradients equal those of the unmodified model, in evaluation and training;
            ``"outputs"``: only outputs; ``"distribution"``: the mean of many runs in training; ``"none"``: not compared.
        tries: True if the step runs code of the model on trial, and handles its errors.
        because: Reason why ``numerics`` is not ``"equal"``, why the step cannot be saved, or what the step tries.
        atol: Largest absolute difference.
        rtol: Largest relative difference.
        writable: True if ``save`` can write the step; otherwise it must refuse in one sentence.
        ranks: Number of processes, started by ``run_distributed``; the schedule's group is their world.
        trust: Modules from which ``load_schedule`` may import classes and functions of the arguments.
        plugins: Modules with hook implementations to use with core only; default: all installed plugins.
        name: Name in messages of failed checks.
    """

    model: Callable[[], nn.Module]
    inputs: Arguments | dict[str, Any] | Callable[[], Arguments | dict[str, Any]]
    path: str = ""
    args: Arguments | Callable[[Schedule], Arguments] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[Schedule], Any] | None = None
    after: Callable[[Schedule], Any] | None = None
    refused: Sequence[Refused] = ()
    changes: Sequence[str] = ()
    numerics: str = "equal"
    tries: bool = False
    because: str = ""
    atol: float = 1e-5
    rtol: float = 1e-5
    writable: bool = True
    ranks: int = 1
    trust: Sequence[str] = ()
    plugins: Sequence[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, Refused)
        if unknown := [change for change in self.changes if change not in CHANGES]:
            raise ValueError(f"{self}: no change {unknown[0]!r}; available: {', '.join(CHANGES)}")
        if self.numerics not in NUMERICS:
            raise ValueError(f"{self}: numerics is {self.numerics!r}; available: {', '.join(NUMERICS)}")
        if self.ranks > 1:
            _check_module_level(self)
        if (self.numerics != "equal" or not self.writable or self.tries) and not self.because:
            odd = f"numerics={self.numerics!r}, writable={self.writable}, tries={self.tries}"
            raise ValueError(f"{self}: {odd}; say why with because=")

    def __str__(self) -> str:
        at = getattr(self.model, "__name__", "a model")
        at = f"{self.path!r} of {at}" if self.path else at
        return (self.name or at) + (f" on {self.ranks} ranks" if self.ranks > 1 else "")


@dataclass(frozen=True)
class RefusedOption:
    """Options of ``build`` that the dialect must refuse with a ``BuildError`` of one sentence.

    Args:
        match: Regular expression that matches a part of the message.
        options: Options of ``build``, in place of the example's.
    """

    match: str
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_fields(self)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, which is state that a checkpoint must save."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class EngineExample:
    """A model that an engine of the dialect trains. All functions are at module level, and all values can be pickled.

    Args:
        model: Makes the unmodified model; it runs with seed 0 and without dropout, so that losses are comparable.
        batch: Makes the batch of a step, given its number: keyword arguments for all data-parallel ranks together, with the
            batch in dimension 0.
        options: Options of ``build``.
        loss_fn: ``loss_fn(outputs, labels)``, for the batch's ``labels``; None takes the loss from the model's output.
        optimizer: A factory ``parameters -> optimizer``.
        before: Takes the steps of the schedule, given the top schedule, e.g. depending on the mesh's ``tp`` and ``pp``.
        mesh: Sizes of the axes ``pp``, ``dp`` and ``tp``; their product is the number of processes.
        refused: Options that are refused. A dialect needs at least one in one of its examples.
        atol: Largest absolute difference of a loss from the unmodified model's.
        plugins: Modules with hook implementations to use with core only; default: all installed plugins.
        name: Name in messages of failed checks.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    before: Callable[[Schedule], Any] | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    refused: Sequence[RefusedOption] = ()
    atol: float = 1e-5
    plugins: Sequence[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, RefusedOption)
        _check_module_level(self)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return math.prod(self.mesh.values())

    def __str__(self) -> str:
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items() if size > 1)
        return (self.name or getattr(self.model, "__name__", "a model")) + (f" with {axes}" if axes else "")


@dataclass(frozen=True)
class KernelExample:
    """One call of a kernel.

    Args:
        args: Positional arguments. Floating-point tensors are cast to each dtype and get gradients, but not those with
            infinities, which are masks.
        kwargs: Keyword arguments.
        refused: Regular expression that matches a part of the reason why the implementation refuses the call; ``""`` if it must
            compute the call, None if it may do either.
        name: Name in messages of failed checks.
    """

    args: Arguments
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = ""
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        tensors = [str(list(each.shape)) for each in self.args if isinstance(each, torch.Tensor)]
        options = [f"{name}={value}" for name, value in self.kwargs.items() if not isinstance(value, torch.Tensor)]
        return self.name or ", ".join(tensors + options)


@dataclass(frozen=True)
class RuleExample:
    """A layer that a sharding rule splits. All functions are at module level, and all values can be pickled.

    Args:
        layer: Makes the layer; it runs with a seed, so that all layers are equal.
        inputs: As ``Example.inputs``. Where the layer takes a sharded input, the first floating-point tensor is split.
        refused: Calls of ``shard`` on the layer that are refused. All other splits that the rule offers must work.
        ranks: Number of processes.
        atol: Largest absolute difference.
        rtol: Largest relative difference.
        plugins: Modules with hook implementations to use with core, tracing and sharding only; default: all installed plugins.
        name: Name in messages of failed checks.
    """

    layer: Callable[[], nn.Module]
    inputs: Arguments | dict[str, Any] | Callable[[], Arguments | dict[str, Any]]
    refused: Sequence[Refused] = ()
    ranks: int = 2
    atol: float = 1e-5
    rtol: float = 1e-5
    plugins: Sequence[str] = ()
    name: str = ""

    def __post_init__(self) -> None:
        check_fields(self, Refused)
        _check_module_level(self)

    def __str__(self) -> str:
        made = getattr(self.layer, "func", self.layer)  # of a partial
        return self.name or getattr(made, "__name__", "a layer")


def _check_module_level(example: Example | EngineExample | RuleExample) -> None:
    """Refuse functions that other processes cannot find by name."""
    for word, function in vars(example).items():
        if "<" in getattr(function, "__qualname__", ""):
            raise ValueError(f"{example}: {word} is a lambda or a function inside of one; write it at module level")
