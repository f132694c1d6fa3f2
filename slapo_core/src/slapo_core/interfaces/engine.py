"""Interface of an engine: the object that ``build`` returns and users train with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from torch import nn

from .program import Renderable


class Engine(Renderable, ABC):
    """A model ready to train on this rank.

    Attributes:
        module: The module that this rank runs: the scheduled model, or its stage.
        optimizer: The optimizer of this rank's parameters, or None.

    Example:
        >>> class SumEngine(Engine):
        ...     def __init__(self, module):
        ...         self.module, self.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.1)
        ...
        ...     def train_batch(self, batch):
        ...         loss = self.module(batch).sum()
        ...         loss.backward()
        ...         self.optimizer.step()
        ...         self.optimizer.zero_grad()
        ...         return loss.detach()
        ...
        ...     def eval_batch(self, batch):
        ...         with torch.no_grad():
        ...             return self.module(batch).sum()
        ...
        ...     def save(self, path):
        ...         torch.save(self.module.state_dict(), path)
        ...
        ...     def load(self, path):
        ...         self.module.load_state_dict(torch.load(path))
        >>> engine = SumEngine(nn.Linear(4, 2))
        >>> engine.train_batch(torch.ones(8, 4)).shape
        torch.Size([])
        >>> model, optimizer = engine
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @abstractmethod
    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Run forward, backward and one optimizer step on the batch of this data-parallel rank.

        All ranks of one pipeline and of one tensor-parallel group receive the same batch.

        Args:
            *args: Positional arguments of the model's forward; dimension 0 of tensors is the batch. The labels for the loss
                function follow them, unless given by keyword. A single tuple, list or dict is a batch of a ``DataLoader`` and
                holds the arguments.
            **batch: Keyword arguments of the forward. Labels for the loss function are ``labels``, or have a name that the
                forward does not take.

        Returns:
            The mean loss over micro-batches and data-parallel ranks: a detached 0-dim tensor, equal on every rank.
        """

    @abstractmethod
    def eval_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode, without gradients: a 0-dim tensor, equal on every rank."""

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> Any:
        """Write model and optimizer state under the original parameter names. Collective."""

    @abstractmethod
    def load(self, path: str | PathLike[str]) -> Any:
        """Read the files that ``save`` wrote. Collective."""

    def close(self) -> None:
        """Release resources other than the module, such as process groups. The engine trains no more. Collective."""

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``model, optimizer = engine``."""
        return iter((self.module, self.optimizer))

    def __getitem__(self, index: int) -> Any:
        """Return the module for index 0, the optimizer for index 1."""
        return (self.module, self.optimizer)[index]

    def __len__(self) -> int:
        return 2


class PlainEngine(Engine):
    """Engine of ``target=None``: the scheduled module as it is, for the user to train.

    Example:
        >>> model, optimizer = build(create_schedule(nn.Linear(2, 2)))
        >>> type(model).__name__, optimizer
        ('Linear', None)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = None

    def train_batch(self, /, *args: Any, **batch: Any) -> torch.Tensor:
        raise TypeError("target=None gives a plain module with no optimizer; build for target='torch' to train batches")

    eval_batch = train_batch

    def save(self, path: str | PathLike[str]) -> Any:
        raise TypeError("target=None gives a plain module; save its state_dict(), or build for target='torch'")

    load = save
