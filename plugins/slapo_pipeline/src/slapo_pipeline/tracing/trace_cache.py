"""Cache of the trace in which ``pipeline`` found the cuts, for the build that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from slapo_tracing.graphs import TracedModule
from slapo_tracing.nodes import Snapshot, autocast_state, fingerprint

from .flat_trace import inlined_paths


class CachedTrace:
    """A flat trace that is valid until a module, parameter, hook, mode or attribute of the model changes."""

    def __init__(self, root: nn.Module, inputs: Mapping[str, Any], cuts: Iterable[str], flat: TracedModule) -> None:
        self._flat: TracedModule | None = flat
        self._inputs, self._inlined, self._facts = fingerprint(dict(inputs)), inlined_paths(cuts), _model_state(root)
        self._contents = Snapshot([vars(module) for module in root.modules()])

    def pop_if_valid(self, root: nn.Module, inputs: Mapping[str, Any], cuts: Iterable[str]) -> TracedModule | None:
        """Return the trace once; None if it was returned before, or if the model, call or inlined modules differ."""
        flat, self._flat = self._flat, None
        same = (
            self._inlined == inlined_paths(cuts)
            and self._inputs == fingerprint(dict(inputs))
            and self._facts == _model_state(root)
        )
        return flat if same and not self._contents.changed_paths() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model is traced anew."""


def _model_state(root: nn.Module) -> list[Any]:
    """Return the state that the attributes of modules do not show."""
    tensors = [*root.parameters(), *root.buffers()]
    return [
        (torch.is_grad_enabled(), autocast_state()),
        [type(module) for module in root.modules()],
        [(tensor.requires_grad, tensor.shape, tensor.dtype, tensor.device) for tensor in tensors],
    ]
