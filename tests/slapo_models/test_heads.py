"""Each class that Transformers has of a family, with or without a head, is served by the family's schedule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers

from slapo_models import apply_schedule
from tests.zoo.families import FAMILIES

PREFIXES = {
    "albert": "Albert",
    "bert": "Bert",
    "gpt2": "GPT2",
    "gpt_neo": "GPTNeo",
    "opt": "OPT",
    "roberta": "Roberta",
    "t5": "T5",
}
"""Key to how the names of the classes begin."""

HEADS = "Model|EncoderModel|LMHeadModel|DoubleHeadsModel|For[A-Za-z]+"
NAMES = dir(transformers)  # which takes Transformers half a second


@pytest.mark.parametrize(
    ("key", "name"),
    [(key, name) for key in PREFIXES for name in NAMES if re.fullmatch(PREFIXES[key] + f"({HEADS})", name)],
)
def test_every_class_is_served(key: str, name: str) -> None:
    model: Any = getattr(transformers, name)(FAMILIES[key].make_config())
    sch = apply_schedule(model, key, ckpt_ratio=1.0, pipeline_cuts=_cuts(model, key))
    stacks = {step.path.rpartition(".")[0] for step in sch.journal if ".checkpoint(" in str(step)}
    assert len(stacks) == (2 if key == "t5" and hasattr(model.base_model, "decoder") else 1)
    assert [str(step) for step in sch.journal if "cut_pipeline_stage" in str(step)]


def _cuts(model: Any, key: str) -> list[Any]:
    if key == "t5" and hasattr(model.base_model, "decoder"):
        return [[], []]
    return [1] if key == "albert" else [0]
