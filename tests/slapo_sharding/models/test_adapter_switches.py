"""PEFT adapters that are switched between steps, or within a forward for the reference of a preference loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.models.test_adapters import QV, llama
from tests.slapo_torch.layouts import mesh_of

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

_EMPTY = {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {"microbatches": 2}),
    "fsdp": ("torch", {"data_parallel": "fsdp"}),
    "zero 3": ("deepspeed", {"config": {"zero_optimization": {"stage": 3, **_EMPTY}}}),
}


class Preference(nn.Module):
    """Preference loss on outputs with the adapter and without it, or with another one, in either order."""

    def __init__(self, other: str | None, reference_first: bool) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__()
        settings: dict[str, Any] = {"lora_alpha": 8, "init_lora_weights": False, **QV}
        self.model: Any = get_peft_model(llama(), LoraConfig(r=4, **settings))
        self.model.add_adapter("other", LoraConfig(r=2, **settings))
        self.other, self.reference_first = other, reference_first

    def _sums(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))

    @torch.no_grad()
    def _reference(self, ids: torch.Tensor) -> torch.Tensor:
        if self.other is None:
            with self.model.disable_adapter():
                return self._sums(ids)
        self.model.set_adapter(self.other)
        found = self._sums(ids)
        self.model.set_adapter("default")
        return found

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        before = self._reference(input_ids) if self.reference_first else None
        found = self._sums(input_ids)
        before = self._reference(input_ids) if before is None else before
        return {"loss": -F.logsigmoid(0.1 * (found - before)).mean()}


def _compare(rank: int, reference: nn.Module, layout: dict[str, int], engine: str, switch: bool) -> None:
    """Take four steps beside the unmodified model, with alternating adapters if ``switch``."""
    torch.manual_seed(1)
    model, ids = copy.deepcopy(reference), torch.randint(0, 64, (4, 4, 12))
    pair: list[Any] = [model, reference]
    for each in pair if switch else ():
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name)
    example = {"input_ids": ids[0], **({"labels": ids[0]} if switch else {})}
    mesh = mesh_of(**layout)
    schedule = create_schedule(model, mesh=mesh, example_inputs=example)
    if mesh["tp"].size() > 1:
        schedule.tensor_parallel()
    if mesh["pp"].size() > 1:
        schedule.pipeline(2)
    target, options = ENGINES[engine]
    trained = [each for each in reference.parameters() if each.requires_grad]
    running: Any = build(schedule, target, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options)
    sgd = torch.optim.SGD(trained, lr=0.1)
    for step, each in enumerate(ids):
        for one in pair if switch else ():
            one.set_adapter(["default", "other"][step % 2])
        batch = dict.fromkeys(example, each)
        own = {name: part.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for name, part in batch.items()}
        expected = reference(**batch)["loss"]
        assert abs(running.train_batch(**own).item() - expected.item()) < 1e-5
        expected.backward()
        sgd.step()
        sgd.zero_grad()
    if engine != "zero 3":
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(schedule.full_state()[name], parameter.detach(), atol=1e-5, rtol=1e-5)
    running.close()


def _prefers(rank: int, other: str | None, reference_first: bool, layout: dict[str, int], engine: str) -> None:
    torch.manual_seed(0)
    _compare(rank, Preference(other, reference_first), layout, engine, False)


def _switches(rank: int, layout: dict[str, int], engine: str) -> None:
    torch.manual_seed(0)
    _compare(rank, Preference(None, False).model, layout, engine, True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("other", "reference_first", "layout", "engine"),
    [
        (None, False, {"tp": 2}, "torch"),
        ("other", False, {"tp": 2}, "torch"),
        (None, True, {"pp": 2}, "torch"),
        (None, False, {"dp": 2}, "fsdp"),
        ("other", False, {"dp": 2}, "fsdp"),
        (None, True, {"dp": 2}, "zero 3"),
    ],
)
def test_a_reference_in_the_same_forward(other: str | None, reference_first: bool, layout: dict[str, int], engine: str) -> None:
    run_distributed(_prefers, 2, other, reference_first, layout, engine, timeout=180)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("layout", "engine"), [({"tp": 2}, "torch"), ({"pp": 2}, "torch"), ({"dp": 2}, "fsdp")])
def test_adapters_are_switched_between_steps(layout: dict[str, int], engine: str) -> None:
    run_distributed(_switches, 2, layout, engine, timeout=180)
