"""Several ranks that share one GPU: layouts whose parameters, activations and messages are on CUDA, beside the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slapo_core import Schedule, build, create_schedule
from slapo_testing import run_distributed

from .models import DEVICE, KINDS, PATHS, batch_of
from .staged import join

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "pp": ((2, 1, 1), {"microbatches": 4}),
    "pp gpipe": ((2, 1, 1), {"microbatches": 4, "pipeline_schedule": "gpipe"}),
    "pp zero bubble": ((2, 1, 1), {"microbatches": 4, "pipeline_schedule": "zero_bubble"}),
    "dp": ((1, 2, 1), {"microbatches": 2}),
    "fsdp": ((1, 2, 1), {"microbatches": 2, "data_parallel": "fsdp"}),
    "tp": ((1, 1, 2), {}),
    "tp sequence": ((1, 1, 2), {}),
    "pp tp": ((2, 1, 2), {"microbatches": 2, "clip": 0.1}),
    "pp dp": ((2, 2, 1), {"microbatches": 2, "clip": 0.1}),
}
LIMITS = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Share of its norm by which a gradient may differ from that of the unmodified model in fp32."""


def _scheduled(model: nn.Module, kind: str, mesh: DeviceMesh, batch: dict[str, Any], layout: str) -> Schedule:
    sch = create_schedule(model, mesh=mesh, example_inputs=batch)
    if mesh["tp"].size() > 1:
        sch.tensor_parallel(sequence_parallel=True) if layout == "tp sequence" else sch.tensor_parallel()
    layers = sch.select(f"{PATHS[kind]}.*")
    for layer in layers[::2]:
        layer.checkpoint()
    stages = mesh["pp"].size() * (2 if layout == "pp zero bubble" else 1)
    for stage in range(1, stages):
        layers[stage * len(layers) // stages - 1].cut_pipeline_stage()
    return sch


def beside_reference(rank: int, store: str, kind: str, layout: str, precision: str, device: str = DEVICE) -> dict[str, float]:
    """Largest differences over two steps: of losses, of gradients as shares of their norms, and of the loss of evaluation."""
    shape, config = LAYOUTS[layout]
    join(rank, shape[0] * shape[1] * shape[2], store)
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "tp"))
    model = KINDS[kind]().to(device)
    reference = copy.deepcopy(model)
    batch = batch_of(8 * shape[1], device)
    mine = {name: tensor.chunk(shape[1])[mesh["dp"].get_local_rank()] for name, tensor in batch.items()}
    sch = _scheduled(model, kind, mesh, mine, layout)
    engine: Any = build(sch, "torch", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), precision=precision, **config)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    worst = {"loss": 0.0, "gradient": 0.0}
    for _ in range(2):
        loss = engine.train_batch(**mine)
        expected = reference(**batch).loss
        reference.zero_grad()
        expected.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), config.get("clip", float("inf")))
        found = sch.full_state("grad")
        for name, parameter in reference.named_parameters():
            assert found[name].device.type == device, f"the gradient of {name} is on {found[name].device}"
            apart = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
            worst["gradient"] = max(worst["gradient"], apart)
        sgd.step()
        worst["loss"] = max(worst["loss"], abs(loss.item() - expected.item()))
    with torch.no_grad():
        evaluated = reference.eval()(**batch).loss.item()
    worst["evaluation"] = abs(engine.eval_batch(**mine).item() - evaluated)
    return worst


def _check(path: Path, kind: str, layout: str, precision: str) -> None:
    shape = LAYOUTS[layout][0]
    ranks = shape[0] * shape[1] * shape[2]
    for worst in run_distributed(beside_reference, ranks, str(path / "store"), kind, layout, precision, timeout=240):
        limit = LIMITS[precision]
        assert worst["gradient"] < limit, worst
        assert max(worst["loss"], worst["evaluation"]) < limit, worst


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_layouts_train_as_the_model(kind: str, layout: str, tmp_path: Path) -> None:
    _check(tmp_path, kind, layout, "fp32")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["pp", "dp", "tp", "pp tp"])
def test_layouts_train_in_low_precision(layout: str, precision: str, tmp_path: Path) -> None:
    _check(tmp_path, "gpt2", layout, precision)
