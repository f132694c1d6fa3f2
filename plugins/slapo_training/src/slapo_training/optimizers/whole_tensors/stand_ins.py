"""Stand-ins of one process group: their interface, and whole parameters with memory on their owner during a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...gradient_hooks.sharded_hooks import attributes_cut_with
from .exchange_routes import LocalBox, assign_owners
from .owner_exchange import OwnerExchange
from .whole_tensor import WholeTensor, stand_in

Tensors = Callable[[], Sequence[torch.Tensor]]


class StandIns(ABC):
    """Parameters that an optimizer steps in the places of a rank's shards, for one process group.

    Attributes:
        wholes: Whole tensors, the same on every rank of the group, in the order of the model.
        is_on_all_ranks: True if every rank steps whole tensors.
        is_in_place: True if ranks step shards in place.
    """

    is_on_all_ranks = is_in_place = False

    def __init__(self, wholes: Sequence[WholeTensor], group: dist.ProcessGroup | None) -> None:
        self.wholes, self._group = list(wholes), group
        self._owned: set[int] = set()
        self._tensors: Tensors | None = None
        self._labels: Sequence[int] = ()
        self.parameters: list[nn.Parameter] = []

    def drop_unused(self, known: Container[int]) -> bool:
        """Drop stand-ins that no optimizer has (``known``); return True if there were some: ``bind`` must be called again."""
        kept = [number for number, parameter in enumerate(self.parameters) if id(parameter) in known]
        if len(kept) == len(self.wholes):
            return False
        self.wholes = [self.wholes[number] for number in kept]
        self.parameters = [self.parameters[number] for number in kept]
        self._keep(kept)
        return True

    @abstractmethod
    def _keep(self, kept: Sequence[int]) -> None:
        """Forget all stand-ins but those of these indices, after ``wholes`` has been reduced to them."""

    def bind(self, tensors: Tensors, holdings: Sequence[LocalBox], labels: Sequence[int] | None = None) -> None:
        """Set the tensors with this rank's values and gradients. Collective.

        Args:
            tensors: Returns the rank's tensors, each with its gradient.
            labels: Label of each stand-in; an engine may step the stand-ins of one label at a time.
        """
        self._tensors, self._labels = tensors, labels or [0] * len(self.wholes)

    def move(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors with the rank's values by others of the same layout."""
        before = self._tensors
        assert before is not None
        self._tensors = lambda: [value_of(each) for each in before()]

    @abstractmethod
    def make(self) -> None:
        """Make the stand-ins with current values. Collective."""

    def owned_parameters(self, labels: Container[int] | None = None) -> list[nn.Parameter]:
        """Return the stand-ins with these labels that this rank steps; None for all labels."""
        return [self.parameters[number] for number in self._indices_of(labels)]

    @abstractmethod
    def fetch_all(self, labels: Container[int] | None) -> None:
        """Set values and gradients of the stepped stand-ins with these labels from the ranks' tensors. Collective."""

    @abstractmethod
    def scatter(self, labels: Container[int] | None = None) -> None:
        """Copy the new values to the ranks' tensors. Collective."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that only a step needs."""

    def _indices_of(self, labels: Container[int] | None) -> list[int]:
        return [number for number in sorted(self._owned) if labels is None or self._labels[number] in labels]

    @property
    def _device(self) -> torch.device:
        return self.wholes[0].source.device

    def _values(self) -> list[torch.Tensor]:
        assert self._tensors is not None
        return list(self._tensors())


class OwnerStandIns(StandIns):
    """Whole parameters with memory on their owner rank during a step. Made collectively.

    Without a group this rank holds all. With ``everywhere`` every rank steps all tensors, instead of one owner each.
    """

    def __init__(self, wholes: Sequence[WholeTensor], group: dist.ProcessGroup | None, everywhere: bool) -> None:
        super().__init__(wholes, group)
        self.is_on_all_ranks = everywhere
        self._owners = None if everywhere else assign_owners(wholes, 1 if group is None else group.size())
        self._make_exchange()

    def _make_exchange(self) -> None:
        self._exchange = OwnerExchange(self.wholes, self._owners, self._group)
        self._owned = set(self._exchange.owned)

    def _keep(self, kept: Sequence[int]) -> None:
        self._owners = None if self._owners is None else [self._owners[number] for number in kept]
        self._make_exchange()

    def bind(self, tensors: Tensors, holdings: Sequence[LocalBox], labels: Sequence[int] | None = None) -> None:
        super().bind(tensors, holdings, labels)
        self._exchange.bind(holdings, self._labels)

    def make(self) -> None:
        masks = self._masks()
        for number, whole in enumerate(self.wholes):
            self.parameters.append(stand_in(whole, self._expanded_zero(whole), masks[number]))
        self._allocate()
        with torch.no_grad():
            self._exchange.gather([self._values()], [self._target])

    @torch.no_grad()
    def fetch_all(self, labels: Container[int] | None) -> None:
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
        self._exchange.scatter(self._target, self._values(), labels)

    def release(self) -> None:
        for number, whole in enumerate(self.wholes):
            self.parameters[number].grad = None
            self.parameters[number].data = self._expanded_zero(whole)

    def _target(self, number: int) -> torch.Tensor:
        return self.parameters[number].detach()

    def _allocate(self, labels: Container[int] | None = None) -> None:
        for number in self._indices_of(labels):
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
