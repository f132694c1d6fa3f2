"""Stand-ins of one process group: whole parameters with memory on their owner, during a step only."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...gradient_hooks.sharded_attributes import attributes_cut_with
from .owner_exchange import LocalBox, OwnerExchange, assign_owners
from .whole_tensor import WholeTensor, stand_in

Tensors = Callable[[], Sequence[torch.Tensor]]


class StandIns:
    """Whole parameters that an optimizer steps in the places of their shards. Made collectively.

    Args:
        wholes: Whole tensors, the same on every rank of the group, in the order of the model.
        group: Process group of the ranks that hold shards; None if this rank holds all.
        everywhere: True if every rank steps all tensors, instead of one owner each.

    Attributes:
        wholes: The whole tensors.
        parameters: Stand-in of each whole tensor.
        is_on_all_ranks: True if every rank steps all tensors.
        is_in_place: True if ranks step shards in place.
    """

    is_in_place = False

    def __init__(self, wholes: Sequence[WholeTensor], group: dist.ProcessGroup | None, everywhere: bool) -> None:
        size = 1 if group is None else group.size()
        self.wholes, self._group, self.is_on_all_ranks = list(wholes), group, everywhere
        self._owners = None if everywhere else assign_owners(wholes, size)
        self._exchange = OwnerExchange(self.wholes, self._owners, group)
        self._owned = set(self._exchange.owned)
        self._tensors: Tensors | None = None
        self._labels: Sequence[int] = ()
        self.parameters: list[nn.Parameter] = []

    def drop_unused(self, known: Container[int]) -> bool:
        """Drop stand-ins that no optimizer has.

        Args:
            known: Ids of the parameters that an optimizer has.

        Returns:
            True if some were dropped; ``bind`` must be called again.
        """
        kept = [number for number, parameter in enumerate(self.parameters) if id(parameter) in known]
        if len(kept) == len(self.wholes):
            return False
        self.wholes = [self.wholes[number] for number in kept]
        self.parameters = [self.parameters[number] for number in kept]
        self._owners = None if self._owners is None else [self._owners[number] for number in kept]
        self._exchange = OwnerExchange(self.wholes, self._owners, self._group)
        self._owned = set(self._exchange.owned)
        return True

    def bind(self, tensors: Tensors, holdings: Sequence[LocalBox], labels: Sequence[int] | None = None) -> None:
        """Set the tensors with this rank's values and gradients. Collective.

        Args:
            tensors: Returns the rank's tensors, each with its gradient.
            holdings: Boxes of the whole tensors within these tensors.
            labels: Label of each stand-in; an engine may step the stand-ins of one label at a time.
        """
        self._tensors, self._labels = tensors, labels or [0] * len(self.wholes)
        self._exchange.bind(holdings, self._labels)

    def move(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors with the rank's values by others of the same layout."""
        before = self._tensors
        assert before is not None
        self._tensors = lambda: [value_of(each) for each in before()]

    def make(self) -> None:
        """Make the stand-ins with current values; ``release`` frees their memory. Collective."""
        masks = self._masks()
        for number, whole in enumerate(self.wholes):
            self.parameters.append(stand_in(whole, self._expanded_zero(whole), masks[number]))
        self.fetch()

    def owned_parameters(self, labels: Container[int] | None = None) -> list[nn.Parameter]:
        """Return the stand-ins with these labels that this rank steps; None for all labels."""
        return [self.parameters[number] for number in sorted(self._owned) if labels is None or self._labels[number] in labels]

    @torch.no_grad()
    def fetch(self) -> None:
        """Gather the values of the owned stand-ins. Collective."""
        self._allocate()
        self._exchange.gather([self._values()], [self._target])

    @torch.no_grad()
    def fetch_all(self, labels: Container[int] | None) -> None:
        """Gather values and gradients of the owned stand-ins with these labels. Collective."""
        values = self._values()
        gradients = [value.grad for value in values]
        known = self._exchange.has_gradient(gradients, self._device)
        self._allocate(labels)
        for number in self._owned:
            parameter = self.parameters[number]
            is_meant = known[number] and (labels is None or self._labels[number] in labels)
            parameter.grad = torch.empty_like(parameter) if is_meant else None
        self._exchange.gather([values, gradients], [self._target, lambda number: self.parameters[number].grad], labels)

    @torch.no_grad()
    def scatter(self, labels: Container[int] | None = None) -> None:
        """Scatter the new values to the ranks' shards. Collective."""
        self._exchange.scatter(self._target, self._values(), labels)

    def release(self) -> None:
        """Free the memory of the stand-ins."""
        for number, whole in enumerate(self.wholes):
            self.parameters[number].grad = None
            self.parameters[number].data = self._expanded_zero(whole)

    @property
    def _device(self) -> torch.device:
        return self.wholes[0].source.device

    def _values(self) -> list[torch.Tensor]:
        assert self._tensors is not None
        return list(self._tensors())

    def _target(self, number: int) -> torch.Tensor:
        return self.parameters[number].detach()

    def _allocate(self, labels: Container[int] | None = None) -> None:
        for number in self._owned:
            if labels is not None and self._labels[number] not in labels:
                continue
            whole = self.wholes[number]
            self.parameters[number].data = torch.empty(whole.shape, dtype=whole.dtype, device=self._device)

    def _expanded_zero(self, whole: WholeTensor) -> torch.Tensor:
        """Return a tensor of the whole shape with the memory of one element."""
        return torch.zeros((), dtype=whole.dtype, device=self._device).expand(whole.shape)

    @torch.no_grad()
    def _masks(self) -> list[dict[str, torch.Tensor]]:
        """Gather the tensor attributes that were sharded with the parameters, by name for each stand-in. Collective."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.wholes]
        own = [attributes_cut_with(whole.source) for whole in self.wholes]
        values = self._values()
        for name in sorted({name for each in own for name in each}):
            kinds = {number: each[name].dtype for number, each in enumerate(own) if name in each}
            for number, dtype in kinds.items():
                shape = self.wholes[number].shape
                is_owned = number in self._owned
                nothing = torch.zeros((), dtype=dtype, device=self._device)
                found[number][name] = nothing.expand(shape).clone() if is_owned else nothing.expand(shape)
            by_id = {id(whole.source): each.get(name) for whole, each in zip(self.wholes, own, strict=True)}
            parts = [by_id.get(id(value)) for value in values]
            self._exchange.gather([parts], [lambda number, name=name: found[number].get(name)])  # type: ignore[misc]
        return found
