"""What a rank of DeepSpeed's engine has of each tensor: whole ones of its stage, or with ZeRO numbers of flat fp32 ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.model import Piece, buffers, parameters, piece_of

from ..process_state import _deepspeed_private as private


class Share(NamedTuple):
    """Numbers of a parameter or buffer that this rank has.

    Args:
        name: The tensor's first name in the unmodified model.
        value: They, a view: in fp32 where the optimizer keeps them so, in one line where they are no whole tensor.
        start: How many numbers of this pipeline and tensor-parallel rank's part of the tensor are before them.
        stepped: The tensor that the optimizer steps and that has them; None where nothing does.
        offset: How many numbers of that one are before them.
    """

    name: str
    value: torch.Tensor
    start: int = 0
    stepped: torch.Tensor | None = None
    offset: int = 0

    def of(self, state: torch.Tensor) -> torch.Tensor:
        """Of a tensor that the optimizer keeps for the stepped one the part that belongs to these numbers, a view."""
        assert self.stepped is not None
        return state if self.value.shape == state.shape else state.narrow(0, self.offset, self.value.numel())


class Shares:
    """All of an engine's.

    Args:
        model: DeepSpeed's engine.
        module: This rank's stage.
        program: Whose stages they are.

    Attributes:
        pieces: Where in the whole tensors this rank's pipeline stage and tensor-parallel part lie; they have no numbers.
        held: This rank's numbers of them.
        own: Those that no other replica has.
        names: Of each parameter in the unmodified model.
        optimizer: What steps the flat tensors or parameters; None where nothing does.
    """

    def __init__(self, model: Any, module: nn.Module, program: Program) -> None:
        self.optimizer = private.inner_optimizer(model)
        self._outer: Any = model.optimizer if self.optimizer is not None else None
        named = {**parameters(module), **buffers(module)}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self._ranges = private.flat_ranges(self._outer, program.axis_rank("dp"), named.values()) or {}
        self.pieces = {name: _place(tensor) for name, tensor in named.items()}
        found = [(share, is_own) for name, tensor in named.items() for share, is_own in self._of(name, tensor)]
        is_first = program.axis_rank("dp") == 0
        self.held = [share for share, _ in found if share.value.numel()]
        self.own = [share for share, is_own in found if share.value.numel() and (is_own or is_first)]

    def _of(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[Share, bool]]:
        """What this rank has of one, and whether other replicas have other numbers."""
        if (found := self._ranges.get(id(tensor))) is None:
            is_stepped = self.optimizer is not None and isinstance(tensor, nn.Parameter) and tensor.requires_grad
            yield Share(name, tensor.detach(), stepped=tensor if is_stepped else None), False
        elif found.first < found.last:
            value = found.flat.detach().narrow(0, found.at, found.last - found.first)
            stepped = (found.flat, found.at) if found.is_stepped else (None, 0)
            yield Share(name, value, found.first, *stepped), True

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: the names of their parameters, on any replica, and their options."""
        if self.optimizer is None:
            return []
        listed = private.parameter_groups(self._outer, self.optimizer)
        return [
            {"names": [self.names[id(each)] for each in own], "options": {k: v for k, v in group.items() if k != "params"}}
            for own, group in zip(listed, self.optimizer.param_groups, strict=True)
        ]

    def about(self) -> dict[str, Any]:
        """What a checkpoint says of where all of them are: in the whole tensors, and in those that the optimizer steps."""
        return {
            "pieces": {name: (piece.full_shape, piece.ranges) for name, piece in self.pieces.items()},
            "held": [(share.name, share.start, share.value.numel(), share.offset) for share in self.held],
            "groups": self.groups(),
        }

    def are_like(self, saved: Mapping[str, Any]) -> bool:
        """Whether all are where ``about`` has said; an engine without optimizer has the same weights."""
        own = self.about()
        names = [[each["names"] for each in one["groups"]] for one in (own, saved)]
        has_order = self.optimizer is None or (own["held"] == saved["held"] and names[0] == names[1])
        return has_order and own["pieces"] == saved["pieces"]

    def writing(self) -> AbstractContextManager[None]:
        """Return a context to write into the held numbers, behind which the model has them. Collective."""
        return private.weight_writing(self._outer)

    def put_states(self, states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Hand the optimizer what belongs to its tensors.

        Args:
            states: By the ``id`` of the tensor that it steps.
            groups: The options of its groups.
        """
        optimizer = self.optimizer
        assert optimizer is not None
        with private.state_loading(self._outer, optimizer, len(states)):
            order = [each for group in optimizer.param_groups for each in group["params"]]
            numbers = {id(each): number for number, each in enumerate(order)}
            made = []
            for options, group in zip(groups, optimizer.param_groups, strict=True):
                made.append({**group, **options, "params": [numbers[id(each)] for each in group["params"]]})
            packed = optimizer.state_dict()
            state = {numbers[key]: value for key, value in states.items()}
            optimizer.load_state_dict({**packed, "state": state, "param_groups": made})


def why_not(model: Any, module: nn.Module) -> str:
    """What of an engine only its own layout can load; nothing where all can."""
    zero = private.zero_config(model)
    for name, offload in (("optimizer", zero.offload_optimizer), ("parameter", zero.offload_param)):
        if offload is not None and offload.device == "nvme":
            return f"{name} states on NVMe"
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1:
        return "an optimizer that is offloaded in part"
    if private.inner_optimizer(model) is not None and private.is_fp16_without_zero(model.optimizer):
        return "fp16 without ZeRO"
    if zero.zero_quantized_nontrainable_weights:
        return "quantized frozen weights"
    if any(key.endswith("_extra_state") for key in module.state_dict(keep_vars=True)):
        return "modules with an extra state"
    return ""


def _place(tensor: torch.Tensor) -> Piece:
    return piece_of(torch.empty(private.full_shape(tensor), dtype=tensor.dtype, device="meta"), shard_spec(tensor))
