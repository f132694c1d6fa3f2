"""Cut a model and compare its program, run stage by stage, with the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import slapo_pipeline.plugin
import slapo_tracing.plugin
import slapo_training.plugin
from slapo_core import Program, Registry, Schedule, build_program, create_schedule


def cut(model: nn.Module, inputs: Any, *paths: str) -> Schedule:
    """A schedule whose stages end after ``paths``."""
    schedule = create_schedule(
        model, example_inputs=inputs, plugins=Registry([slapo_tracing.plugin, slapo_training.plugin, slapo_pipeline.plugin])
    )
    for path in paths:
        schedule[path].cut_pipeline_stage()
    return schedule


class Expected(NamedTuple):
    """Outputs, gradients and buffers of the unmodified model for one batch."""

    outputs: Any
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def expected_of(model: nn.Module, inputs: dict[str, Any]) -> Expected:
    """Run a copy of the model, and its backward."""
    before = copy.deepcopy(model)
    torch.manual_seed(1)
    outputs = before(**inputs)
    if any(parameter.requires_grad for parameter in before.parameters()):
        loss_of(outputs).backward()
    return Expected(outputs, _gradients(before), dict(before.named_buffers()))


def assert_same_as_model(
    model: nn.Module, inputs: dict[str, Any], *paths: str, tolerance: float = 1e-6, expected: Expected | None = None
) -> Program:
    """Outputs, every gradient and every buffer of the program equal the unmodified model's."""
    expected = expected or expected_of(model, inputs)
    program = build_program(cut(model, inputs, *paths))
    assert len(program.stages) == len(paths) + 1
    torch.manual_seed(1)
    found = program(**inputs)
    assert type(found) is type(expected.outputs)
    assert_same(found, expected.outputs, "outputs", tolerance)
    if expected.gradients:
        loss_of(found).backward()
        assert_same(_gradients(model), expected.gradients, "grad", tolerance)
    assert_same(dict(model.named_buffers()), expected.buffers, "buffers", tolerance)
    return program


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    named = dict(model.named_parameters())
    trained = any(parameter.requires_grad for parameter in named.values())
    return {name: parameter.grad for name, parameter in named.items()} if trained else {}


def loss_of(outputs: Any) -> torch.Tensor:
    """The number to differentiate."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def assert_same(found: Any, expected: Any, where: str, tolerance: float = 1e-6) -> None:
    """Equal in structure, and to ``tolerance`` in numbers."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}[{key!r}]", tolerance)
    elif isinstance(expected, (tuple, list)):
        assert type(found) is type(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where}[{index}]", tolerance)
    else:
        assert found == expected, where


def received(program: Program) -> list[list[tuple[int, ...]]]:
    """Shapes of what each stage but the first receives."""
    return [[boundary.shape for boundary in stage.inputs] for stage in program.stages[1:]]
