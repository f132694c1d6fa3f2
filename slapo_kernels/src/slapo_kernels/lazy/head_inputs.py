"""Inputs of a head, and the check that they have not been changed or freed when lazy logits use them later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slapo_core import SlapoError


class LazyLogitsError(SlapoError):
    """Error of lazy logits that can no longer be computed, or are changed in place."""


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a head, from which lazy logits are computed.

    Args:
        hidden: Hidden states, attached to the autograd graph, as are the others: the kernel has a backward of its own.
        choice: Implementation that the user forced.
        mutation_check: Check that hidden states, weight and bias have not changed since the head was called.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    choice: str | None
    mutation_check: MutationCheck

    def validate(self) -> HeadInputs:
        """Return the inputs; raise ``LazyLogitsError`` if one was changed or freed since."""
        if what := self.mutation_check.mutation():
            lost = "logits that use_kernels('linear_cross_entropy') left to be computed are lost"
            way = "look at them, as by logits.detach(), and compute losses before that, or leave linear_cross_entropy out"
            raise LazyLogitsError(f"{lost}: somebody {what} since the head ran; {way}")
        return self


_NUM_SAMPLED = 1024
"""Elements of each tensor that are compared: autograd's version counter misses writes to ``.data``."""


class MutationCheck:
    """Shapes, versions and samples of tensors at one time. Making it does not synchronise with a GPU.

    Args:
        tensors: Name for messages to tensor.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._versions = {name: _version(tensor) for name, tensor in self._tensors.items()}
        self._samples = list(map(_sample, self._tensors.values()))

    def mutation(self) -> str | None:
        """Return the change to a tensor as a clause, or None. This synchronises with the tensors' GPU."""
        for name, tensor in self._tensors.items():
            if tensor.shape != self._shapes[name] or (tensor.numel() and not tensor.untyped_storage().nbytes()):
                return f"freed {name}"
            if _version(tensor) != self._versions[name]:
                return f"changed {name} in place"
        if self._samples[0].is_cuda and torch.cuda.is_current_stream_capturing():  # synchronisation would fail the capture
            return None
        found = list(map(_sample, self._tensors.values()))
        if torch.equal(torch.cat(found), torch.cat(self._samples)):
            return None
        same = map(torch.equal, found, self._samples)
        return f"changed {next(name for name, is_same in zip(self._tensors, same, strict=True) if not is_same)} in place"


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of evenly spaced elements as bytes, in which NaN equals NaN."""
    per_dim = max(1, int(_NUM_SAMPLED ** (1 / max(1, tensor.dim()))))
    every = tuple(slice(None, None, math.ceil(size / per_dim) or 1) for size in tensor.shape)
    return tensor.detach()[every].reshape(-1).clone().view(torch.uint8)
