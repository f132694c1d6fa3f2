"""The interface of an engine: what ``build`` returns and users train with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from torch import nn

from .renderable import Renderable


class Engine(Renderable, ABC):
    """A model ready to train on this rank.

    Attributes:
        module: What this rank runs: the scheduled model, or its stage of it.
        optimizer: The optimizer of this rank's parameters, or None.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @abstractmethod
    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Forward, backward and one optimizer step on this data-parallel rank's batch.

        Args:
            *args: What the model's forward takes by position; tensors have the batch in dimension 0. Behind it come the labels
                for the loss function, if these are not given by keyword. One tuple, list or dict is a batch as a
                ``DataLoader`` gives it, which has the arguments.
            **batch: What it takes by keyword, likewise, and ``labels`` for the loss function, or under a name of which the
                forward takes none. All ranks of one pipeline and of one tensor-parallel group get the same batch.

        Returns:
            The mean loss over micro-batches and data-parallel ranks: a detached 0-dim tensor, equal on every rank.
        """

    @abstractmethod
    def eval_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """The loss of a batch in evaluation mode, without gradients; the same on every rank."""

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> Any:
        """Write model and optimizer under original parameter names; collective."""

    @abstractmethod
    def load(self, path: str | PathLike[str]) -> Any:
        """Read what ``save`` wrote; collective."""

    def close(self) -> None:
        """Give back what the engine holds beside its module, such as process groups; collective. It trains no more."""

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``model, optimizer = engine``."""
        return iter((self.module, self.optimizer))

    def __getitem__(self, index: int) -> Any:
        """``engine[0]`` is the module, ``engine[1]`` the optimizer."""
        return (self.module, self.optimizer)[index]

    def __len__(self) -> int:
        return 2


class PlainEngine(Engine):
    """``target=None``: the scheduled module as it is; the user trains it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = None

    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        raise TypeError("target=None gives a plain module with no optimizer; build for target='torch' to train batches")

    eval_batch = train_batch

    def save(self, path: str | PathLike[str]) -> Any:
        raise TypeError("target=None gives a plain module; save its state_dict(), or build for target='torch'")

    load = save
