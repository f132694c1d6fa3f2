"""Tensors and gradients of one rank of DeepSpeed's engine: those of its stage, or with ZeRO ranges of flat fp32 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import Program, shard_spec
from slapo_training.ema import MasterValue, master_values
from slapo_training.gradient_hooks import GradientAccess
from slapo_training.model import Piece, buffers, parameters, piece_of

from ..process_state import _deepspeed_private as private
from ..process_state._deepspeed_private import bf16_gradient, has_fp32_weight, loss_scale


class Share(NamedTuple):
    """Elements of a parameter or buffer that this rank holds.

    Args:
        value: View of the elements: in fp32 if the optimizer keeps them so, and flat if they are a range of a flat tensor.
        start: Offset of the elements in the shard of this pipeline and tensor-parallel rank.
        stepped: Tensor that contains the elements and that the optimizer steps; None if they are not stepped.
    """

    name: str
    value: torch.Tensor
    start: int = 0
    stepped: torch.Tensor | None = None
    offset: int = 0

    def of(self, state: torch.Tensor) -> torch.Tensor:
        """Return the part of an optimizer state of ``stepped`` that belongs to these elements, as a view."""
        assert self.stepped is not None
        return state if self.value.shape == state.shape else state.narrow(0, self.offset, self.value.numel())


class Shares:
    """All shares of an engine on this rank.

    Args:
        model: DeepSpeed's engine.
        module: This rank's stage.

    Attributes:
        pieces: Position of this rank's shard in each whole tensor of its stage, on the meta device.
        held: This rank's shares that have elements.
        own: Shares that no other replica holds; on the first replica also those that all replicas hold.
        names: Name in the unmodified model, by the ``id`` of the tensor.
        optimizer: The optimizer that steps the flat tensors or parameters; None without one.
    """

    def __init__(self, model: Any, module: nn.Module, program: Program) -> None:
        self.optimizer = private.inner_optimizer(model)
        self._outer: Any = model.optimizer if self.optimizer is not None else None
        self._buffers = buffers(module)
        named = {**parameters(module), **self._buffers}
        self.names = {id(tensor): name for name, tensor in named.items()}
        self._ranges = private.flat_ranges(self._outer, program.axis_rank("dp"), named.values()) or {}
        self.pieces = {}
        for name, tensor in named.items():
            whole = torch.empty(private.full_shape(tensor), dtype=tensor.dtype, device="meta")
            self.pieces[name] = piece_of(whole, shard_spec(tensor))
        found = [(share, is_own) for name, tensor in named.items() for share, is_own in self._shares_of(name, tensor)]
        is_first = program.axis_rank("dp") == 0
        self.held = [share for share, _ in found if share.value.numel()]
        self.own = [share for share, is_own in found if share.value.numel() and (is_own or is_first)]

    def _shares_of(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[Share, bool]]:
        """Yield this rank's share of a tensor, and True if other replicas hold other elements."""
        if (found := self._ranges.get(id(tensor))) is None:
            is_stepped = self.optimizer is not None and isinstance(tensor, nn.Parameter) and tensor.requires_grad
            yield Share(name, tensor.detach(), stepped=tensor if is_stepped else None), False
        elif found.first < found.last:
            value = found.flat.detach().narrow(0, found.at, found.last - found.first)
            stepped = (found.flat, found.at) if found.is_stepped else (None, 0)
            yield Share(name, value, found.first, *stepped), True

    def master_values(self) -> Iterator[MasterValue]:
        """Iterate over this rank's ranges of the tensors that the optimizer steps, and over the buffers."""
        stepped = ((share.name, share.value, share.start) for share in self.held if share.stepped is not None)
        return master_values(stepped, self._buffers, self.pieces)

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups: options, and names of parameters, including those that other replicas step."""
        if self.optimizer is None:
            return []
        listed = private.parameter_groups(self._outer, self.optimizer)
        return [
            {"names": [self.names[id(each)] for each in own], "options": {k: v for k, v in group.items() if k != "params"}}
            for own, group in zip(listed, self.optimizer.param_groups, strict=True)
        ]

    def layout(self) -> dict[str, Any]:
        """Return the layout for the checkpoint: positions in the whole tensors and in the tensors that the optimizer steps."""
        return {
            "pieces": {name: (piece.full_shape, piece.ranges) for name, piece in self.pieces.items()},
            "held": [(share.name, share.start, share.value.numel(), share.offset) for share in self.held],
            "groups": self.groups(),
        }

    def has_layout(self, saved: Mapping[str, Any]) -> bool:
        """Return True if a saved ``layout`` has this layout; without an optimizer only positions of weights are compared."""
        own = self.layout()
        names = [[each["names"] for each in one["groups"]] for one in (own, saved)]
        has_order = self.optimizer is None or (own["held"] == saved["held"] and names[0] == names[1])
        return has_order and own["pieces"] == saved["pieces"]

    def write_context(self) -> AbstractContextManager[None]:
        """Return a context to write into the held elements; on exit the model gets the new values. Collective."""
        return private.weight_writing(self._outer)

    def put_states(self, states: Mapping[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Load states, by the ``id`` of the stepped tensor, and the options of each group into the optimizer."""
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


def unsupported_reason(model: Any, module: nn.Module) -> str:
    """Return the feature that restricts an engine's checkpoints to its own layout, or ''."""
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


def weight_pieces(model: Any, module: nn.Module, program: Program, zero_stage: int) -> dict[str, Piece]:
    """Return this rank's pieces of the parameters, in fp32 if the optimizer keeps an fp32 copy, and of persistent buffers.

    Collective over the replicas.

    With stage 3 of ZeRO each replica returns some rows of each parameter, since the model may not fit on one replica.
    """
    held = {} if zero_stage == 3 else {share.name: share for share in Shares(model, module, program).held}
    found = {}
    for name, parameter in parameters(module).items():
        value = _of_stage_3(parameter) if zero_stage == 3 else _value(parameter, held.get(name), program, zero_stage)
        rows = _rows(len(value), program) if zero_stage == 3 and value.dim() else None
        kept = value if rows is None else value[slice(*rows)].clone()
        found[name] = piece_of(kept, shard_spec(parameter), value.shape, rows)
    return {**found, **{name: piece_of(buffer, shard_spec(buffer)) for name, buffer in buffers(module).items()}}


def _value(parameter: torch.Tensor, share: Share | None, program: Program, zero_stage: int) -> torch.Tensor:
    if zero_stage == 0 or not parameter.requires_grad:
        return parameter.detach()
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if share is not None:
        whole.narrow(0, share.start, share.value.numel()).copy_(share.value)
    if program.axis_size("dp") > 1:
        assert program.mesh is not None
        dist.all_reduce(whole, group=program.mesh.get_group("dp"))
    return whole.view(parameter.shape)


def _of_stage_3(parameter: torch.Tensor) -> torch.Tensor:
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    master: torch.Tensor | None = safe_get_full_fp32_param(parameter) if has_fp32_weight(parameter) else None
    if master is not None:
        return master.detach()
    with zero.GatheredParameters([parameter], modifier_rank=None):
        return parameter.detach().clone()


def _rows(rows: int, program: Program) -> tuple[int, int]:
    """Return this replica's range of ``rows`` rows."""
    step = -(-rows // program.axis_size("dp"))
    start = min(program.axis_rank("dp") * step, rows)
    return start, min(start + step, rows)


class ReducedGradients(GradientAccess):
    """Access to the reduced gradients, which ZeRO shards over the replicas.

    ``deepspeed`` is the module.
    """

    counts_unused = True

    def __init__(self, model: Any, deepspeed: Any, zero_stage: int) -> None:
        self._model, self._deepspeed, self._zero_stage = model, deepspeed, zero_stage
        if zero_stage or model.fp16_enabled() or model.bfloat16_enabled():
            self.steps_all, self.keeps_weights = True, "target 'deepspeed' keeps elsewhere with ZeRO or half precision"

    @property
    def _scale(self) -> float:
        """Loss scale that the gradients still contain."""
        return loss_scale(self._model)

    def get(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the full reduced gradient. Collective over the replicas with ZeRO."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor | None = safe_get_full_grad(parameter) if parameter.requires_grad else None
        return found if found is None or self._scale == 1.0 else found / self._scale

    def put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        from deepspeed.utils import safe_set_full_grad

        if gradient is None:
            parameter.grad = None
            return
        scaled = gradient if self._scale == 1.0 else gradient * self._scale
        if (kept := bf16_gradient(parameter)) is not None:
            kept.copy_(scaled)
        else:
            safe_set_full_grad(parameter, scaled.contiguous())

    def values(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """Gather parameters inside that stage 3 of ZeRO shards. Collective over the replicas."""
        if self._zero_stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[object] = self._deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)
        return gathered
