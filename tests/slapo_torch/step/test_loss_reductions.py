"""Losses inside a model whose labels the batch does not show: each step's loss and gradients are those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import has_torch_function
from torch.utils.checkpoint import checkpoint

import slapo_pipeline.plugin
import slapo_torch.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Registry, build, create_schedule
from slapo_testing import run_distributed
from slapo_training.distributed._torch_private import nll_mean_of

from ..layouts import adamw, mesh_of, message_of

PLUGINS = Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin, slapo_torch.plugin])
IDS = torch.randint(1, 7, (4, 6), generator=torch.Generator().manual_seed(0))
FULL = torch.ones(4, 6, dtype=torch.bool)
MASK = torch.arange(6)[None] < torch.tensor([6, 5, 2, 1])[:, None]
Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def _masked(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(~mask, -100).flatten())


def _smoothed(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(~mask, -100).flatten(), label_smoothing=0.1)


def _checkpointed(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return checkpoint(_masked, logits, ids, mask, use_reentrant=False)


def _zeroed(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(logits.log_softmax(-1).movedim(-1, 1), ids * mask, ignore_index=0)


def _nested(logits: torch.Tensor, ids: torch.Tensor, mask: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), mask["target"].flatten())


class Tagger(nn.Module):
    """Makes its labels, and its loss of them, itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(7, 8), nn.Linear(8, 7), loss

    def forward(self, ids: torch.Tensor, mask: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.table(ids))
        return {"loss": self.loss(logits, ids, mask), "logits": logits}


def _engine(loss: Loss, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(1)
    model = Tagger(loss)
    reference = copy.deepcopy(model)
    return build(create_schedule(model, plugins=PLUGINS), "torch", optimizer=adamw, microbatches=2, **options), reference


def _given(loss: Loss, mask: torch.Tensor) -> dict[str, Any]:
    return {"ids": IDS, "mask": {"target": IDS.masked_fill(~mask, -100)} if loss is _nested else mask}


@pytest.mark.parametrize("first", [MASK, FULL], ids=["uneven", "even"])
@pytest.mark.parametrize("loss", [_masked, _smoothed, _checkpointed, _zeroed, _nested])
@pytest.mark.parametrize("evaluates", [False, True], ids=["trains", "evaluates"])
def test_labels_that_the_batch_does_not_show_weigh_in_every_step(loss: Loss, first: torch.Tensor, evaluates: bool) -> None:
    engine, reference = _engine(loss)
    optimizer = adamw(reference.parameters())
    if evaluates:
        torch.testing.assert_close(engine.eval_batch(**_given(loss, first)), reference(**_given(loss, first))["loss"].detach())
    for mask in (first, MASK, MASK.flip(0), FULL, MASK):
        optimizer.zero_grad()
        expected = reference(**_given(loss, mask))["loss"]
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(engine.train_batch(**_given(loss, mask)), expected.detach())
        torch.testing.assert_close(engine.module.table.weight.grad, reference.table.weight.grad)
    evaluated = reference(**_given(loss, MASK))["loss"]
    torch.testing.assert_close(engine.eval_batch(**_given(loss, MASK)), evaluated.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("loss", "watched"), [(_masked, 1), (_smoothed, 4), (_checkpointed, 4)])
def test_a_model_is_watched_only_while_its_loss_does_not_tell_by_itself(loss: Loss, watched: int) -> None:
    seen = []

    def looking(logits: torch.Tensor, ids: torch.Tensor, mask: Any) -> torch.Tensor:
        seen.append(has_torch_function((logits,)))
        return loss(logits, ids, mask)

    engine, _ = _engine(looking, check=False)
    engine.train_batch(ids=IDS, mask=MASK)
    engine.train_batch(ids=IDS, mask=MASK)
    assert (len(seen), sum(seen)) == (4, watched)


def test_a_batch_in_one_part_is_not_watched() -> None:
    seen = []

    def looking(logits: torch.Tensor, ids: torch.Tensor, mask: Any) -> torch.Tensor:
        seen.append(has_torch_function((logits,)))
        return _masked(logits, ids, mask)

    engine = build(create_schedule(Tagger(looking), plugins=PLUGINS), "torch", optimizer=adamw)
    engine.train_batch(ids=IDS, mask=MASK)
    engine.eval_batch(ids=IDS, mask=MASK)
    assert seen == [False, False]


def _on_two_ranks(rank: int, layout: dict[str, int], config: dict[str, Any], loss: Loss) -> list[float]:
    """Differences of losses and gradients from those in one process, after a step in which rank 1 fails."""
    mesh = mesh_of(**layout)
    torch.manual_seed(1)
    model = Tagger(loss)
    reference = copy.deepcopy(model)

    def mine(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"ids": ids.chunk(mesh["dp"].size())[part], "mask": mask.chunk(mesh["dp"].size())[part]}

    part = mesh["dp"].get_local_rank()
    schedule = create_schedule(model, mesh=mesh, example_inputs=mine(IDS[[0, 2]], MASK[[0, 2]]), plugins=PLUGINS)
    if mesh["pp"].size() > 1:
        schedule["table"].cut_pipeline_stage()
    engine: Any = build(schedule, "torch", optimizer=adamw, **config)
    optimizer, found = adamw(reference.parameters()), []
    assert "out of" in message_of(lambda: engine.train_batch(**mine(IDS + 6 * (torch.arange(4)[:, None] > 1), FULL)))
    for mask in (FULL, MASK, MASK.flip(0)):
        optimizer.zero_grad()
        expected = reference(IDS, mask)["loss"]
        expected.backward()
        optimizer.step()
        found.append(abs(engine.train_batch(**mine(IDS, mask)).item() - expected.item()))
        gradients = schedule.full_state("grad")
        found += [
            float((gradients[name] - p.grad).abs().max()) for name, p in reference.named_parameters() if p.grad is not None
        ]
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2}, {"data_parallel": "fsdp", "fsdp_units": [], "microbatches": 2}),
        ({"pp": 2}, {"microbatches": 2}),
    ],
    ids=["replicas", "sharded replicas", "pipeline"],
)
@pytest.mark.parametrize("loss", [_masked, _smoothed])
def test_labels_that_no_rank_shows_weigh_over_all_ranks(layout: dict[str, int], config: dict[str, Any], loss: Loss) -> None:
    for differences in run_distributed(_on_two_ranks, 2, layout, config, loss):
        assert max(differences) < 1e-5


X, TARGET = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, -100, 1])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda: F.cross_entropy(X, TARGET), (5, -100)),
        (lambda: F.cross_entropy(X, TARGET.clamp(min=0), ignore_index=1), (4, 1)),
        (lambda: F.cross_entropy(X.mT[None], TARGET[None]), (5, -100)),
        (lambda: F.nll_loss(X.bfloat16().repeat(300, 1), TARGET.repeat(300)), (1500, -100)),
        (lambda: F.cross_entropy(X, TARGET, reduction="sum"), None),
        (lambda: F.cross_entropy(X, TARGET, weight=torch.ones(4)), None),
        (lambda: F.cross_entropy(X, TARGET, label_smoothing=0.1), None),
        (lambda: F.cross_entropy(X, TARGET) + X.sum(), None),
        (lambda: checkpoint(F.cross_entropy, X, TARGET, use_reentrant=False), None),
        (lambda: F.cross_entropy(X.detach(), TARGET), None),
        (lambda: F.mse_loss(X, X.detach()), None),
    ],
)
def test_torch_still_keeps_with_a_loss_what_it_is_a_mean_over(
    loss: Callable[[], torch.Tensor], told: tuple[int, int] | None
) -> None:
    assert nll_mean_of(loss()) == told
