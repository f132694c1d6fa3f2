"""Every implementation of a kernel that runs on a GPU, beside the eager one."""

from __future__ import annotations

import pytest
import torch

from slapo_core import ScheduleError
from slapo_kernels import Implementation, run
from slapo_kernels.dispatch.kernels import KERNELS
from tests.slapo_kernels.kernel_examples import CALLS, computed, names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

OTHERS = [
    pytest.param(kernel, index, implementation, id=f"{kernel}-{index}-{implementation.name}")
    for kernel, index in names(CALLS)
    for implementation in KERNELS[kernel].implementations[:-1]
]
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest allowed difference, relative to the largest value."""


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("kernel", "index", "implementation"), OTHERS)
def test_it_computes_what_eager_does(kernel: str, index: int, implementation: Implementation, dtype: torch.dtype) -> None:
    """Or says why it does not: another dtype, a package to install, a call that it refuses."""
    call = CALLS[kernel][index]
    args, kwargs = call
    why = implementation.lacks("cuda", dtype) or (implementation.refuses and implementation.refuses(*args, **kwargs))
    if why:
        with pytest.raises(ScheduleError) as caught:
            computed(kernel, call, implementation.name, dtype, "cuda")
        assert str(caught.value).endswith(why)
        return
    found = computed(kernel, call, implementation.name, dtype, "cuda")
    for ours, theirs in zip(found, computed(kernel, call, "eager", dtype, "cuda"), strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours - theirs).abs().max() <= LIMITS[dtype] * theirs.abs().max()


@pytest.mark.parametrize("implementation", KERNELS["swiglu"].implementations, ids=lambda each: each.name)
def test_a_second_backward_gives_the_same(implementation: Implementation) -> None:
    if why := implementation.lacks("cuda", torch.float32):
        assert "pip install" in why
        return
    gate, up = (torch.randn(4, 64, device="cuda", requires_grad=True) for _ in range(2))
    out = run("swiglu", gate, up, choice=implementation.name).sum()
    first, second = (torch.autograd.grad(out, (gate, up), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
