"""Results of calls on meta tensors equal torch's, and so do refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slapo_kernels.recognition.forward_observer import result_of

ROWS, WEIGHT = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((2, 3, 8), (8,)))
Call = tuple[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]]
CALLS: dict[str, Call] = {
    "gelu": (F.gelu, "gelu", (ROWS,), {"approximate": "tanh"}),
    "relu": (F.relu, "relu", (ROWS,), {"inplace": False}),
    "number": (torch.Tensor.pow, "pow", (ROWS, 3.0), {}),
    "half": (torch.Tensor.mul, "mul", (ROWS.bfloat16(), 2), {}),
    "broadcast": (torch.Tensor.add, "add", (WEIGHT, ROWS), {}),
    "other dtype": (torch.Tensor.mul, "mul", (ROWS.bfloat16(), WEIGHT), {}),
    "alpha": (torch.add, "add", (ROWS, WEIGHT), {"alpha": 2}),
    "whole numbers": (torch.Tensor.div, "div", (torch.empty(4, dtype=torch.long, device="meta"), 2), {}),
    "norm": (F.layer_norm, "layer_norm", (ROWS, (8,)), {"weight": WEIGHT, "bias": None, "eps": 1e-5}),
    "rms": (F.rms_norm, "rms_norm", (ROWS, (3, 8)), {"weight": None, "eps": None}),
}
REFUSED: dict[str, Call] = {
    "approximation": (F.gelu, "gelu", (ROWS,), {"approximate": "roughly"}),
    "shapes": (torch.Tensor.add, "add", (ROWS, torch.empty(7, device="meta")), {}),
    "width": (F.layer_norm, "layer_norm", (ROWS, (7,)), {"weight": None, "bias": None, "eps": 1e-5}),
    "weight": (F.layer_norm, "layer_norm", (ROWS, (8,)), {"weight": WEIGHT[:7], "bias": None, "eps": 1e-5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_like_torchs_own(name: str) -> None:
    func, word, args, kwargs = CALLS[name]
    found, expected = result_of(func, word, args, kwargs), func(*args, **kwargs)
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    assert found.is_meta
    assert leaves(found) >= {id(each) for each in args if each is ROWS or each is WEIGHT}


def leaves(tensor: torch.Tensor) -> set[int]:
    """Ids of what gradients would reach."""
    todo, found = [tensor.grad_fn], set[int]()
    for node in todo:
        if node is not None:
            found.add(id(getattr(node, "variable", None)))
            todo += [each for each, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    func, word, args, kwargs = REFUSED[name]
    with pytest.raises(RuntimeError):
        result_of(func, word, args, kwargs)
