"""Megatron-Core's parallel layers as an unmodified model calls them: one tensor in, one tensor out.

What they do otherwise than the layers they replace: inputs of any number of dimensions; a bias that is trained beside a frozen
weight; no sum of a gradient that nobody asks for; rows of an embedding that are not trained, and indices outside of it, which
are an error; copies of a model share the group; and a gradient of a gradient, which Megatron would compute without its
sums, is an error.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import ScheduleError
from slapo_training.engines import without_warnings

from ..process_state._megatron_private import row_parallel_linear, silence_cuda_advice


@cache
def layer_classes() -> dict[str, Any]:
    """The class for ``"columns"``, ``"rows"`` and ``"vocabulary"``."""
    with without_warnings():
        from megatron.core import tensor_parallel as megatron
    if not torch.cuda.is_available():
        silence_cuda_advice()

    class ColumnParallel(_Copied, megatron.ColumnParallelLinear, _Linear):  # type: ignore[misc]
        """Rows of the weight are sharded, so columns of the output."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            _check_autocast(input)
            self.allreduce_dgrad = input.requires_grad and not self.disable_grad_reduce
            output, bias = super().forward(_two_dimensional(input))
            output = _like(input, once(output))
            return output if bias is None else output + bias

    class RowParallel(_Copied, row_parallel_linear(), _Linear):  # type: ignore[misc]
        """Columns of the weight are sharded, and so is the input; the output is summed."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            _check_autocast(input)
            return _like(input, once(super().forward(_two_dimensional(input))[0]))

    class VocabParallel(_Copied, megatron.VocabParallelEmbedding, _Embedding):  # type: ignore[misc]
        """Rows of the table are sharded; the output is summed."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            _check_indices(input, self.num_embeddings)
            output = _like(input.unsqueeze(-1), once(super().forward(input)))
            if self.padding_idx is None:
                return output
            return torch.where((input == self.padding_idx).unsqueeze(-1), output.detach(), output)

    return {"columns": ColumnParallel, "rows": RowParallel, "vocabulary": VocabParallel}


class _Linear(nn.Linear):
    """A Linear to code that asks for one, as initialisers do, without weights of its own."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Embedding(nn.Embedding):
    """The same for an Embedding."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class _Copied:
    """Of all layers: a copy is one of the same group, and there is no other state than the parameters."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for shared in ("tp_group", "config"):
            if (value := vars(self).get(shared)) is not None:
                memo[id(value)] = value
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("what is sharded cannot be pickled with its process group; save state_dict() or full_state()")


def _two_dimensional(input: torch.Tensor) -> torch.Tensor:
    """Megatron's backward takes two or three dimensions, and its sum over the ranks a contiguous output."""
    return input.reshape(input.shape[:-1].numel(), input.shape[-1])


def _like(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The output in the input's shape; unlike a view of what a function of Megatron's returned, it may be changed in place."""
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(output, (*input.shape[:-1], output.shape[-1]))
    return shaped


def once(output: torch.Tensor) -> torch.Tensor:
    """The output, of whose gradient no graph can be made."""
    if output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(_refuse_graph)  # type: ignore[no-untyped-call]
    return output


def _refuse_graph(grad: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        raise ScheduleError(
            "what Megatron-Core computes has no gradient of its gradient, as create_graph=True asks for; leave out backend"
        )


def _check_autocast(input: torch.Tensor) -> None:
    """Megatron's backward enters autocast again for CUDA alone."""
    if input.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        raise ScheduleError(
            "layers of Megatron-Core do not run under autocast on a CPU; give the model the dtype itself, or leave out backend"
        )


def _check_indices(input: torch.Tensor, rows: int) -> None:
    """Fail as the whole table would: Megatron takes an index outside of it for one of another rank's."""
    F.embedding(input, torch.zeros((), device=input.device).expand(rows, 1))
