"""Parts of many families, each traced alone: the model computes what it did, whatever it is called with.

Attentions, MLPs, norms, layers and whatever else has a class of its own.
"""

from __future__ import annotations

import pytest

from slapo_core import create_schedule
from slapo_testing import run_distributed
from tests.slapo_tracing.model_parts import Part, Reference, assert_close, calls, parts_of, run
from tests.slapo_tracing.tracers.test_families import LONG, VARIATIONS
from tests.zoo.families import FAMILIES, Family

LACKING = {
    "attention": "convnext resnet",
    "layer": "squeezebert",  # its encoder calls what is inside of them
    "mlp": "albert bart biogpt blenderbot convnext ctrl led m2m_100 mamba marian mbart opt pegasus plbart poolformer resnet "
    "squeezebert whisper xglm",  # it is written in the layer
    "norm": "",
}
"""Families that have no module of a kind."""

OWN_FORWARD = {"led": {"LEDEncoder"}}
"""Classes whose own forward runs for some calls: with a mask it asks for values, whether any token is global."""

EACH = [pytest.param(name, marks=pytest.mark.slow if name in VARIATIONS | LONG else ()) for name in sorted(FAMILIES)]


def shallow(family: Family) -> Reference:
    """A model of one layer, and what it computes in the example and in a call that differs in all that it can."""
    other = "others" if family.inputs == "image" else "others, padding"
    batches, keys = calls(family, "example", other), [(True, "example"), (False, other)]
    return Reference(family.model(dropout=0.1, depth=None if family.name == "gpt_neo" else 1), batches, keys)


def one_of_each_kind(reference: Reference) -> dict[str, str]:
    """Kind and path."""
    found = parts_of(reference.model, next(iter(reference.batches.values())))
    return {kind: path for path, kind in reversed(found.items()) if kind != "other"}


def test_there_are_forty_families() -> None:
    assert len(FAMILIES.keys() - VARIATIONS - LONG) >= 40


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EACH)
def test_one_part_of_each_kind(name: str) -> None:
    reference = shallow(FAMILIES[name])
    kinds = one_of_each_kind(reference)
    assert {
        kind for kind, families in LACKING.items() if name.split(":")[0] in families.split()
    } == LACKING.keys() - kinds.keys()
    for path in kinds.values():
        part = Part(reference, path)
        part.check(times=1)
        assert not part.without_graph()
        part.undo()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_part(name: str) -> None:
    reference = Reference(FAMILIES[name].model(dropout=0.1), calls(FAMILIES[name]))
    for path in parts_of(reference.model, reference.batches["example"]):
        part = Part(reference, path)
        part.check()
        assert part.without_graph() <= OWN_FORWARD.get(name, set())
        part.undo()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral", "gemma2"])
def test_parts_after_use_kernels(name: str) -> None:
    reference = Reference(FAMILIES[name].model(), calls(FAMILIES[name]))
    for path in one_of_each_kind(reference).values():
        schedule = create_schedule(reference.model, example_inputs=reference.batches["example"])
        schedule.use_kernels()
        part = Part(reference, path, schedule)
        part.check(rtol=1e-4, atol=1e-5)
        assert not part.without_graph()
        part.undo()
        schedule.undo()


SPLIT = ("gpt2", "llama", "bert", "t5", "mixtral", "opt", "gemma2", "gpt_neox")


def split(rank: int, name: str) -> int:
    """Count the traced parts of a model over two ranks."""
    reference = Reference(FAMILIES[name].model(), calls(FAMILIES[name]))
    kinds = one_of_each_kind(reference)
    for path in kinds.values():
        model = FAMILIES[name].model()
        schedule = create_schedule(model, example_inputs=reference.batches["example"])
        schedule.tensor_parallel()
        part = Part(reference, path, schedule)
        for (training, call), expected in reference.expected.items():
            for _ in range(2):
                loss, _ = run(model.train(training), reference.batches[call])
                gradients = schedule.full_state("grad")  # a tied one under each of its names
                assert_close((loss, {key: gradients[key] for key in expected[1]}), expected, rtol=1e-4, atol=1e-5)
        assert not part.without_graph()
    return len(kinds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.multiproc
@pytest.mark.parametrize("name", SPLIT)
def test_parts_after_tensor_parallel(name: str) -> None:
    assert run_distributed(split, 2, name, timeout=400)[0] >= 3
