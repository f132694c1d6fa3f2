"""Rank functions of the tests of gradient hooks: usual hooks, beside the unmodified model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import slapo_deepspeed.plugin
import slapo_megatron.plugin
import slapo_pipeline.plugin
import slapo_sharding.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, Schedule, build, create_schedule
from slapo_training.gradient_hooks import gradient_hook
from tests.slapo_torch.layouts import mesh_of

PLUGINS = Registry(
    [
        slapo_tracing.plugin,
        slapo_training.plugin,
        slapo_pipeline.plugin,
        slapo_sharding.plugin,
        slapo_torch.plugin,
        slapo_deepspeed.plugin,
        slapo_megatron.plugin,
    ]
)
SGD = partial(torch.optim.SGD, lr=0.1)
ROWS, WIDTH, VOCABULARY = 8, 16, 21
"""The vocabulary is odd, so that its parts are uneven."""


class Net(nn.Module):
    """Embedding, two blocks and a head, tied or not; a layer that no batch uses."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        h = self.emb(ids)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), labels.flatten())


def made(family: str, tied: bool = False) -> nn.Module:
    """The model with the hooks of a family, equal on every rank."""
    torch.manual_seed(0)
    model = Net(tied)
    model.notes = []  # type: ignore[assignment]
    FAMILIES[family](model)
    return model


def masks(model: Any) -> None:
    """Position matters: a mask of rows, one in place, one of columns, one kept at the parameter, and a log."""

    def old_rows(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[:14] = 0
        return gradient

    def in_place(gradient: torch.Tensor) -> None:
        gradient[8:20, 3:] *= 0.5

    columns, notes = torch.arange(2 * WIDTH) >= WIDTH, model.notes
    model.emb.weight.register_hook(old_rows)
    model.blocks[0][0].weight.register_hook(in_place)
    model.blocks[0][2].weight.register_hook(lambda gradient: gradient * columns)
    kept = model.blocks[1][0].weight
    kept.mask = (torch.arange(2 * WIDTH)[:, None] % 3 == 0).float()
    kept.register_hook(lambda gradient: gradient * kept.mask)
    model.blocks[1][0].bias.register_hook(lambda gradient: torch.flip(gradient, [0]))
    model.norm.weight.register_hook(lambda gradient: notes.append(gradient.norm().item()))
    if model.head.weight is not model.emb.weight:
        model.head.weight.register_hook(lambda gradient: notes.append(gradient.norm().item()))


def norms(model: Any) -> None:
    """The whole gradient matters: clipped by norm, its sign, clamped, rows normalised, a running mean; two hooks in order."""
    mean = torch.zeros(WIDTH, 2 * WIDTH)

    def running(gradient: torch.Tensor) -> torch.Tensor:
        mean.lerp_(gradient, 0.5)
        return mean.clone()

    model.emb.weight.register_hook(lambda gradient: gradient * (0.1 / gradient.norm()))
    model.blocks[0][0].weight.register_hook(lambda gradient: gradient.sign() * 0.01)
    model.blocks[0][2].weight.register_hook(lambda gradient: F.normalize(gradient, dim=1) * 0.1)
    model.blocks[0][2].weight.register_hook(lambda gradient: gradient / gradient.abs().max())
    model.blocks[1][0].weight.register_hook(gradient_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3), kind="elementwise"))
    model.blocks[1][2].weight.register_hook(running)
    model.norm.bias.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def weights(model: Any) -> None:
    """Hooks that read weights: of a parameter they closed over, of a module, of a module by ``self``; and one removed."""

    class Decay:
        def __init__(self, layer: nn.Linear) -> None:
            self.layer = layer

        def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
            return gradient + 0.1 * self.layer.weight

    weight, layer = model.blocks[0][0].weight, model.blocks[0][2]
    model.emb.weight.register_hook(partial(lambda table, gradient: gradient + 0.1 * table, model.emb.weight))
    weight.register_hook(lambda gradient: gradient + 0.1 * weight)
    layer.weight.register_hook(lambda gradient: gradient * layer.weight.norm())
    model.blocks[1][0].weight.register_hook(Decay(model.blocks[1][0]))
    model.handle = model.blocks[1][2].weight.register_hook(lambda gradient: gradient * 100)


def after(model: Any) -> None:
    """Hooks behind the accumulation: they scale, clip by norm, put another gradient, and read weights and masks."""

    def clip(q: torch.Tensor) -> None:
        nn.utils.clip_grad_norm_([q], 0.01)

    def decay(q: torch.Tensor) -> None:
        assert q.grad is not None
        q.grad.add_(q, alpha=0.1)

    def other(q: torch.Tensor) -> None:
        assert q.grad is not None
        q.grad = q.grad * 0.5 + q.grad.mean()

    def masked(q: Any) -> None:
        q.grad *= q.mask

    model.emb.weight.register_post_accumulate_grad_hook(clip)
    model.blocks[0][0].weight.register_post_accumulate_grad_hook(decay)
    model.blocks[0][2].weight.register_post_accumulate_grad_hook(other)
    model.blocks[1][0].weight.mask = torch.arange(2 * WIDTH * WIDTH).view(2 * WIDTH, WIDTH) % 5 / 4
    model.blocks[1][0].weight.register_post_accumulate_grad_hook(masked)
    model.blocks[1][2].weight.register_hook(lambda gradient: gradient * 2)
    model.blocks[1][2].weight.register_post_accumulate_grad_hook(clip)
    for parameter in model.norm.parameters():
        parameter.register_post_accumulate_grad_hook(lambda q: (q.grad.mul_(0.5), None)[1])


def steps(model: Any) -> None:
    """An optimizer that runs in the backward, for each parameter."""
    own = {parameter: torch.optim.Adam([parameter], lr=1e-2) for parameter in model.parameters()}

    def step(q: nn.Parameter) -> None:
        own[q].step()
        own[q].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def noise(model: Any) -> None:
    """Random numbers, the same on all ranks."""
    model.emb.weight.register_hook(lambda gradient: gradient + 1e-2 * torch.randn_like(gradient))


def nothing(model: Any) -> None:
    """No hook."""


FAMILIES: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (masks, norms, weights, after, steps, noise, nothing)
}


def batches(number: int = 3) -> list[dict[str, torch.Tensor]]:
    """Batches of all replicas together."""
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, 5)
    draw = partial(torch.randint, VOCABULARY, shape, generator=generator)
    return [{"ids": draw(), "labels": draw()} for _ in range(number)]


def expected(family: str, tied: bool, clip: float) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Weights before and after each step of one process, and what its hooks noted."""
    model: Any = made(family, tied).train()
    optimizer = SGD(model.parameters())
    found = [{name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}]
    for index, batch in enumerate(batches()):
        if index == 1 and hasattr(model, "handle"):
            model.handle.remove()
        torch.manual_seed(index)
        model(**batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)})
    return found, model.notes


def scheduled(model: nn.Module, layout: dict[str, int], tied: bool) -> Schedule:
    """The model, sharded and cut as the layout wants."""
    mesh = mesh_of(**layout)
    example = {name: value[:2] for name, value in batches(1)[0].items()}
    schedule = create_schedule(model, mesh=mesh, example_inputs=example, plugins=PLUGINS)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel({"blocks.*.0": "colwise", "blocks.*.2": "rowwise"})
        schedule["emb"].shard("weight", axis=0, uneven=True).sync("fwd_post", "all_reduce")
        if tied:
            schedule["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather", axis=-1)
    if mesh["pp"].size() > 1:
        schedule["blocks.0"].cut_pipeline_stage()
    return schedule


def differences(rank: int, target: str, layout: dict[str, int], cases: list[tuple[str, bool]], **config: Any) -> list[str]:
    """Differences of each family from one process, relative to the tensor's largest change; empty if all are equal."""
    wrong = []
    for family, tied in cases:
        clip = config.get("clip", 0.0)
        states, notes = expected(family, tied, clip)
        model: Any = made(family, tied)
        handle, own_notes = getattr(model, "handle", None), model.notes
        schedule = scheduled(model, layout, tied)
        mesh = schedule.mesh
        engine = build(schedule, target, optimizer=SGD, **{"microbatches": 2, **copy.deepcopy(config)})
        for index, batch in enumerate(batches()):
            if index == 1 and handle is not None:
                handle.remove()
            torch.manual_seed(index)
            part = {name: value.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, value in batch.items()}
            engine.train_batch(**part)
            full = schedule.full_state()
            for name, want in states[index + 1].items():
                change = (want - states[0][name]).abs().max().item()
                error = (full[name] - want).abs().max().item()
                if error > 1e-3 * change + 1e-7:
                    wrong.append(f"{family}{' tied' * tied}, step {index}, {name}: off by {error:.1e} of {change:.1e}")
        engine.close()
        if mesh["pp"].size() == 1 and not torch.allclose(torch.tensor(own_notes), torch.tensor(notes), rtol=1e-4):
            wrong.append(f"{family}: noted {own_notes}, not {notes}")
    return wrong
