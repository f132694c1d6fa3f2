"""Pipeline stages on CUDA, run one after the other in one process, against the unmodified model."""

from __future__ import annotations

import copy

import pytest
import torch

from slapo_core import build_program, create_schedule, init_empty_weights, materialize

from .models import DEVICE, KINDS, PATHS, batch_of

pytestmark = pytest.mark.gpu

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Share of its norm by which a gradient may differ from the unmodified model's."""


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_model_s_loss_and_gradients(kind: str, dtype: torch.dtype, checkpointed: bool) -> None:
    plain = KINDS[kind]().to(DEVICE, dtype)
    model, batch = copy.deepcopy(plain), batch_of(4)
    sch = create_schedule(model, example_inputs=batch)
    for number in range(3):
        if checkpointed:
            sch[f"{PATHS[kind]}.{number}"].checkpoint()
        sch[f"{PATHS[kind]}.{number}"].cut_pipeline_stage()
    program = build_program(sch)
    assert len(program.stages) == 4
    found, expected = program(**batch).loss, plain(**batch).loss
    torch.testing.assert_close(found, expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])
    found.backward()
    expected.backward()
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        apart = (own.grad - other.grad).double().norm() / other.grad.double().norm()
        assert apart < LIMITS[dtype], f"{name}: {apart:.1e}"


def test_a_model_without_weights_is_traced_where_its_inputs_are() -> None:
    """Its masks are buffers, on the CPU until the weights are made."""
    with init_empty_weights():
        plain, model = KINDS["gpt_neo"](), KINDS["gpt_neo"]()
    batch = batch_of(4)
    create_schedule(plain)
    materialize(plain, device=DEVICE)
    sch = create_schedule(model, example_inputs=batch)
    sch[f"{PATHS['gpt_neo']}.1"].cut_pipeline_stage()
    program = build_program(sch)
    materialize(program.module, [stage.module for stage in program.stages], device=DEVICE)
    assert {buffer.device.type for stage in program.stages for buffer in stage.module.buffers()} == {DEVICE}
    torch.testing.assert_close(program(**batch).loss, plain(**batch).loss)


def test_stages_cut_on_a_cpu_run_on_a_gpu() -> None:
    """Positions and masks that the graph creates are on the inputs' device."""
    plain, batch = KINDS["gpt2"](), batch_of(4)
    model = copy.deepcopy(plain)
    sch = create_schedule(model, example_inputs={name: tensor.cpu() for name, tensor in batch.items()})
    sch[f"{PATHS['gpt2']}.1"].cut_pipeline_stage()
    program = build_program(sch)
    model.to(DEVICE)
    for stage in program.stages:
        stage.module.to(DEVICE)
    torch.testing.assert_close(program(**batch).loss, plain.to(DEVICE)(**batch).loss)
