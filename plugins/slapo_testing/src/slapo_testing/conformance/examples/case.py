"""One example of a primitive, made real: fresh models, their schedules, and what they compute."""

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

from .argument_copies import own
from .examples import Example, Refused
from .model_snapshot import Snapshot, first_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
LEFT = " as left in the buffer "
"""How buffers are told from outputs."""


class ConformanceError(AssertionError):
    """A primitive or dialect breaks its contract; one sentence for each check that failed."""


def registry_of(plugins: Any) -> Registry:
    """Return a registry of core, tracing and the named modules alone, or of the installed plugins where none are named."""
    return Registry(map(importlib.import_module, ("slapo_tracing.plugin", *plugins))) if plugins else default_registry()


@dataclass
class Case:
    """An example of a primitive, in this process.

    Args:
        name: The primitive.
        example: The example.
        training: Whether models are as the example makes them, or in evaluation.
        dtype: Of floating-point parameters, buffers and inputs; default: as the example makes them.
        seed: From which the model is made.
        input_gradients: Whether all floating-point inputs require gradients, and not those alone that the example says.
        contiguous: Whether inputs are as the example makes them, or of the same values in another order in memory.
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
        """Its class."""
        return self.registry.primitive(self.name)

    @property
    def modes(self) -> tuple[bool, ...]:
        """Return the values of ``training`` for comparisons, one after the other."""
        return (False,) if self.example.numerics == "distribution" else (False, True)

    def model(self) -> nn.Module:
        """A fresh one, of the same numbers each time."""
        torch.manual_seed(self.seed)
        made = self.example.model()
        if not isinstance(made, nn.Module):
            raise ConformanceError(f"the example's model gives {made!r}, which is no nn.Module")
        made = made.to(self.dtype)
        return made if self.training else made.eval()

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments."""
        return split_inputs(self.example_inputs())

    def example_inputs(self) -> Any:
        """The same as the schedule is given them; tensors are nobody else's."""
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
        """The top schedule, with the steps that come before.

        Args:
            model: Another one than a fresh one.
            plain: Without these steps.
        """
        model = self.model() if model is None else model
        schedule = create_schedule(model, example_inputs=self.example_inputs(), plugins=self.registry)
        if self.example.before is not None and not plain:
            self.example.before(schedule)
        return schedule

    def step(self, schedule: Schedule, *, seeded: bool = True, given: Arguments | None = None) -> None:
        """The call of the primitive.

        Args:
            schedule: The top schedule.
            seeded: Whether it draws from one random state, or from that of now.
            given: Its arguments; default: those of the example.
        """
        if seeded:
            torch.manual_seed(2)
        args, kwargs = given or self.arguments(schedule)
        self.at(schedule).apply(self.name, *args, **kwargs)

    def arguments(self, schedule: Schedule) -> Arguments:
        """Return the arguments of the call, in new containers."""
        args = self.example.args
        return own(tuple(args(schedule) if callable(args) else args)), own(dict(self.example.kwargs))

    def at(self, schedule: Schedule, refused: Refused | None = None) -> Schedule:
        """The handle it is called on."""
        path = self.example.path if refused is None or refused.path is None else refused.path
        return schedule[path] if path else schedule

    def finish(self, schedule: Schedule) -> Schedule:
        """The steps that come after."""
        if self.example.after is not None:
            self.example.after(schedule)
        return schedule

    def scheduled(self) -> Schedule:
        """A fresh model with all steps."""
        schedule = self.begin()
        self.step(schedule)
        return self.finish(schedule)

    def run(self, model: nn.Module, loss: Callable[[Any], torch.Tensor | None] | None = None) -> Run:
        """Outputs and gradients, of a loss or of a weighted sum, and what it leaves in its buffers."""
        args, kwargs = self.inputs()
        run = run_model(model, args, kwargs, loss)
        buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if parameter_facts(tensor).spec is None}
        run.outputs = [*run.outputs, *((f"{LEFT}{name!r}", tensor) for name, tensor in buffers.items())]
        return run

    def compare(
        self, expected: nn.Module, actual: nn.Module, what: str, keep: Callable[[Run, Run], None] | None = None
    ) -> None:
        """Both models compute the same, from the same random state.

        Args:
            expected: A model.
            actual: Another one.
            what: The beginning of the sentence.
            keep: Drops what is not to be compared.

        Raises:
            ConformanceError: they do not.
        """
        state = rng_state()
        wanted = self.run(expected)
        set_rng_state(state)
        self.same(wanted, self.run(actual), what, keep)

    def same(self, wanted: Run, found: Run, what: str, keep: Callable[[Run, Run], None] | None = None) -> None:
        """Compare as ``compare`` does, on models that have run."""
        common_buffers(wanted, found)
        if keep is not None:
            keep(wanted, found)
        for difference in differences(wanted, found, Tolerance(self.example.atol, self.example.rtol)):
            mode = "training" if self.training else "evaluation"
            raise ConformanceError(f"{what}, in {mode}: {difference.message}{self._meant(difference.message)}")

    def _meant(self, message: str) -> str:
        """Return what the author may have meant."""
        lost = "no parameter of this original name" in message and "names" in self.example.changes
        return '; for a step that changes names, numerics="outputs" is meant' if lost else ""

    def keep(self, model: nn.Module) -> Callable[[Run, Run], None]:
        """Drops what of runs beside the unmodified model is not to be compared, given the scheduled one."""
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
    def unchanged(self, schedule: Schedule, what: str) -> Any:
        """The model is to the bit what it was when the block is left."""
        before = Snapshot(schedule)
        yield
        if found := before.differences(Snapshot(schedule)):
            raise ConformanceError(f"{what}, {first_of(found)}")

    def takes(self, schedule: Schedule, what: str, action: Callable[[], Any]) -> bool:
        """Return whether an action happens; it may refuse, in one sentence, and then leaves the model as it was."""
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
    """A primitive may bring or drop buffers; those of both are compared."""
    names = [{path for path, _ in run.outputs} for run in (expected, actual)]
    for run in (expected, actual):
        run.outputs = [(path, leaf) for path, leaf in run.outputs if not path.startswith(LEFT) or path in names[0] & names[1]]


def check_sentence(error: BaseException, what: str, primitive: str = "") -> None:
    """Check that an error raised on purpose is one sentence that says where."""
    text = str(error)
    if isinstance(error, PluginError) or not isinstance(error, SlapoError):
        raise ConformanceError(f"{what} raises {type(error).__name__}, not a ScheduleError: {text}") from error
    if "\n" in text.strip() or not text.strip():
        raise ConformanceError(f"{what} is refused by {len(text.splitlines())} lines, not by one sentence: {text!r}") from error
    if primitive and isinstance(error, ScheduleError) and not text.startswith(f"{primitive}("):
        wanted = f"{primitive}(<path>): <what is wrong>; <what would work>"
        raise ConformanceError(f"{what} is refused by {text!r}, which does not read {wanted!r}") from error
