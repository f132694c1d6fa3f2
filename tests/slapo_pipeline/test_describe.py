"""A partition as text."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from slapo_core import BuildError, Program, Stage, build_program
from slapo_pipeline.describe import describe, stage_code

from .stage_comparison import cut
from .toy_models import WIDTH, Regions, Skips

X = {"x": torch.randn(4, WIDTH), "labels": torch.randn(4, 1)}

SKIPS = """\
Skips: 3 stages, 369 parameters, 1.4 KiB

stage 0
  runs            a
  holds           88 parameters, 352 B
  from the batch  x
  sends           a [4, 8] float32 128 B
  per micro-batch 128 B forward, 128 B backward

stage 1
  runs            b, c
  holds           176 parameters, 704 B
  receives        a [4, 8] float32 128 B
  sends           a [4, 8] float32 128 B, c [4, 8] float32 128 B
  per micro-batch 256 B forward, 256 B backward

stage 2
  runs            d, head
  holds           105 parameters, 420 B
  receives        a [4, 8] float32 128 B, c [4, 8] float32 128 B
  from the batch  labels
  returns         loss, out"""


def test_the_stages_of_a_program_and_of_a_schedule() -> None:
    schedule = cut(Skips(), X, "a", "c")
    assert describe(build_program(schedule)) == SKIPS
    assert describe(schedule["head"]) == SKIPS


def test_neighbours_in_a_list_stand_together() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)), nn.Tanh())
    text = describe(cut(model, {"input": torch.randn(1, 2)}, "1", "2"))
    assert [line.split()[1:] for line in text.splitlines() if "runs" in line] == [["0-1"], ["2"], ["3-6"]]


def test_what_is_frozen_and_what_has_no_gradient() -> None:
    text = describe(cut(Regions(), {"x": torch.randn(4, WIDTH)}, "norm"))
    assert "holds           160 parameters, 640 B, 64 frozen\n" in text
    assert "sigmoid [4, 8] float32 128 B, no gradient" in text


def test_ties_stand_with_both_stages() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    first, last = describe(cut(model, {"input": torch.randn(1, 2)}, "0")).split("\n\n")[1:]
    assert first.endswith("  shares          0.weight = 2.weight")
    assert last.endswith("  shares          0.weight = 2.weight")


class Reads(nn.Module):
    """Indexes, unpacks, and reads a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = torch.chunk(self.layers[0](x)[..., :4], 2, dim=-1)
        return F.gelu(self.layers[1](x) * self.scale).sum() + first[:, None, ::2].sum()


def test_the_code_of_a_stage() -> None:
    program = build_program(cut(Reads(), {"x": X["x"]}, "layers.0"))
    assert stage_code(program, 0) == (
        "def stage_0(x):\n    layers_0 = self.layers[0](x)  # [4, 8] float32\n    return (layers_0,)"
    )
    code = stage_code(program, 1)
    assert code.startswith("def stage_1(layers_0, x):\n    getitem = layers_0[..., :4]  # [4, 4] float32\n")
    assert "chunk = torch.chunk(getitem, 2, dim=-1)\n" in code
    assert "mul = layers_1.mul(self.scale)" in code
    assert "gelu = F.gelu(mul)" in code
    assert "[:, None, ::2]  # [4, 1, 1] float32\n" in code


def test_the_code_of_all_stages_comes_with_them() -> None:
    program = build_program(cut(Skips(), X, "a", "c"))
    text = describe(program, code=True)
    for index in range(3):
        assert all(f"  {line}" in text.splitlines() for line in stage_code(program, index).splitlines())
    assert "    return {'loss': mse_loss, 'out': head, 'nothing': None}" in text


def test_a_stage_that_is_no_graph() -> None:
    program = Program(model := nn.Linear(2, 2), (Stage(0, model),))
    assert describe(program, code=True).splitlines() == [
        "Linear: 1 stage, 6 parameters, 24 B",
        "",
        "stage 0",
        "  runs            the whole model",
        "  holds           6 parameters, 24 B",
        "  returns         output",
        "",
        "  def stage_0(...):",
        "      return Linear.forward(...)  # not taken apart",
    ]


def test_no_such_stage() -> None:
    with pytest.raises(BuildError, match="no stage 3; the program has stages 0 to 2"):
        stage_code(build_program(cut(Skips(), X, "a", "c")), 3)


def test_neither_schedule_nor_program() -> None:
    with pytest.raises(BuildError, match="cannot describe a Linear; give a Program or a schedule"):
        describe(nn.Linear(2, 2))  # type: ignore[arg-type]
