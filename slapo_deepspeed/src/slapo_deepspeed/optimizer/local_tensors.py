"""What a rank of DeepSpeed's engine has of each tensor: whole ones of its stage, or with ZeRO numbers of flat fp32 ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.model import Piece, buffers, parameters, piece_of

from ..process_state.process_groups import whole_shape


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
        self.optimizer = stepping(model)
        self._outer: Any = model.optimizer if self.optimizer is not None else None
        named = {**parameters(module), **buffers(module)}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self._lies = dict(flattened(self._outer, program.axis_rank("dp")))
        self.pieces = {name: _place(tensor) for name, tensor in named.items()}
        found = [(share, is_own) for name, tensor in named.items() for share, is_own in self._of(name, tensor)]
        is_first = program.axis_rank("dp") == 0
        self.held = [share for share, _ in found if share.value.numel()]
        self.own = [share for share, is_own in found if share.value.numel() and (is_own or is_first)]

    def _of(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[Share, bool]]:
        """What this rank has of one, and whether other replicas have other numbers."""
        if hasattr(tensor, "ds_id"):
            yield self._of_stage_3(name, tensor), True
        elif (lies := self._lies.get(id(tensor))) is None:
            is_stepped = self.optimizer is not None and isinstance(tensor, nn.Parameter) and tensor.requires_grad
            yield Share(name, tensor.detach(), stepped=tensor if is_stepped else None), False
        else:
            flat, low, offset = lies
            first, last = max(offset, low), min(offset + tensor.numel(), low + flat.numel())
            if first < last:
                yield Share(name, flat.detach().narrow(0, first - low, last - first), first - offset, flat, first - low), True

    def _of_stage_3(self, name: str, tensor: Any) -> Share:
        step = tensor.ds_tensor.ds_numel
        start = min(step * self._outer._get_param_partition_rank(tensor), tensor.ds_numel)
        size = min(step, tensor.ds_numel - start)
        place = self._outer.grad_position.get(self._outer.get_param_id(tensor)) if tensor.requires_grad else None
        if place is None:
            return Share(name, tensor.ds_tensor.detach().view(-1).narrow(0, 0, size), start)
        flat = self._outer.fp32_partitioned_groups_flat[place[0]]
        return Share(name, flat.detach().narrow(0, place[1], size), start, flat, place[1])

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: the names of their parameters, on any replica, and their options."""
        if self.optimizer is None:
            return []
        listed: list[list[Any]] = [[] for _ in self.optimizer.param_groups]
        if hasattr(self._outer, "sub_group_to_group_id"):
            for index, each in enumerate(self._outer.fp16_groups):
                listed[self._outer.sub_group_to_group_id[index]] += each
        else:
            known = getattr(self._outer, "bit16_groups", getattr(self._outer, "bf16_groups", None))
            for index, group in enumerate(self.optimizer.param_groups):
                listed[index] += group["params"] if known is None else known[index]
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

    def begin(self) -> None:
        """Let no parameter be whole that stage 3 of ZeRO has shared out, before numbers are put into what it has."""
        if hasattr(self._outer, "fp16_partitioned_groups_flat"):
            self._outer.checkpoint_event_prologue()

    def put_back(self) -> None:
        """Let the model have the numbers that were put into the fp32 ones. Collective."""
        if hasattr(self._outer, "fp16_partitioned_groups_flat"):
            for index in range(len(self._outer.fp16_groups)):
                self._outer._reassign_or_swap_out_partitioned_parameters(index)
            self._outer.checkpoint_event_epilogue()
        elif hasattr(self._outer, "update_lp_params"):
            self._outer.update_lp_params()

    def put_states(self, states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Hand the optimizer what belongs to its tensors.

        Args:
            states: By the ``id`` of the tensor that it steps.
            groups: The options of its groups.
        """
        optimizer, outer = self.optimizer, self._outer
        assert optimizer is not None
        is_stage_3 = hasattr(outer, "sub_group_to_group_id")
        if is_stage_3:
            outer._set_fp32_optimizer_param_groups()
        order = [each for group in optimizer.param_groups for each in group["params"]]
        numbers = {id(each): number for number, each in enumerate(order)}
        made = []
        for options, group in zip(groups, optimizer.param_groups, strict=True):
            made.append({**group, **options, "params": [numbers[id(each)] for each in group["params"]]})
        packed = optimizer.state_dict()
        state = {numbers[key]: value for key, value in states.items()}
        optimizer.load_state_dict({**packed, "state": state, "param_groups": made})
        if is_stage_3:
            outer._clear_fp32_optimizer_param_groups()
        elif hasattr(outer, "_hp_optimizer_states_linked"):
            outer._hp_optimizer_states_linked = False
            if len(states) == len(order):
                outer._lazy_init_hp_params_optimizer_state()


def stepping(model: Any) -> torch.optim.Optimizer | None:
    """The optimizer that is inside of DeepSpeed's; None where there is none."""
    if model.basic_optimizer is None:  # in bf16 there is one that steps nothing
        return None
    found: torch.optim.Optimizer = getattr(model.optimizer, "optimizer", model.optimizer)
    return found


def flattened(outer: Any, replica: int) -> Iterator[tuple[int, tuple[torch.Tensor, int, int]]]:
    """With stages 1 and 2 of ZeRO by the ``id`` of a parameter the flat tensor of this rank, in fp32, that may have some of it.

    Yields:
        Beside it how many numbers of all parameters of its group are before this rank's, and how many before the parameter.
        DeepSpeed's ``safe_get_full_fp32_param`` looks elsewhere where ``round_robin_gradients`` changes their order.
    """
    if hasattr(outer, "bf16_groups"):
        flats, groups = outer.fp32_groups_flat_partition, outer.bf16_groups
        starts = [[*accumulate((each.numel() for each in group), initial=0)] for group in groups]
    elif hasattr(outer, "round_robin_bit16_groups"):
        flats, groups = outer.single_partition_of_fp32_groups, outer.round_robin_bit16_groups
        starts = outer.round_robin_bit16_offsets
    else:
        return
    for flat, group, offsets in zip(flats, groups, starts, strict=True):
        for parameter, offset in zip(group, offsets, strict=False):
            yield id(parameter), (flat, replica * flat.numel(), offset)


def why_not(model: Any, module: nn.Module) -> str:
    """What of an engine only its own layout can load; nothing where all can."""
    zero = model._config.zero_config
    for name, offload in (("optimizer", zero.offload_optimizer), ("parameter", zero.offload_param)):
        if offload is not None and offload.device == "nvme":
            return f"{name} states on NVMe"
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1:
        return "an optimizer that is offloaded in part"
    trains = model.basic_optimizer is not None
    if trains and (hasattr(model.optimizer, "fp32_groups_flat") or hasattr(model.optimizer, "fp32_groups")):
        return "fp16 without ZeRO"
    if zero.zero_quantized_nontrainable_weights:
        return "quantized frozen weights"
    if any(key.endswith("_extra_state") for key in module.state_dict(keep_vars=True)):
        return "modules with an extra state"
    return ""


def _place(tensor: torch.Tensor) -> Piece:
    shape = whole_shape(tensor)  # type: ignore[arg-type]
    return piece_of(torch.empty(shape, dtype=tensor.dtype, device="meta"), shard_spec(tensor))
