"""Comparison of means over many runs, for steps that change dropout masks."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..examples.case import BUFFER_LABEL, Case, ConformanceError

RUNS = 200
"""Number of runs whose means are compared."""


def means(case: Case) -> None:
    """Check that the means of many training runs, and of the squares, are within six standard errors."""
    wanted, found = _moments(case, case.model()), _moments(case, case.make_schedule().mod)
    for (path, mean, error), (_, other, error_of_other) in zip(wanted, found, strict=True):
        allowed = 6 * (error.square() + error_of_other.square()).sqrt() + case.example.atol
        if bool(((mean - other).abs() > allowed).any()):
            apart = float(((mean - other).abs() / allowed).max()) * 6
            raise ConformanceError(f"the mean of {path} over {RUNS} runs in training is {apart:.1f} standard errors off")


def _moments(case: Case, model: nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    runs = [case.run(model).outputs for _ in range(RUNS)]
    found = []
    for index, (path, leaf) in enumerate(runs[0]):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not path.startswith(BUFFER_LABEL):
            values = torch.stack([run[index][1] for run in runs]).double()
            for what, numbers in ((f"output{path}", values), (f"the squares of output{path}", values.square())):
                found.append((what, numbers.mean(0), numbers.std(0) / math.sqrt(RUNS)))
    return found
