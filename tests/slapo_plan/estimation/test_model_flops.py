"""Operations of the model itself, against those that its forward and backward run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slapo_core import create_schedule
from slapo_plan import Estimate, estimate, plan


class Layers(nn.Module):
    """Layers of matrix products, some of them beside a frozen one, as in LoRA."""

    def __init__(self, frozen: int = 0, branches: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 32)) for _ in range(4 * branches))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = (layer(x) + self.branches[index](x) if self.branches else layer(x)).relu()
        return x.square().mean()


def estimated(model: nn.Module, *checkpoints: str) -> Estimate:
    sch = create_schedule(model, example_inputs={"x": torch.zeros(8, 32)})
    for path in checkpoints:
        sch[path].checkpoint()
    return estimate(sch, {"x": torch.zeros(8, 32)})


@pytest.mark.parametrize("frozen", range(4))
@pytest.mark.parametrize("branches", [False, True])
def test_products_for_frozen_weights_are_not_counted(frozen: int, branches: bool) -> None:
    found = estimated(Layers(frozen, branches))
    assert found.model_flops == found.flops
    assert found.model_flops < estimated(Layers(0, branches)).model_flops or not frozen


def test_recomputation_is_not_counted() -> None:
    plain, recomputed = estimated(Layers(2, True)), estimated(Layers(2, True), "layers.1", "branches.2")
    assert recomputed.model_flops == plain.model_flops == plain.flops < recomputed.flops


def test_the_search_counts_as_the_estimate_does() -> None:
    batch, constraints = {"x": torch.zeros(1, 32)}, {"tp": 1, "rows": 2}
    found = plan(Layers(2, True), batch, ranks=2, global_batch=8, hardware="h100", constraints=constraints, check=0)
    assert {each.flops for each in found} == {found.estimate().model_flops}
