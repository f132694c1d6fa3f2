"""Check that tensors which are used later have not been changed or freed in between."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

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
