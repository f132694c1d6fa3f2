"""Loss of a causal language model from sharded logits, which are never gathered.

Transformers' models call their ``loss_function`` with the logits and the labels. A module replaces that function and computes
``ForCausalLMLoss`` from this rank's columns; the model's own code in between runs on shards.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule, ScheduleError, ShardSpec
from slapo_tracing.nodes import wrap_forward

from ..communication._torch_autograd import no_functions
from ..communication.cross_entropy import parallel_cross_entropy
from ..rules.sharding_rule import split_of
from .sync_hooks import Sync

_LOSS, _STYLE = "ForCausalLMLoss", "colwise_gather_output"


def plan_with_sharded_logits(schedule: Schedule, steps: dict[str, str]) -> dict[str, str]:
    """Return the steps of a plan, changed so that the output of the head stays sharded.

    Raises:
        ScheduleError: the plan does not shard the head, or the model computes another loss.
    """
    model: Any = schedule.mod
    head = next((path for path, module in model.named_modules() if module is _output_embeddings(model)), None)
    if head is None or steps.get(head) != _STYLE:
        raise _error(schedule, f"the plan does not split the model's head as {_STYLE!r}")
    if (found := _loss_name(model)) != _LOSS:
        raise _error(schedule, f"the model's loss is {found}, not {_LOSS}")
    return {**steps, head: "colwise"}


def install_loss(schedule: Schedule) -> ParallelLoss | None:
    """Let a model with a sharded head compute its loss from shards, and return the loss; None on one rank."""
    model: Any = schedule.mod
    applied = split_of(_output_embeddings(model))
    if applied is None:
        return None
    loss = ParallelLoss(applied.spec)
    type(model).loss_function.fset(model, loss)  # plain assignment would register a child module instead
    model.register_forward_hook(LossOrLogits())
    return loss


def _output_embeddings(model: Any) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()


def _loss_name(model: Any) -> str:
    """Return the name of the ``loss_function`` that a model's forward calls, for messages."""
    called = getattr(getattr(inspect.unwrap(type(model).forward), "__code__", None), "co_names", ())
    if not isinstance(getattr(type(model), "loss_function", None), property) or "loss_function" not in called:
        return "computed in its forward"
    return getattr(model.loss_function, "__name__", type(model.loss_function).__name__)


def _error(schedule: Schedule, why: str) -> ScheduleError:
    message = f"{why}, so its loss cannot be computed from parts of the logits; leave out parallel_loss"
    return ScheduleError(message, path=schedule.path, primitive="tensor_parallel")


@dataclass(frozen=True)
class _UnevenGather(Sync):
    """All-gather of shards of different sizes; ``size`` is that of the gathered dimension."""

    size: int | None = None

    def run(self, x: torch.Tensor, uneven: int | None = None) -> torch.Tensor:
        return super().run(x, self.size)


class TokenLosses(nn.Module):
    """Cross entropy of each token from this rank's shard of the logits; layers of an engine may replace this module."""

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Map ``[tokens, columns]`` and global ids to ``[tokens]`` in float32, 0 for ignored ids."""
        size = self.spec.full_shape[0] if self.spec.uneven_ranges is not None else None
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none", "vocab_size": size}
        return parallel_cross_entropy(logits.float(), target, self.spec.group, **options)


class ParallelLoss(nn.Module):
    """``ForCausalLMLoss`` from this rank's columns of the logits.

    Args:
        spec: Shard of the head's weight.
    """

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__()
        self.spec = spec
        self.losses: nn.Module = TokenLosses(spec)
        self.whole = nn.Identity()
        size = self._size if spec.uneven_ranges is not None else None
        gather = _UnevenGather("fwd_post", "all_gather", -1, spec.group, size=size)
        self.whole.register_forward_hook(gather, with_kwargs=True)
        wrap_forward(self, _single_node)

    @property
    def _size(self) -> int:
        return self.spec.full_shape[0]

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss. Its mean is an ``nll_loss`` over one class, so that engines which count labels find them."""
        if vocab_size != self._size:
            raise ScheduleError(f"vocab_size is {vocab_size}, and the head has {self._size} rows; they have to be the same")
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        if logits.shape[:-1].numel() != target.shape[0]:
            raise ValueError(f"there are logits of {logits.shape[:-1].numel()} tokens and {target.shape[0]} labels")
        with no_functions():  # the checks of the first run would refuse a shard that is used as the whole
            losses: torch.Tensor = self.losses(logits.reshape(target.shape[0], logits.shape[-1]), target, ignore_index)
        counted = torch.where(target == ignore_index, _IGNORED, 0)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.nll_loss(-losses.unsqueeze(-1), counted, ignore_index=_IGNORED, reduction=reduction)
        if num_items_in_batch is None:
            return loss
        items = num_items_in_batch
        return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


_IGNORED = -100


def _single_node(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a forward as one node of a trace; a graph inside would lack the collectives."""
    return call(*args, **kwargs)


class LossOrLogits:
    """Forward hook that drops the sharded logits beside a loss, and gathers them without one."""

    traced = True

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        whole = module.loss_function.whole
        if isinstance(output, tuple):
            has_loss = isinstance(output[0], torch.Tensor) and output[0].dim() == 0
            return (output[0], None, *output[2:]) if has_loss else (whole(output[0]), *output[1:])
        return dataclasses.replace(output, logits=whole(output.logits) if output.loss is None else None)
