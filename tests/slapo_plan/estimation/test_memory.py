"""Estimated memory and collectives against steps on real ranks; both come from one start of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slapo_testing import run_distributed

from .layouts import LAYOUTS, estimated, measure, totals
from .user_models import USER_MODELS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it

FAST = ["ddp", "fsdp", "zbv"]
TWO_RANKS = [name for name, layout in LAYOUTS.items() if layout.ranks == 2]
FOUR_RANKS = [name for name, layout in LAYOUTS.items() if layout.ranks == 4]
SLOW = [
    *(("gpt2", name) for name in TWO_RANKS if name not in FAST),
    *(("llama", name) for name in ("tp", "fsdp", "zbv", "zero-bubble", "1f1b")),
    *(("t5", name) for name in ("tp", "ddp", "fsdp", "1f1b")),
    *((model, name) for model in ("bert", "vit") for name in ("tp", "ddp", "checkpoints")),
    *((model, name) for model in ("conv", "mixtral") for name in ("ddp", "fsdp")),
    ("bert", "fsdp"),
    *(("perceptron", name) for name in ("ddp", "fsdp")),
    ("llama", "dualpipev"),
    *(("lora", name) for name in ("ddp", "fsdp", "zero-bubble", "ddp-fp16")),
]


def check(cases: Sequence[tuple[str, str]], ranks: int) -> None:
    """Compare memory within 1 % and collectives exactly, on the first of equal ranks of each stage."""
    measured = run_distributed(measure, ranks, cases, timeout=300)
    for index, (name, key) in enumerate(cases):
        layout, found = LAYOUTS[key], estimated(name, LAYOUTS[key])
        assert not found.problems
        for rank in range(layout.pp):
            held, peak, collectives = measured[rank * layout.dp * layout.tp][index]
            memory = found.ranks[rank].memory
            assert memory.held == pytest.approx(held, rel=0.01), (name, key, rank)
            assert memory.peak == pytest.approx(peak, rel=0.01), (name, key, rank, memory.when)
            assert totals(found, rank) == collectives, (name, key, rank)


@pytest.mark.multiproc
def test_two_ranks() -> None:
    check([("gpt2", name) for name in FAST], 2)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("model", [*dict.fromkeys(model for model, _ in SLOW)])
def test_models_on_two_ranks(model: str) -> None:
    check([case for case in SLOW if case[0] == model], 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "conv", "mixtral"])
def test_one_rank(model: str) -> None:
    check([(model, "one"), (model, "fp16")], 1)


def test_models_of_users() -> None:
    check([(name, "one") for name in ("nano", "deep", "experts", "cached")], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", USER_MODELS)
def test_models_of_users_on_one_rank(name: str) -> None:
    check([(name, layout) for layout in ("one", "one-microbatch")], 1)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", USER_MODELS)
def test_models_of_users_on_two_ranks(name: str) -> None:
    check([(name, layout) for layout in ("ddp", "fsdp")], 2)


@pytest.mark.slow
@pytest.mark.multiproc
def test_pipelines_of_models_of_users() -> None:
    check([(name, "1f1b") for name in ("nano", "lstm", "gru", "frozen", "images", "siamese")], 2)


@pytest.mark.slow
@pytest.mark.multiproc
def test_four_ranks() -> None:
    check([("gpt2", name) for name in FOUR_RANKS], 4)
