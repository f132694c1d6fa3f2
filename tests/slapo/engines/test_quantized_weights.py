"""Frozen weights of a tensor subclass, as quantisers make them, stay whole by name; all else trains as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo
from slapo_core import is_sharded
from slapo_testing import run_distributed
from tests.slapo_sharding.logged_warnings import warnings_told
from tests.slapo_torch.layouts import mesh_of

pytestmark = pytest.mark.multiproc
SGD = partial(torch.optim.SGD, lr=0.1)


class Int8(torch.Tensor):
    """Numbers with scales; as torchao's, it knows nothing but what layers ask of it."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Int8:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)  # type: ignore[attr-defined]
        made.numbers, made.scale = numbers, scale
        return made  # type: ignore[no-any-return]

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Int8:
        return Int8(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.numbers.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return cls(func(args[0].numbers), func(args[0].scale))
        raise NotImplementedError(f"Int8 knows no {func}")


class Adapted(nn.Module):
    """A frozen layer with two thin ones beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(width, out), nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out if torch.is_grad_enabled() and out.requires_grad else out.contiguous()  # as bitsandbytes' ask


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Adapted(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (each(x).view(B, T, 4, C // 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 3)
        for module in self.modules():
            if isinstance(module, Adapted):
                module.base.weight = nn.Parameter(Int8.of(module.base.weight.detach()), requires_grad=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def beside_one_process(rank: int, layout: dict[str, int], options: dict[str, Any]) -> tuple[float, int, list[str]]:
    """Return how far losses and weights are apart, how many parameters are split, and what is told."""
    mesh, plain, model = mesh_of(**layout), Net(), Net()
    data = [(torch.randn(4, 5, 16), torch.randint(3, (4, 5))) for _ in range(3)]
    own = [[each.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for each in step] for step in data]
    sch = slapo.create_schedule(model, mesh=mesh, example_inputs=tuple(own[0]))
    with warnings_told() as told:
        if mesh["tp"].size() > 1:
            sch.tensor_parallel()
    if mesh["pp"].size() > 1:
        sch["blocks.0"].cut_pipeline_stage()
    num_split = sum(map(is_sharded, model.parameters()))
    engine: Any = slapo.build(sch, "torch", optimizer=SGD, **options)
    optimizer, worst = SGD([each for each in plain.parameters() if each.requires_grad]), 0.0
    for step, part in zip(data, own, strict=True):
        optimizer.zero_grad()
        expected = plain(*step)
        expected.backward()
        optimizer.step()
        worst = max(worst, abs(engine.train_batch(*part).item() - expected.item()))
    found = sch.full_state("param")
    trained = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    frozen = {name: value for name, value in plain.named_parameters() if isinstance(value.data, Int8)}
    assert frozen
    assert all(torch.equal(found[name].numbers, value.data.numbers) for name, value in frozen.items())
    worst = max([worst, *(float((found[name] - value.detach()).abs().max()) for name, value in trained.items())])
    engine.close()
    return worst, num_split, list(told)


@pytest.mark.parametrize(
    ("layout", "options"),
    [({"tp": 2}, {}), ({"dp": 2}, {"data_parallel": "fsdp"}), ({"dp": 2}, {}), ({"pp": 2}, {"microbatches": 2})],
)
def test_all_else_trains_as_in_one_process(layout: dict[str, int], options: dict[str, Any]) -> None:
    for worst, num_split, told in run_distributed(beside_one_process, 2, layout, options):
        assert worst < 1e-5
        assert bool(num_split) == bool(told) == ("tp" in layout)
        assert all(" stays whole on every rank: " in each and each.split()[1].startswith("blocks.0.") for each in told), told
