"""Modules that people write by hand, on two ranks that share one GPU: graphs have their constants on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from slapo_core import build, create_schedule
from slapo_testing import run_distributed
from tests.slapo_sharding.handwritten import SPLIT
from tests.slapo_sharding.planning.local_sizes.test_handwritten import net

from .models import DEVICE
from .staged import join

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
BUNDLES = 8


def beside_whole(rank: int, store: str, kinds: list[str], device: str) -> dict[str, str]:
    """Compare outputs and all gradients of a batch and of a longer one; return what is wrong of which kind."""
    join(rank, 2, store)
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.set_default_device(device)  # some make their masks without a device
    torch.backends.cuda.matmul.allow_tf32 = False
    mesh, wrong = init_device_mesh(device, (2,), mesh_dim_names=("tp",)), {}
    for kind in kinds:
        try:
            expected, model = net(kind), net(kind)
            model.load_state_dict(expected.state_dict())
            schedule = create_schedule(model, mesh=mesh, example_inputs=(torch.zeros(2, 8, dtype=torch.long),))
            schedule.tensor_parallel()
            build(schedule)
            for length in (8, 12):
                tokens = torch.randint(64, (2, length), generator=torch.Generator(device).manual_seed(length))
                outputs = [each(tokens) for each in (model, expected)]
                torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
                for each, output in zip((model, expected), outputs, strict=True):
                    each.zero_grad()
                    output.square().mean().backward()
                found = schedule.full_state("grad")
                for name, parameter in expected.named_parameters():
                    assert found[name].device.type == device, f"the gradient of {name} is on {found[name].device}"
                    torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-3)
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
    torch.set_default_device(None)
    return wrong


@pytest.mark.parametrize("bundle", range(BUNDLES))
def test_they_are_split_and_right(bundle: int, tmp_path: Path) -> None:
    kinds = list(SPLIT)[bundle::BUNDLES]
    for wrong in run_distributed(beside_whole, 2, str(tmp_path / "store"), kinds, DEVICE, timeout=280):
        assert wrong == {}
