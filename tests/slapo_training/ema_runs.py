"""Runs of the tests of ``slapo.ema`` on each rank: an engine's averages beside torch's on the unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import slapo
from tests.slapo_torch.layouts import mesh_of

DECAY = 0.7
Layout = dict[str, int]


class Block(nn.Module):
    """A gated MLP behind a norm; sizes that two ranks do not always divide into equal ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    """An embedding that is the output's weight as well, a frozen scale, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Normed(nn.Module):
    """A BatchNorm, whose buffers change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1, eps=1e-2)


def batches(dp: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of all replicas together, whose lengths change from step to step."""
    generator = torch.Generator().manual_seed(1)
    for length in (5, 3, 6, 4):
        ids = torch.randint(8, (4 * dp, length), generator=generator)
        yield {"input_ids": ids, "labels": ids.roll(1, 1)}


def part(batch: dict[str, torch.Tensor], layout: Layout, mesh: Any) -> dict[str, torch.Tensor]:
    dp = layout.get("dp", 1)
    return {name: each.chunk(dp)[mesh["dp"].get_local_rank()] for name, each in batch.items()}


def averaged(steps: int, dp: int, make: Any = sgd) -> AveragedModel:
    """The unmodified model's average after some steps."""
    model = small()
    found = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = make([each for each in model.parameters() if each.requires_grad])
    for batch, _ in zip(batches(dp), range(steps), strict=False):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        found.update_parameters(model)
    return found


def engine_of(target: str, layout: Layout, **options: Any) -> tuple[Any, Any, Any]:
    mesh = mesh_of(**layout)
    schedule = slapo.create_schedule(small(), mesh=mesh, example_inputs=part(next(batches(layout.get("dp", 1))), layout, mesh))
    if layout.get("tp", 1) > 1:
        schedule["blocks.0"].tensor_parallel()
    if layout.get("pp", 1) > 1:
        schedule["blocks.0"].cut_pipeline_stage()
    engine = slapo.build(schedule, target, microbatches=2, **{"optimizer": sgd, **options})
    return engine, mesh, schedule


def difference(state: dict[str, torch.Tensor], expected: nn.Module) -> float:
    wanted = expected.state_dict()
    assert state.keys() == wanted.keys(), (state.keys(), wanted.keys())
    return max((state[name] - value).abs().max().item() for name, value in wanted.items())


def beside_torch(rank: int, target: str, layout: Layout, variants: dict[str, Any], folder: str) -> dict[str, list[float]]:
    """Differences after three steps: of the state, of an evaluation, and of the weights the engine has behind it."""
    return {name: _one(target, layout, options, Path(folder) / name) for name, options in variants.items()}


def _one(target: str, layout: Layout, options: dict[str, Any], folder: Path) -> list[float]:
    dp = layout.get("dp", 1)
    engine, mesh, _ = engine_of(target, layout, **options)
    average = slapo.ema(engine, DECAY)
    data = [*batches(dp)]
    for batch in data[:3]:
        engine.train_batch(**part(batch, layout, mesh))
    expected = averaged(3, dp, options.get("optimizer", sgd))
    own = engine.eval_batch(**part(data[3], layout, mesh)).item()
    worst = [difference(average.full_state(), expected.module)]
    with average.applied():
        inside = engine.eval_batch(**part(data[3], layout, mesh)).item()
        slapo.export_weights(engine, folder / "exported", dtype=torch.float32)
    worst += [
        abs(inside - expected.module(**data[3]).item()),
        abs(engine.eval_batch(**part(data[3], layout, mesh)).item() - own),
    ]
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        wanted = expected.module.state_dict()
        exported = load_file(folder / "exported" / "model.safetensors")
        worst.append(max((value - wanted[name]).abs().max().item() for name, value in exported.items()))
    engine.save(folder / "saved")
    engine.close()
    return worst


def loaded(rank: int, target: str, layout: Layout, options: dict[str, Any], folder: str, dp: int) -> tuple[float, int]:
    """Difference after loading a checkpoint of three steps, and one more step; number of updates."""
    engine, mesh, _ = engine_of(target, layout, **options)
    average = slapo.ema(engine, DECAY)
    engine.load(folder)
    *_, last = batches(dp)
    held = {name: each.chunk(layout.get("dp", 1))[mesh["dp"].get_local_rank()] for name, each in last.items()}
    engine.train_batch(**held)
    worst = difference(average.full_state(), averaged(4, dp, options.get("optimizer", sgd)).module)
    engine.close()
    return worst, average.num_updates


def with_buffers(rank: int) -> None:
    """A BatchNorm's statistics are averaged or the model's own, as torch's ``use_buffers`` says."""
    for use_buffers in (True, False):
        torch.manual_seed(0)
        model = Normed()
        reference = copy.deepcopy(model)
        engine = slapo.build(slapo.create_schedule(model), "torch", optimizer=sgd)
        average = slapo.ema(engine, DECAY, use_buffers=use_buffers)
        expected = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers)
        optimizer = sgd(reference.parameters())
        for rows in (5, 3, 6):
            x = torch.randn(rows, 4)
            engine.train_batch(x)
            optimizer.zero_grad()
            reference(x).backward()
            optimizer.step()
            expected.update_parameters(reference)
        assert difference(average.full_state(), expected.module) < 1e-6
        with average.applied():
            assert abs(engine.eval_batch(x) - expected.eval()(x)) < 1e-6


def half_precision(rank: int, target: str, folder: str) -> list[float]:
    """Change of an average that bf16 would round away, and the difference of the weights in fp32 behind ``applied``."""
    engine, mesh, _ = engine_of(target, {"dp": 2}, precision="bf16", distributed_optimizer=True, optimizer=adam)
    average = slapo.ema(engine, 0.9999)
    data = [part(each, {"dp": 2}, mesh) for each in batches(2)]
    engine.train_batch(**data[0])
    before = average.full_state()
    engine.train_batch(**data[1])
    pieces = {name: piece.tensor.clone() for name, piece in engine.pieces().items()}
    with average.applied():
        engine.eval_batch(**data[0])
    moved = max((value - before[name]).abs().max().item() for name, value in average.full_state().items())
    same = max((piece.tensor - pieces[name]).abs().max().item() for name, piece in engine.pieces().items())
    return [moved, same]


def refused(rank: int) -> list[str]:
    """Return messages for wrong calls, and for a model that FSDP has sharded."""
    engine, mesh, _ = engine_of("torch", {"dp": 2}, data_parallel="fsdp")
    data = part(next(batches(2)), {"dp": 2}, mesh)
    average = slapo.ema(engine)
    calls = [
        lambda: slapo.ema(engine, 1.5),
        lambda: slapo.ema(engine, 0.5 if rank else 0.6),
        lambda: AveragedModel(copy.deepcopy(engine.module))(**data),
        lambda: slapo.ema(slapo.build(slapo.create_schedule(nn.Linear(2, 2)), None)),  # type: ignore[arg-type]
    ]
    with average.applied():
        told = [_message(call) for call in (lambda: engine.train_batch(**data), lambda: engine.save("never"))]
    engine.train_batch(**data)
    return [*map(_message, calls), *told]


def _message(call: Any) -> str:
    try:
        call()
    except slapo.BuildError as err:
        return str(err)
    return "nothing"
