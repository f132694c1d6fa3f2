"""Tensors that share memory without being one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from slapo_core import BuildError, parameter_facts

_MARK = "shares memory with "


def note_shared_memory(root: nn.Module) -> None:
    """Tag each parameter and buffer that shares memory with another one."""
    for one, other in overlapping_pairs({id(each): each for each in (*root.parameters(), *root.buffers())}.values()):
        parameter_facts(one).tags.add(f"{_MARK}{parameter_facts(other).names[0]!r}")
        parameter_facts(other).tags.add(f"{_MARK}{parameter_facts(one).names[0]!r}")


def check_shared_memory(root: nn.Module) -> None:
    """Raise ``BuildError`` for trained parameters that share memory with others: shards, stages and buffers are copies.

    One rank makes no copies.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for name, parameter in root.named_parameters():
            shared = [tag for tag in parameter_facts(parameter).tags if tag.startswith(_MARK)]
            if shared and parameter.requires_grad:
                raise BuildError(
                    f"parameter {name!r} {shared[0]}, another parameter or buffer, and ranks would train copies apart; "
                    "make both one nn.Parameter, build without ensure_weight_tying in PEFT, or train on whole replicas, by "
                    "target 'torch' with data_parallel='ddp'"
                )


def overlapping_pairs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of tensors that share memory; each tensor is compared with the next one in memory only."""
    plain = (each for each in tensors if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided)
    found = sorted((_memory(each), id(each), each) for each in plain if each.numel() and not each.is_meta)
    for (memory, _, one), (following, _, other) in zip(found, found[1:], strict=False):
        if following[:2] == memory[:2] and following[2] < memory[3] and torch.isin(_offsets(one), _offsets(other)).any():
            yield one, other


def _memory(tensor: torch.Tensor) -> tuple[str, int, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return str(tensor.device), tensor.untyped_storage().data_ptr(), start, start + last * tensor.element_size()


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the byte offset of each element of a tensor in its memory."""
    found = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(size) * stride
    return found.flatten() * tensor.element_size()
