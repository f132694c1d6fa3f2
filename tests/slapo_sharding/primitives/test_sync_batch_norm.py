"""BatchNorm over the rows of all replicas equals the unmodified layer on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import ScheduleError, create_schedule, load_schedule
from slapo_sharding.sync_batch_norm import statistics_of
from slapo_testing import run_distributed


class Renamed(nn.BatchNorm2d):
    """A subclass that keeps the forward."""


class Frozen(nn.BatchNorm2d):
    """A subclass with another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


FLOAT, HALF = torch.float32, torch.bfloat16
LAYERS: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,), FLOAT),
    "1d, a sequence": (lambda: nn.BatchNorm1d(3), (3, 5), FLOAT),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 2, 4), FLOAT),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2), FLOAT),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (3, 2, 2), FLOAT),
    "no running statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2), FLOAT),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False, eps=1e-3), (3, 2, 2), FLOAT),
    "a subclass": (lambda: Renamed(3), (3, 2, 2), FLOAT),
    "lazy": (lambda: materialised(nn.LazyBatchNorm2d()), (3, 2, 2), FLOAT),
    "torch's own": (lambda: nn.SyncBatchNorm(3), (3, 2, 2), FLOAT),
    "half": (lambda: nn.BatchNorm2d(3).to(HALF), (3, 2, 2), HALF),
    "half but for the parameters": (lambda: nn.BatchNorm2d(3), (3, 2, 2), HALF),
    "double": (lambda: nn.BatchNorm2d(3).double(), (3, 2, 2), torch.float64),
}
TOLERANCES = {FLOAT: 2e-5, HALF: 2e-2, torch.float64: 1e-12}


def materialised(layer: nn.Module) -> nn.Module:
    layer.eval()(torch.zeros(1, 3, 2, 2))
    return layer.train()


def errors(name: str, rank: int, mesh: Any, rows: list[int], *, recompute: bool = False) -> dict[str, float]:
    """Return the largest differences over two training steps and an evaluation, on this replica's ``rows``."""
    make, shape, dtype = LAYERS[name]
    torch.manual_seed(3)
    synced = make()
    for parameter in synced.parameters():
        nn.init.normal_(parameter)
    whole: Any = copy.deepcopy(synced)
    if isinstance(whole, nn.SyncBatchNorm):
        whole = nn.BatchNorm2d(3)
        whole.load_state_dict(synced.state_dict())
    sch = create_schedule(nn.Sequential(synced), mesh=mesh)
    sch.sync_batch_norm()
    if recompute:
        sch["0"].checkpoint()
    assert type(sch["0"].mod) is type(synced)
    assert list(sch.mod[0].state_dict()) == list(whole.state_dict())
    found: dict[str, float] = {}

    def compare(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        assert one.dtype == other.dtype, what
        difference = (one.double() - other.double()).abs().max() if one.numel() else torch.zeros(())
        size = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        found[what] = max(found.get(what, 0.0), difference.item() / size)

    start = sum(rows[:rank])
    mine = slice(start, start + rows[rank])
    for _ in range(2):
        x = (torch.randn(sum(rows), *shape) * 2 + 3).to(dtype)
        weights = torch.randn(x.shape).to(dtype)
        xs, ours = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, output = whole(xs), sch.mod(ours)
        (expected * weights).sum().backward()
        (output * weights[mine]).sum().backward()
        compare("output", output, expected[mine])
        compare("input's gradient", ours.grad, xs.grad[mine])
    for parameter, reference in zip(synced.parameters(), whole.parameters(), strict=True):
        total = parameter.grad.clone()
        torch.distributed.all_reduce(total, group=mesh["dp"].get_group())
        compare("parameters' gradients", total, reference.grad)
    for buffer, reference in zip(synced.buffers(), whole.buffers(), strict=True):
        compare("buffers", buffer, reference)
    synced.eval()
    whole.eval()
    compare("evaluation", sch.mod(x[mine]), whole(x[mine]))
    return found


def replicas(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    cases = [(name, rows, recompute) for name in LAYERS for rows in ([3, 3], [1, 4]) for recompute in (False, True)]
    cases += [("2d", [0, 3], False)]
    return [(name, rows, recompute, errors(name, rank, mesh, rows, recompute=recompute)) for name, rows, recompute in cases]


def large_mean(rank: int) -> list[float]:
    """A standard deviation of 1e-2 around 1e3, which a difference of squares would lose."""
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    torch.manual_seed(0)
    x = torch.randn(64, 2) * 1e-2 + 1e3
    sch = create_schedule(nn.Sequential(nn.BatchNorm1d(2, eps=0.0)), mesh=mesh)
    sch.sync_batch_norm()
    sch.mod(x[32 * rank : 32 * rank + 32])
    variance = 0.9 + 0.1 * x.double().var(0)
    return [(sch.mod[0].running_var.double() - variance).abs().max().item() / 1e-5]


@pytest.mark.multiproc
def test_each_kind_of_layer_is_that_of_the_whole_batch() -> None:
    for results in run_distributed(replicas, 2, timeout=100):
        assert len(results) == 4 * len(LAYERS) + 1
        for name, rows, recompute, found in results:
            limit = TOLERANCES[LAYERS[name][2]]
            assert all(value <= limit for value in found.values()), (name, rows, recompute, found)
    assert all(error < 0.05 for (error,) in run_distributed(large_mean, 2))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Frozen(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.norm(self.conv(x)))


def test_journal_undo_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Block(), nn.ReLU(), nn.BatchNorm2d(3))
    sch = create_schedule(model)
    sch["0"].sync_batch_norm()
    assert "leaves last as it is" in capsys.readouterr().err
    assert statistics_of(model[0].norm) is not None
    assert statistics_of(model[0].last) is statistics_of(model[2]) is None
    sch.sync_batch_norm()  # the others too
    assert len(model[0].norm._slapo_wrappers) == 1
    sch.undo()
    sch.undo()
    assert all(statistics_of(module) is None for module in model.modules())
    with pytest.raises(ScheduleError, match=r"^sync_batch_norm\('1'\): no BatchNorm here or below; call it on"):
        sch["1"].sync_batch_norm()
    with pytest.raises(ScheduleError, match=r"no BatchNorm here or below; '' has a forward of its own"):
        sch["0.last"].sync_batch_norm()


def test_a_schedule_is_saved_and_loaded(tmp_path: Any) -> None:
    sch = create_schedule(nn.Sequential(nn.BatchNorm1d(3)))
    sch.sync_batch_norm()
    sch.save(tmp_path / "schedule.json")
    again = nn.Sequential(nn.BatchNorm1d(3))
    load_schedule(again, tmp_path / "schedule.json")
    assert statistics_of(again[0]) is not None
    x = torch.randn(4, 3)
    assert torch.equal(again(x), sch.mod(x))
