"""Output of a tuning on the command line: the best on stdout, files, and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo_core import SlapoError

from .search_space.symbol import TuneError
from .study.trial_result import REFUSED
from .tune_result import TuneResult


def check_outputs(save: str = "", page: str = "") -> None:
    """Refuse files of a result that cannot be written, before the first trial.

    Args:
        save: Path of a schedule file for the best, or ``""``.
        page: Path of the page, or ``""``.

    Raises:
        TuneError: the schedule file does not end in ``.py``, or a folder is not there or cannot be written to.
    """
    if save and not save.endswith(".py"):
        raise TuneError(f"--save {save}: a schedule file is Python; end its name in .py")
    for flag, name in (("--save", save), ("--report", page)):
        if name and (Path(name).is_dir() or not os.access(Path(os.path.realpath(name)).parent, os.W_OK)):
            raise TuneError(f"{flag} {name}: its folder is not there, or cannot be written to; choose another file")


def show_result(result: TuneResult, save: str = "", page: str = "", model: Mapping[str, Any] | None = None) -> int:
    """Print the best configuration, write the files that were asked for, and return the exit status.

    Args:
        result: The result.
        save: Path of a schedule file for the best, or ``""``.
        page: Path of the page, or ``""``.
        model: Flags of ``slapo train`` for the model and its batch, which the schedule file brings along.
    """
    status = 0 if result.best is not None else 1
    if result.best is not None:
        text = f"best configuration: {result.best}"
        encoding = sys.stdout.encoding or "utf-8"  # one without the letters of a name gets escapes, as for errors
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    elif not result.interrupted:
        counted = sum(each.state != REFUSED for each in result.trials)
        last = f", the last failure: {result.failures[-1].message}" if result.failures else ""
        print(f"tune: no throughput after {counted} trials{last}", file=sys.stderr)
    try:
        if save and result.best is not None:
            result.save(save, model)
            print(f"tune: the best schedule is {Path(save)}", file=sys.stderr)
        if page:
            result.report(page)
    except SlapoError as err:
        print(f"tune: {err}", file=sys.stderr)
        status = 2
    return 128 + result.interrupted if result.interrupted else status
