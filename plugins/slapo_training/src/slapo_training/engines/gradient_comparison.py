"""Comparison of the gradients of replicated parameters over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from slapo_core import BuildError, Program, gather_objects, is_sharded, parameter_facts, raise_on_all_ranks

from ..distributed.replicated_gradients import compare_gradients

_STEPS = 10


class GradientComparison:
    """Compares the gradients of the first steps as the backward makes them: later an engine may share them out.

    A gradient may be zero at first, as behind an adapter that starts at zero; such parameters are looked at in up to ten steps.

    Args:
        program: With a mesh where parameters are sharded.
        shape_of: Returns the shape of a parameter's gradient, where an engine empties the parameter itself.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, nn.Parameter],
        shape_of: Callable[[nn.Parameter], torch.Size] = lambda parameter: parameter.shape,
    ) -> None:
        self._program, self._shape_of = program, shape_of
        named = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._named = named if any(map(is_sharded, parameters.values())) else {}
        self._waiting = {name for name, parameter in self._named.items() if not is_sharded(parameter)}
        self._steps = 0
        self._is_done = not program.shard_specs  # the same on every rank

    @contextmanager
    def compare_backwards(self) -> Iterator[None]:
        """Compare the gradients of the backwards inside. Collective over the tensor-parallel ranks, behind the last of them.

        Raises:
            BuildError: on every rank; names a parameter of which each rank has a part only.
        """
        if self._is_done or self._steps == _STEPS:
            yield
            return
        self._steps += 1
        found: dict[str, torch.Tensor] = {}

        def note(name: str, gradient: torch.Tensor) -> None:
            gradient = gradient.detach()
            found[name] = found[name] + gradient if name in found else gradient.clone()

        with watch_gradients(self._named, note):
            yield
        named = {name: self._parameter_with_gradient(found.get(name), parameter) for name, parameter in self._named.items()}
        wrong, seen = compare_gradients(named, {name: named[name] for name in sorted(self._waiting)})
        self._waiting -= seen
        raise_on_all_ranks(BuildError(wrong) if wrong else None, self._program.mesh)
        # other stages and replicas may wait for gradients that this one has seen
        self._is_done = not any(gather_objects(bool(self._waiting), self._program.mesh))

    def _parameter_with_gradient(self, gradient: torch.Tensor | None, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of the same facts with this gradient."""
        if gradient is None:
            made = nn.Parameter(torch.empty(self._shape_of(parameter), dtype=parameter.dtype, device=parameter.device))
        else:
            made = nn.Parameter(torch.empty_like(gradient))
            made.grad = gradient
        parameter_facts(made).spec = parameter_facts(parameter).spec
        return made


@contextmanager
def watch_gradients(parameters: Mapping[str, nn.Parameter], note: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call ``note`` with a parameter\'s name and its gradient for each gradient that a backward inside makes."""
    with ExitStack() as handles:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                handles.enter_context(parameter.register_hook(partial(note, name)))  # type: ignore[no-untyped-call]
        yield
