"""Instance of an example: new models, their schedules, and their results."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slapo_core import (
    PluginError,
    Primitive,
    Registry,
    Schedule,
    ScheduleError,
    SlapoError,
    create_schedule,
    default_registry,
    parameter_facts,
    rng_state,
    set_rng_state,
    split_inputs,
)
from slapo_verify.comparison import Run, Tolerance, differences, run_model

from .examples import Example, Refused
from .model_snapshot import Snapshot, copy_containers, first_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
BUFFER_LABEL = " as left in the buffer "
"""Prefix of the paths of buffers, which distinguishes them from outputs."""


class ConformanceError(AssertionError):
    """Error of a primitive or dialect that breaks its contract: one sentence for each check that failed."""


def registry_of(plugins: Any) -> Registry:
    """Return a registry of core, tracing and the named modules; without names, of the installed plugins."""
    return Registry(map(importlib.import_module, ("slapo_tracing.plugin", *plugins))) if plugins else default_registry()


@dataclass
class Case:
    """An example of a primitive in this process.

    Args:
        name: Name of the primitive.
        example: The example.
        training: True to keep the modes of the example's model, False for evaluation mode.
        dtype: Dtype of floating-point parameters, buffers and inputs; default: those of the example.
        seed: Seed of the model.
        input_gradients: True to make all floating-point inputs require gradients.
        contiguous: False to permute the memory order of inputs.
    """

    name: str
    example: Example
    training: bool = True
    dtype: torch.dtype | None = None
    seed: int = 0
    input_gradients: bool = False
    contiguous: bool = True

    def __post_init__(self) -> None:
        self.registry = registry_of(self.example.plugins)

    @property
    def primitive(self) -> type[Primitive]:
        """Class of the primitive."""
        return self.registry.primitive(self.name)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Values of ``training`` for comparisons."""
        return (False,) if self.example.numerics == "distribution" else (False, True)

    def model(self) -> nn.Module:
        """Return a new model, with the same numbers each time."""
        torch.manual_seed(self.seed)
        made = self.example.model()
        if not isinstance(made, nn.Module):
            raise ConformanceError(f"the example's model gives {made!r}, which is not an nn.Module")
        made = made.to(self.dtype)
        return made if self.training else made.eval()

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of the model."""
        return split_inputs(self.example_inputs())

    def example_inputs(self) -> Any:
        """Return the inputs for ``create_schedule``; their tensors are new."""
        made = self.example.inputs
        if callable(made):
            state = rng_state()
            torch.manual_seed(1)
            made = made()
            set_rng_state(state)
        return pytree.tree_map_only(torch.Tensor, self._own, made)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point()
        own = tensor.detach().to(self.dtype if floating else None, copy=True)
        if not self.contiguous and own.layout is torch.strided and own.dim() > 1:
            own = own.transpose(0, -1).contiguous().transpose(0, -1)
        return own.requires_grad_(tensor.requires_grad or (floating and self.input_gradients))

    def begin(self, model: nn.Module | None = None, *, plain: bool = False) -> Schedule:
        """Return the top schedule after the steps of ``before``.

        Args:
            model: The model; default: a new one.
            plain: True to skip these steps.
        """
        model = self.model() if model is None else model
        schedule = create_schedule(model, example_inputs=self.example_inputs(), plugins=self.registry)
        if self.example.before is not None and not plain:
            self.example.before(schedule)
        return schedule

    def step(self, schedule: Schedule, *, seeded: bool = True, given: Arguments | None = None) -> None:
        """Call the primitive.

        Args:
            schedule: The top schedule.
            seeded: True to start from a fixed random state.
            given: Arguments of the call; default: those of the example.
        """
        if seeded:
            torch.manual_seed(2)
        args, kwargs = given or self.arguments(schedule)
        self.at(schedule).apply(self.name, *args, **kwargs)

    def arguments(self, schedule: Schedule) -> Arguments:
        """Return the arguments of the call, in new containers."""
        args = self.example.args
        return copy_containers(tuple(args(schedule) if callable(args) else args)), copy_containers(dict(self.example.kwargs))

    def at(self, schedule: Schedule, refused: Refused | None = None) -> Schedule:
        """Return the schedule that the primitive is called on."""
        path = self.example.path if refused is None or refused.path is None else refused.path
        return schedule[path] if path else schedule

    def finish(self, schedule: Schedule) -> Schedule:
        """Take the steps of ``after``."""
        if self.example.after is not None:
            self.example.after(schedule)
        return schedule

    def make_schedule(self) -> Schedule:
        """Return the schedule of a new model with all steps."""
        schedule = self.begin()
        self.step(schedule)
        return self.finish(schedule)

    def run(self, model: nn.Module, loss: Callable[[Any], torch.Tensor | None] | None = None) -> Run:
        """Return outputs, gradients of a loss or a weighted sum, and the values left in buffers."""
        args, kwargs = self.inputs()
        run = run_model(model, args, kwargs, loss)
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if parameter_facts(tensor).spec is None}
        run.outputs = [*run.outputs, *((f"{BUFFER_LABEL}{name!r}", tensor) for name, tensor in buffers.items())]
        return run

    def compare(
        self, expected: nn.Module, actual: nn.Module, what: str, keep: Callable[[Run, Run], None] | None = None
    ) -> None:
        """Check that both models compute the same from the same random state.

        Args:
            expected: The reference.
            actual: The model to check.
            what: Beginning of the error message.
            keep: Drops results that are not compared.

        Raises:
            ConformanceError: the results differ.
        """
        state = rng_state()
        wanted = self.run(expected)
        set_rng_state(state)
        self.same(wanted, self.run(actual), what, keep)

    def same(self, wanted: Run, found: Run, what: str, keep: Callable[[Run, Run], None] | None = None) -> None:
        """Compare the results of two runs, as ``compare`` does."""
        common_buffers(wanted, found)
        if keep is not None:
            keep(wanted, found)
        for difference in differences(wanted, found, Tolerance(self.example.atol, self.example.rtol)):
            mode = "training" if self.training else "evaluation"
            raise ConformanceError(f"{what}, in {mode}: {difference.message}{self._hint(difference.message)}")

    def _hint(self, message: str) -> str:
        """Return a hint for the author."""
        lost = "no parameter of this original name" in message and "names" in self.example.changes
        return '; for a step that changes names, numerics="outputs" is meant' if lost else ""

    def keep(self, model: nn.Module) -> Callable[[Run, Run], None]:
        """Return a function that drops results that are not comparable with the unmodified model, for the scheduled
        ``model``.
        """
        frozen = {name for p in model.parameters() if not p.requires_grad for name in parameter_facts(p).names}

        def drop(expected: Run, actual: Run) -> None:
            for run in (expected, actual):
                if self.example.numerics == "outputs":
                    run.loss, run.input_grads, run.param_grads = None, [], {}
                if "requires_grad" in self.example.changes:
                    run.loss = None  # the sum of what has a gradient
                    run.param_grads = {name: grad for name, grad in run.param_grads.items() if name not in frozen}

        return drop

    @contextmanager
    def check_unchanged(self, schedule: Schedule, what: str) -> Any:
        """Check that a ``with`` block leaves the model as it was, to the bit."""
        before = Snapshot(schedule)
        yield
        if found := before.differences(Snapshot(schedule)):
            raise ConformanceError(f"{what}, {first_of(found)}")

    def accepts(self, schedule: Schedule, what: str, action: Callable[[], Any]) -> bool:
        """Return True if an action succeeds. It may refuse, in one sentence, and must then leave the model as it was."""
        before = Snapshot(schedule)
        try:
            action()
        except SlapoError as error:
            check_sentence(error, what)
            if found := before.differences(Snapshot(schedule)):
                raise ConformanceError(f"{what} is refused, but {first_of(found)}") from error
            return False
        except Exception as error:
            raise ConformanceError(f"{what} raises {type(error).__name__}, not a ScheduleError: {error}") from error
        return True


def common_buffers(expected: Run, actual: Run) -> None:
    """Drop buffers that only one run has, since a primitive may add or remove some."""
    names = [{path for path, _ in run.outputs} for run in (expected, actual)]
    for run in (expected, actual):
        run.outputs = [
            (path, leaf) for path, leaf in run.outputs if not path.startswith(BUFFER_LABEL) or path in names[0] & names[1]
        ]


def check_sentence(error: BaseException, what: str, primitive: str = "") -> None:
    """Check that an error was raised on purpose, and is one sentence that names the place."""
    text = str(error)
    if isinstance(error, PluginError) or not isinstance(error, SlapoError):
        raise ConformanceError(f"{what} raises {type(error).__name__}, not a ScheduleError: {text}") from error
    if "\n" in text.strip() or not text.strip():
        raise ConformanceError(f"{what} is refused by {len(text.splitlines())} lines, not by one sentence: {text!r}") from error
    if primitive and isinstance(error, ScheduleError) and not text.startswith(f"{primitive}("):
        wanted = f"{primitive}(<path>): <what is wrong>; <what would work>"
        raise ConformanceError(f"{what} is refused by {text!r}, which does not read {wanted!r}") from error
