"""Facts about a parameter. They are stored on the parameter itself and carried over when it is replaced or copied.

``copy.deepcopy`` of a parameter drops its attributes, so a copied model would treat its shards as unsharded. Importing this
module makes ``nn.Parameter.__deepcopy__`` copy the facts as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_FACTS = "_slapo_facts"


@dataclass(frozen=True)
class ShardSpec:
    """Record of how a local tensor is cut from a full one.

    Args:
        dim: Tensor dimension that is split, non-negative.
        full_shape: Shape of the unsharded tensor.
        rank: This rank in the group.
        num_shards: Size of the group.
        blocks: Sizes along ``dim`` of the fused blocks (e.g. q, k and v), each of which is split separately. They sum to
            ``full_shape[dim]``. An unfused tensor is one block.
        group: The process group of the shards; None if there is one shard.
        axis: Name of the mesh axis of that group.
        uneven_ranges: For every rank the ``(start, stop)`` ranges along ``dim`` that it holds, in order; None if blocks are
            split into equal parts. Elements in several ranges are replicated: their values are equal, and each copy has the
            full gradient.

    Example:
        >>> spec = ShardSpec(dim=0, full_shape=(8, 4), rank=1, num_shards=2, blocks=(8,))
        >>> spec.ranges(), spec.local(torch.ones(8, 4)).shape
        ([(4, 8)], torch.Size([4, 4]))
        >>> fused = ShardSpec(dim=0, full_shape=(12, 4), rank=1, num_shards=2, blocks=(4, 4, 4))
        >>> fused.ranges()
        [(2, 4), (6, 8), (10, 12)]
    """

    dim: int
    full_shape: tuple[int, ...]
    rank: int
    num_shards: int
    blocks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    axis: str = "tp"
    uneven_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def __deepcopy__(self, memo: object) -> ShardSpec:
        return self  # immutable, and its process group cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise TypeError("what is sharded cannot be pickled with its process group; save state_dict() or full_state()")
        return self.__dict__

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Return the ``(start, stop)`` ranges of the full tensor along ``dim`` that ``rank`` (default: this rank) holds, in
        order.
        """
        rank = self.rank if rank is None else rank
        if self.uneven_ranges is not None:
            return list(self.uneven_ranges[rank])
        blocks = zip(accumulate(self.blocks), self.blocks, strict=True)
        parts = [(stop - size, size // self.num_shards) for stop, size in blocks]
        return [(start + rank * part, start + (rank + 1) * part) for start, part in parts]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of ``dim`` on each rank."""
        if self.uneven_ranges is None:
            return (self.full_shape[self.dim] // self.num_shards,) * self.num_shards
        return tuple(sum(stop - start for start, stop in self.ranges(rank)) for rank in range(self.num_shards))

    def without_copies(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's shard that no later range holds, so that over all ranks each element occurs once."""
        if self.uneven_ranges is None:
            return shard
        line = replace(self, dim=0, full_shape=(self.full_shape[self.dim],))
        numbers = torch.arange(self.num_shards * max(self.sizes)).view(self.num_shards, -1)
        counts = line.local(line.assemble(numbers)) == numbers[self.rank, : self.sizes[self.rank]]
        return shard if counts.all() else shard.index_select(self.dim, counts.nonzero().squeeze(1).to(shard.device))

    def local(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return the shard of ``rank`` of ``full``: a new contiguous tensor, never a view, which would keep ``full`` alive."""
        ranges = self.ranges(rank)
        if len(ranges) == 1 and type(full) is torch.Tensor and full.is_meta and not full.requires_grad:
            shape = (*full.shape[: self.dim], ranges[0][1] - ranges[0][0], *full.shape[self.dim + 1 :])
            return torch.empty(shape, dtype=full.dtype, device=full.device)  # torch clones such tensors in Python
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def assemble(self, shards: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """Return the full tensor, assembled from the shards of all ranks in rank order. Padding behind a shard's size is
        ignored.
        """
        full = shards[0].new_empty(self.full_shape)
        for rank, shard in enumerate(shards):
            offset = 0
            for start, stop in self.ranges(rank):
                full.narrow(self.dim, start, stop - start).copy_(shard.narrow(self.dim, offset, stop - start))
                offset += stop - start
        return full


@dataclass
class ParameterFacts:
    """Facts of one parameter or buffer.

    Args:
        names: Its names in the unmodified model; several if it is tied; empty if a step of the schedule created it.
        spec: Shard specification; None if it is unsharded.
        tags: Free marks of primitives and users.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> sch = create_schedule(linear)
        >>> parameter_facts(linear.weight)
        ParameterFacts(names=('weight',), spec=None, tags=set())
    """

    names: tuple[str, ...] = ()
    spec: ShardSpec | None = None
    tags: set[str] = field(default_factory=set)


def parameter_facts(tensor: torch.Tensor) -> ParameterFacts:
    """Return the facts of a parameter or buffer, created at the first call.

    Example:
        >>> parameter_facts(nn.Parameter(torch.ones(2))).names
        ()
    """
    return tensor.__dict__.get(_FACTS) or tensor.__dict__.setdefault(_FACTS, ParameterFacts())  # type: ignore[no-any-return]


def shard_spec(tensor: torch.Tensor) -> ShardSpec | None:
    """Return the shard specification of a tensor, or None.

    Example:
        >>> shard_spec(nn.Parameter(torch.ones(2))) is None
        True
    """
    return getattr(tensor.__dict__.get(_FACTS), "spec", None)


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Return True if this rank holds only a part of the tensor.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> parameter_facts(weight).spec = ShardSpec(0, (4,), rank=0, num_shards=2, blocks=(4,))
        >>> is_sharded(weight), is_sharded(None)
        (True, False)
    """
    spec = shard_spec(tensor) if tensor is not None else None
    return spec is not None and spec.num_shards > 1


def successor(old: torch.Tensor, data: torch.Tensor, **changes: Any) -> torch.Tensor:
    """Return a tensor with new ``data`` to replace ``old``: same kind, ``requires_grad``, attributes, hooks and facts.

    Both share their tables of hooks, so that a handle of ``old`` still removes its hook.

    Args:
        old: A parameter or buffer.
        data: The new values; any shape.
        **changes: Facts that change, e.g. ``spec=``.

    Example:
        >>> old = nn.Parameter(torch.ones(4), requires_grad=False)
        >>> spec = ShardSpec(0, (4,), rank=0, num_shards=2, blocks=(4,))
        >>> new = successor(old, spec.local(old.detach()), spec=spec)
        >>> new.shape, new.requires_grad, is_sharded(new)
        (torch.Size([2]), False, True)
    """
    new = nn.Parameter(data, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else data
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, table, None):
            setattr(new, table, getattr(old, table))
    _carry(old, new)
    for name, value in changes.items():
        setattr(parameter_facts(new), name, value)
    return new


def _carry(old: torch.Tensor, new: torch.Tensor) -> None:
    new.__dict__.update(old.__dict__)
    setattr(new, _FACTS, ParameterFacts(parameter_facts(old).names, parameter_facts(old).spec, set(parameter_facts(old).tags)))


_plain_deepcopy: Callable[[nn.Parameter, dict[int, Any]], nn.Parameter] = nn.Parameter.__deepcopy__


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a copy with the facts and with those hooks that define ``__deepcopy__``.

    Torch copies no hooks, since most refer to their parameter.
    """
    is_new = id(parameter) not in memo
    copied = _plain_deepcopy(parameter, memo)
    if is_new and _FACTS in parameter.__dict__:
        _carry(parameter, copied)
        hooks = [(key, hook) for key, hook in (parameter._backward_hooks or {}).items() if hasattr(hook, "__deepcopy__")]
        # set directly, since register_hook refuses frozen parameters
        copied._backward_hooks = OrderedDict((key, hook.__deepcopy__(memo)) for key, hook in hooks)
    return copied


nn.Parameter.__deepcopy__ = _deepcopy  # type: ignore[method-assign,assignment]


def name_parameters(root: nn.Module) -> list[torch.Tensor]:
    """Write the names of each parameter and buffer into its facts, and return the tied ones. Linear in the model."""
    named: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in chain(root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
        named.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, names in named.values():
        parameter_facts(tensor).names = tuple(names)
    return [tensor for tensor, names in named.values() if len(names) > 1]
