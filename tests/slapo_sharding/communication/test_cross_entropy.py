"""Vocabulary-parallel cross entropy equals torch's own on the full logits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_sharding.communication.cross_entropy import parallel_cross_entropy
from slapo_testing import run_distributed

pytestmark = pytest.mark.multiproc

TARGET = torch.tensor([[0, 11, -100], [5, 6, 3]])


def _both(rank: int, shape: tuple[int, ...], target: torch.Tensor, dtype: torch.dtype, padding: int, options: dict[str, Any]):
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype).requires_grad_()
    size, ranks = shape[-1], dist.get_world_size()
    expected = F.cross_entropy(whole.flatten(0, -2), target.flatten(), **options).view_as(
        target if options.get("reduction") == "none" else torch.empty(())
    )
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected.float() * weight).sum().backward()
    padded = F.pad(whole.detach(), (0, padding), value=100.0)
    local = padded.chunk(ranks, -1)[rank].clone().requires_grad_()
    got = parallel_cross_entropy(local, target, dist.group.WORLD, vocab_size=size if padding else None, **options)
    (got.float() * weight).sum().backward()
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)
    torch.testing.assert_close(local.grad, F.pad(whole.grad, (0, padding)).chunk(ranks, -1)[rank], **tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"ignore_index": 5},
        {"label_smoothing": 1.0, "ignore_index": 0},
    ],
    ids=str,
)
def test_correctness_10_equals_torch(ranks: int, options: dict[str, Any]) -> None:
    ignored = options.get("ignore_index", -100)
    run_distributed(_both, ranks, (2, 3, 12), TARGET.masked_fill(TARGET == -100, ignored), torch.float32, 0, options)


@pytest.mark.parametrize(("size", "padding"), [(10, 2), (7, 5), (3, 9)], ids=["in the last rank", "two ranks", "most ranks"])
def test_correctness_10_padding_counts_for_nothing(size: int, padding: int) -> None:
    run_distributed(
        _both, 4, (5, size), torch.tensor([0, 1, 2, -100, size - 1]), torch.float32, padding, {"label_smoothing": 0.2}
    )


def test_half_precision() -> None:
    run_distributed(_both, 2, (4, 8), torch.tensor([0, 3, 7, 4]), torch.bfloat16, 0, {})


class _Sent(TorchDispatchMode):
    """Mode that records the name and the message size of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and func.overloadpacket.__name__ != "wait_tensor":
            self.found.append((func.overloadpacket.__name__, args[0].numel()))
        return func(*args, **(kwargs or {}))


def _sent(rank: int, smoothing: float) -> list[tuple[str, int]]:
    logits = torch.randn(5, 32, requires_grad=True)
    with _Sent() as sent:
        parallel_cross_entropy(logits, torch.arange(5), dist.group.WORLD, label_smoothing=smoothing).backward()
    return sent.found


@pytest.mark.parametrize(("smoothing", "sums"), [(0.0, 2), (0.1, 3)])
def test_the_logits_are_never_gathered(smoothing: float, sums: int) -> None:
    for found in run_distributed(_sent, 2, smoothing):
        assert found == [("all_reduce", 5 + 2), ("all_reduce", sums * 5)], "the highest and two widths, then the sums"


def test_nothing_counts() -> None:
    loss = parallel_cross_entropy(torch.randn(2, 4), torch.tensor([-100, -100]))
    assert loss.isnan(), "as torch's own"


def test_gradient_of_one_rank() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: parallel_cross_entropy(x, torch.tensor([0, 4, -100]), label_smoothing=0.3), logits
    )


@pytest.mark.parametrize(
    ("target", "options", "error", "message"),
    [
        ([0, 1, 2], {}, ValueError, "differ in more than the vocabulary"),
        ([0, 4], {}, IndexError, "outside of the vocabulary of 4"),
        ([0, -1], {}, IndexError, "outside of the vocabulary of 4"),
        ([0, 3], {"vocab_size": 3}, IndexError, "outside of the vocabulary of 3"),
        ([0, 1], {"vocab_size": 5}, ValueError, "vocab_size is 5, but there are 4 columns on rank 0 of 1"),
        ([0, 1], {"reduction": "max"}, ValueError, "reduction is 'max'"),
        ([0, 1], {"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5"),
    ],
)
def test_bad_input(target: list[int], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parallel_cross_entropy(torch.randn(2, 4), torch.tensor(target), **options)


@pytest.mark.parametrize("group", [10, "tp", [0, 1]])
def test_a_group_that_is_none(group: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"group is {group!r}; give a process group or None")):
        parallel_cross_entropy(torch.randn(2, 4), torch.tensor([0, 1]), group)
