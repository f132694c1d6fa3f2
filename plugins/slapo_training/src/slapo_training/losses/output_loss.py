"""Loss in a model's output: the option ``loss``, a field called ``loss``, or the only number with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from slapo_core import BuildError, rng_state, set_rng_state

from ..batches.nested_tensors import Path, fields_of, tensors_of
from ..distributed._torch_private import leaves_of
from ._torch_private import memory_place

LossChoice = str | int | Callable[[Any], torch.Tensor]
"""Selection of the loss in a model's output: key, field, position, or a function of the output."""

_MAX_LISTED = 6


def check_choice(choice: Any) -> None:
    """Raise ``BuildError`` for a value of the option ``loss`` that cannot work."""
    if isinstance(choice, bool) or not (choice is None or isinstance(choice, str | int) or callable(choice)):
        raise BuildError(
            f"loss is {choice!r}; give the key or position of the loss in the model's output, or a function of the output"
        )


class OutputLoss:
    """Finds the loss in a model's outputs.

    Without the option, a field called ``loss`` is the loss; otherwise the one number with a gradient. Numbers made only from
    parameters with one element are excluded, e.g. a temperature. In evaluation numbers have no gradients: the loss has the same
    path as in training. Before any training, one forward of the last stage with gradients finds the path.
    """

    def __init__(self, choice: LossChoice | None = None) -> None:
        self._choice = choice
        self._places: set[Path] = set()
        self._parameters: set[Path] = set()

    def of_model(self, model: Callable[[], Any]) -> torch.Tensor:
        """Run a model, or its last stage, and return the loss in its output, see ``of``."""
        output = model()
        if not torch.is_grad_enabled() and self._is_ambiguous(output):
            self._search(model)
        return self.of(output)

    def of(self, output: Any) -> torch.Tensor:
        """Return the loss in an output, a tensor of one element.

        Raises:
            BuildError: there is no loss, or several numbers may be the loss.
        """
        if isinstance(output, torch.Tensor) and self._choice is None:
            return output
        if self._choice is not None:
            return _loss_by_option(self._choice, output)
        if _has_loss(output):
            return _part_of_output(output, "loss")  # type: ignore[no-any-return]
        found = self._differentiable(output) if torch.is_grad_enabled() else self._loss_candidates(output)
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            kind = "differentiable numbers" if torch.is_grad_enabled() else "numbers"
            raise BuildError(
                f"the model returns several {kind}, {', '.join(map(repr, found))}, and each may be its loss; say which is with "
                "loss= on build: a key, a position, or a function, e.g. loss=lambda output: output[0]"
            )
        others = tensors_of(_object_attributes(output))
        what = _describe(others) if others else f"a {type(output).__name__}"
        raise BuildError(f"the model returns no loss but {what}; give the model labels, or build with loss_fn= or loss=")

    def _is_ambiguous(self, output: Any) -> bool:
        """Return True if several numbers of an output without gradients may be the loss."""
        if self._choice is not None or isinstance(output, torch.Tensor) or _has_loss(output):
            return False
        return len(_scalar_tensors(output)) > 0 and len(_scalar_tensors(output).keys() & self._places) != 1

    def _search(self, model: Callable[[], Any]) -> None:
        """Find the loss by a forward with gradients, and restore the random state.

        An engine may refuse a second forward, e.g. FSDP units, which are gathered once; the loss is then not found.
        """
        state = rng_state()
        torch.clear_autocast_cache()  # cached casts of weights have no gradients
        try:
            with torch.enable_grad(), suppress(BuildError):
                self._differentiable(model())
        finally:
            torch.clear_autocast_cache()
            set_rng_state(state)

    def _differentiable(self, output: Any) -> dict[Path, torch.Tensor]:
        """Return the numbers that may be the loss: those with gradients; all numbers if no output has a gradient."""
        numbers = _scalar_tensors(output)
        found = {path: each for path, each in numbers.items() if each.requires_grad and path not in self._parameters}
        new = {path for path in found.keys() - self._places if _is_parameter(found[path])}
        self._parameters |= new
        found = _distinct({path: each for path, each in found.items() if path not in new})
        if len(found) == 1:
            self._places |= found.keys()
        has_gradients = any(each.requires_grad for each in tensors_of(_object_attributes(output)).values())
        return found if has_gradients else _distinct(numbers)

    def _loss_candidates(self, output: Any) -> dict[Path, torch.Tensor]:
        """Return the numbers of an output without gradients that may be the loss."""
        found = {path: each for path, each in _scalar_tensors(output).items() if path not in self._parameters}
        known = {path: each for path, each in found.items() if path in self._places}
        return known if len(known) == 1 else _distinct(found)


def _loss_by_option(choice: LossChoice, output: Any) -> torch.Tensor:
    """Return the loss that the option selects; raise ``BuildError`` if there is no such part, or it is not a number."""
    if callable(choice):
        loss, what = choice(output), "loss= gives"
    else:
        loss, what = _part_of_output(output, choice), f"loss={choice!r} is"
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise BuildError(f"{what} {shown} in the model's output; it has to be a tensor of one number")
    return loss


def _part_of_output(output: Any, name: str | int) -> Any:
    """Return a part of an output by its key, position or field; raise ``BuildError`` if there is no such part."""
    try:
        if isinstance(output, Mapping) and name in output:
            return output[name]
        return getattr(output, name) if isinstance(name, str) else output[name]
    except (AttributeError, IndexError, KeyError, TypeError) as err:
        fields = fields_of(_object_attributes(output))
        has = ", ".join(map(repr, fields)) if fields else f"is a {type(output).__name__}"
        raise BuildError(f"the model's output has no {name!r}, which loss= names; it has {has}") from err


def _has_loss(output: Any) -> bool:
    """Return True if an output has a field or key called ``loss``, even if its value is None."""
    return hasattr(output, "loss") or (isinstance(output, Mapping) and "loss" in output)


def _object_attributes(output: Any) -> Any:
    """Return the attributes of an object of a user's class; return other outputs unchanged."""
    if isinstance(output, torch.Tensor) or fields_of(output) is not None:
        return output
    return getattr(output, "__dict__", output)


def _scalar_tensors(output: Any) -> dict[Path, torch.Tensor]:
    """Return the floating-point tensors of one element."""
    found = tensors_of(_object_attributes(output))
    return {path: each for path, each in found.items() if each.numel() == 1 and each.is_floating_point()}


def _distinct(numbers: dict[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
    """Return the numbers without dimensions, if any, since others may be results of a single row; one per memory."""
    found: dict[tuple[int, int], tuple[Path, torch.Tensor]] = {}
    for path, each in ({path: each for path, each in numbers.items() if not each.dim()} or numbers).items():
        found.setdefault(memory_place(each), (path, each))  # an engine may replace a tensor by several views
    return dict(found.values())


def _is_parameter(number: torch.Tensor) -> bool:
    """Return True if a number was computed only from leaves with one element, e.g. a temperature."""
    leaves = leaves_of([number])
    return bool(leaves) and all(each.numel() == 1 for each in leaves)


def _describe(tensors: Mapping[Path, torch.Tensor]) -> str:
    def describe_items(items: Iterable[tuple[Path, torch.Tensor]]) -> str:
        return ", ".join(f"{path!r} of shape {tuple(each.shape)}" for path, each in items)

    items = [*tensors.items()]
    return describe_items(items[:_MAX_LISTED]) + (f" and {len(items) - _MAX_LISTED} others" if len(items) > _MAX_LISTED else "")
