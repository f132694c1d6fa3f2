"""The classes that come apart, as a table: each is compared with the unmodified model, which takes some minutes.

python -m tests.slapo_pipeline.family_table
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Sequence

from slapo_core.build import build_program
from slapo_core.errors import TraceError

from .families import CLASSES, REFUSED, places, small
from .staged import assert_same_as_model, cut

ENDS = {
    "ForCausalLM": "causal",
    "ForMaskedLM": "masked",
    "ForConditionalGeneration": "sequence to sequence",
    "ForImageClassification": "images",
    "ForSequenceClassification": "sound",
}


def main(classes: Sequence[str]) -> None:
    """Print a table of these, and one of those that are refused."""
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = {}
    for name in sorted(classes, key=str.lower):
        model, batch = small(name)
        end = next((end for end in ENDS if type(model).__name__.endswith(end)), "")
        for stages in (2, 4):
            assert_same_as_model(copy.deepcopy(model), batch, *places(model, batch, stages), tolerance=1e-5)
        names = found.setdefault(end, [])
        if (short := type(model).__name__.removesuffix(end)) not in names:
            names.append(short)
    print("| | classes | in 2 and in 4 stages, train mode: outputs, loss and all gradients to 1e-5 |\n|---|---|---|")
    for end, what in {**ENDS, "": "others"}.items():
        names = found.get(end, [])
        print(f"| {what}{f' (`…{end}`)' if end else ''} | {len(names)} | {', '.join(names)} |")
    print("\n| refused | why | message |\n|---|---|---|")
    for name in sorted(REFUSED):
        print(f"| {name} | {REFUSED[name].why} | {_message(name)} |")


def _message(name: str) -> str:
    model, batch = small(name)
    try:
        build_program(cut(model, batch, *places(model, batch, 2)))
    except TraceError as error:
        return re.sub(r"\(\S*/", "(", str(error)).removeprefix(f"{name.split(':')[0]}: ")
    raise AssertionError(f"{name} comes apart")


if __name__ == "__main__":
    main(sys.argv[1:] or CLASSES)
