"""The families: their models, batches, and a configuration of each that asks for everything it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import Schedule
from slapo_models import apply_schedule
from slapo_verify import Report, verify, verify_engine
from tests.slapo_models.residual import WideResNet
from tests.slapo_torch.layouts import mesh_of
from tests.zoo.families import FAMILIES


@dataclass(frozen=True)
class Case:
    """A family.

    Args:
        key: Of its schedule, and of the zoo's model.
        everything: Kernels and recomputation, as its schedule has them.
        cuts: What makes two stages of two blocks.
    """

    key: str
    everything: dict[str, Any]
    cuts: list[Any] = field(default_factory=lambda: [0])

    def model(self) -> nn.Module:
        """The unmodified model, with the same numbers each time."""
        if self.key == "wideresnet":
            torch.manual_seed(0)
            return WideResNet()
        return FAMILIES[self.key].model()

    def batch(self) -> dict[str, Any]:
        """Two rows, with labels."""
        if self.key == "wideresnet":
            generator = torch.Generator().manual_seed(0)
            return {"x": torch.randn(4, 3, 8, 8, generator=generator), "labels": torch.tensor([1, 5, 0, 9])}
        cached = self.key in ("gpt2", "gpt_neo", "opt", "t5")
        return {**FAMILIES[self.key].batch(), **({"use_cache": False} if cached else {})}


_KERNELS = {"attn_op_name": "native", "disable_fuse_bias_gelu": False, "ckpt_ratio": 0.5, "bcast_input": True}
CASES = {
    case.key: case
    for case in (
        Case("albert", {"attn_op_name": "native", "ckpt_ratio": 1.0, "bcast_input": True}, cuts=[1]),
        Case("bert", _KERNELS),
        Case("gpt2", _KERNELS),
        Case("gpt_neo", {**_KERNELS, "attn_op_name": "eager"}),
        Case("opt", {"attn_op_name": "native", "ckpt_ratio": 0.5, "bcast_input": True}),
        Case("roberta", _KERNELS),
        Case("t5", _KERNELS, cuts=[[], []]),
        Case("wideresnet", {"ckpt_ratio": 0.5, "bcast_input": True}, cuts=[[], [0], [], []]),
    )
}


def scheduled(case: Case, model: nn.Module, layout: dict[str, int], config: dict[str, Any]) -> Schedule:
    """The model by its ready schedule, on a mesh."""
    batch = case.batch()
    example = {name: value for name, value in batch.items() if name != "labels" or case.key != "wideresnet"}
    cuts = {"pipeline_cuts": case.cuts} if layout.get("pp", 1) > 1 else {}
    return apply_schedule(model, case.key, mesh=mesh_of(**layout), example_inputs=example, **config, **cuts)


def of_model(rank: int, key: str, layout: dict[str, int], config: dict[str, Any]) -> Report:
    """Outputs, gradients and a step of the scheduled model beside the unmodified one's."""
    case = CASES[key]
    model = case.model()
    sch = scheduled(case, case.model(), layout, config)
    loss = None if key != "wideresnet" else _loss
    return verify(model, sch, level="step", loss=loss, eval_mode=False)


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, CASES["wideresnet"].batch()["labels"])


def of_engine(rank: int, key: str, layout: dict[str, int], config: dict[str, Any], target: str) -> Report:
    """A step of an engine beside the unmodified model's."""
    case = CASES[key]
    options: dict[str, Any] = {"microbatches": 2}
    if key == "wideresnet":  # its norms take the statistics of a micro-batch
        options = {"microbatches": 1, "loss_fn": F.cross_entropy}
        options |= {"pipeline_schedule": "gpipe"} if target == "torch" and layout.get("pp", 1) > 1 else {}
    report = verify_engine(case.model(), lambda model: scheduled(case, model, layout, config), case.batch(), target, **options)
    object.__setattr__(report, "trained", None)
    return report
