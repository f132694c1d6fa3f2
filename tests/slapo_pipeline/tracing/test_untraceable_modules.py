"""Modules of torch that a cut cannot do with, and what to do instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from slapo_core import BuildError, TraceError, build_program

from ..stage_comparison import assert_same_as_model, cut


class Packed(nn.Module):
    """Runs an LSTM on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.a(x), [3, 2], batch_first=True)
        out, _ = self.lstm(packed)
        return pad_packed_sequence(out, batch_first=True)[0].sum()


class Around(nn.Module):
    """Keeps it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.packed = nn.Linear(4, 4), Packed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(self.first(x))


def test_a_packed_sequence_in_a_module_that_is_taken_apart_is_refused() -> None:
    schedule = cut(Packed(), {"x": torch.randn(2, 3, 4)}, "a")
    match = r"Packed: the forward makes a PackedSequence, which a graph cannot make anew.*test_untraceable_modules\.py:\d+"
    with pytest.raises(TraceError, match=match):
        build_program(schedule)


def test_a_packed_sequence_inside_a_whole_module_is_the_models() -> None:
    assert_same_as_model(Around(), {"x": torch.randn(2, 3, 4)}, "first")


def test_a_lazy_module_has_to_run_first() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)), torch.randn(2, 4)
    with pytest.raises(BuildError, match=r"'1\.weight' has no shape before the first call; run the model once"):
        build_program(cut(model, {"input": x}, "0"))
    model(x)
    program = build_program(cut(model, {"input": x}, "0"))
    torch.testing.assert_close(program(input=x), model(x))
