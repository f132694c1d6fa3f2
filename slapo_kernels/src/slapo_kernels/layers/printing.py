"""``Print``: a module that prints its inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from ..implementations._torch_private import is_dry_run


class Print(nn.Module):
    """Module that prints shape, dtype and device of its inputs and returns them; silent while the model is traced.

    Args:
        message: Prefix of the line.
        values: Whether to print the values too.
    """

    def __init__(self, message: str = "", values: bool = False) -> None:
        super().__init__()
        self.message, self.values = message, values

    def forward(self, *inputs: Any) -> Any:
        """Print the inputs; return one input unchanged, several as a tuple."""
        if not any(is_dry_run(each) for each in inputs):
            rank = f"[rank {dist.get_rank()}] " if dist.is_available() and dist.is_initialized() else ""
            shown = ", ".join(str(tree_map_only(torch.Tensor, self._describe_tensor, each)) for each in inputs)
            print(f"{rank}{self.message}{': ' if self.message else ''}{shown}", flush=True)
        return inputs[0] if len(inputs) == 1 else inputs

    def extra_repr(self) -> str:
        return repr(self.message)

    def _describe_tensor(self, tensor: torch.Tensor) -> _UnquotedText:
        facts = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
        return _UnquotedText(f"{facts} {tensor.tolist()}" if self.values else facts)


class _UnquotedText(str):
    """Text that is printed without quotes in a tuple."""

    def __repr__(self) -> str:
        return str(self)
