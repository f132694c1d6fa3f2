"""Checks of one kind, for pytest one at a time, or all at once; those of primitives and dialects."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slapo_core import SlapoError

from ..workers.job_transport import FunctionRef, unpickle
from ..workers.pool import DistributedError, run_distributed
from .engine_checks import promises as of_dialect
from .examples.case import Case, ConformanceError, registry_of
from .examples.examples import EngineExample, Example, KernelExample, RuleExample
from .examples.validation import check_examples_list
from .numeric_checks import precision
from .numeric_checks.composition import COMPOSITION_CHECKS
from .numeric_checks.numerics import means, numerics
from .registration import check_documented, check_has_examples, check_lazy_import, check_registered
from .state_checks.hooks import hooks
from .state_checks.journal_replay import journal
from .state_checks.process_state import process
from .state_checks.refusals import refusals
from .state_checks.transactions import check_rollback, check_undo
from .state_checks.unchanged_state import check_deepcopy, contracts

PRIMITIVE_CHECKS: dict[str, Callable[[Case], None]] = {
    "process": process,  # first, as what a step sets it sets once
    "numerics": numerics,
    "autocast": precision.autocast,
    "bfloat16": precision.bfloat16,
    "means": means,
    "refusals": refusals,
    "transactional": check_rollback,
    "undo": check_undo,
    "journal": journal,
    "contracts": contracts,
    "hooks": hooks,
    "deepcopy": check_deepcopy,
    **COMPOSITION_CHECKS,
}
"""Checks that run on each example of a primitive."""

CHECKS_IN_BOTH_MODES = {"numerics", "journal", "deepcopy", *COMPOSITION_CHECKS}
"""Checks that compare numbers, in evaluation and in training mode."""

TIMEOUT = 180.0
"""Seconds for one check on several processes."""


@dataclass(frozen=True)
class Check:
    """One check. Call it to run it.

    Args:
        owner: Name of the primitive, dialect, kernel or sharding rule.
        name: Name of the check.
        example: Its example; None for checks of the registration.
        run: Function that raises ``ConformanceError``.
    """

    owner: str
    name: str
    example: Example | EngineExample | KernelExample | RuleExample | None
    run: Callable[[], object]

    def __call__(self) -> None:
        """Run the check.

        Raises:
            ConformanceError: one sentence with the check, the primitive and the example.
        """
        try:
            self.run()
        except DistributedError as error:
            ours = f"{ConformanceError.__module__}.{ConformanceError.__qualname__}: "
            headline = str(error).partition("\n")[0]
            more = "" if ours in headline else f"\n{error.traceback}"
            raise ConformanceError(f"{self}: {headline.replace(ours, '')}{more}") from error
        except ConformanceError as error:
            raise ConformanceError(f"{self}: {error}") from error.__cause__
        except Exception as error:
            kind = "" if isinstance(error, SlapoError) else f"{type(error).__name__}: "
            first_line = str(error).strip().partition("\n")[0]
            raise ConformanceError(f"{self}: {kind}{first_line}") from error

    def __str__(self) -> str:
        return f"{self.owner}, {self.name}" + (f", {self.example}" if self.example is not None else "")


def primitive_checks(name: str, examples: Iterable[Example]) -> list[Check]:
    """Return the checks of a primitive, for ``pytest.mark.parametrize("check", primitive_checks(...), ids=str)``.

    Args:
        name: Name of the primitive.
        examples: Calls of the primitive.
    """
    examples = check_examples_list("primitive", name, examples, Example)
    checks = _registration_checks("primitive", name, examples)
    for example in examples if len(checks) > 1 else ():
        for check in [check for check in PRIMITIVE_CHECKS if check != "means" or example.numerics == "distribution"]:
            checks.append(Check(name, check, example, partial(_run_on_example, check, name, example)))
    return checks


def check_primitive(name: str, examples: Iterable[Example]) -> None:
    """Check that a primitive keeps its contracts.

    Args:
        name: Name of the primitive.
        examples: Calls of the primitive: at least one, and one with ``refused`` if the primitive takes arguments.

    Raises:
        ConformanceError: one sentence for each check that failed.
    """
    run_all(primitive_checks(name, examples))


def dialect_checks(name: str, examples: Iterable[EngineExample]) -> list[Check]:
    """Return the checks of a dialect, for ``pytest.mark.parametrize``. Each starts processes, since an engine belongs to
    one.

    Args:
        name: Name of the target.
        examples: Models that it trains.
    """
    examples = check_examples_list("dialect", name, examples, EngineExample)
    checks = _registration_checks("dialect", name, examples)
    for example in examples if len(checks) > 1 else ():
        for check in of_dialect.CHECKS:
            checks.append(Check(name, check, example, partial(_run_engine, check, name, example)))
    return checks


def check_dialect(name: str, examples: Iterable[EngineExample]) -> None:
    """Check that a dialect keeps its contracts.

    Args:
        name: Name of the target.
        examples: Models that it trains: at least one, with options that are refused.

    Raises:
        ConformanceError: one sentence for each check that failed.
    """
    run_all(dialect_checks(name, examples))


def run_all(checks: Iterable[Check]) -> None:
    """Run the checks, and raise all failures as one error."""
    failed = []
    for check in checks:
        try:
            check()
        except ConformanceError as error:
            failed.append(error)
    if failed:
        raise ConformanceError("\n".join(map(str, failed)))


def _registration_checks(kind: str, name: str, examples: Sequence[Any]) -> list[Check]:
    plugins = examples[0].plugins if examples else ()

    def bind_check(check: Callable[..., None], *more: Any) -> Callable[[], None]:
        return lambda: check(registry_of(plugins), kind, name, *more)

    known = Check(name, "registered", None, bind_check(check_registered))
    try:
        registry_of(plugins).get(kind, name)
    except Exception:  # of which that check tells, and there is nothing to run the others on
        return [known]
    return [
        known,
        Check(name, "documented", None, bind_check(check_documented)),
        Check(name, "lazy", None, bind_check(check_lazy_import)),
        Check(name, "examples", None, bind_check(check_has_examples, examples)),
    ]


def _run_on_example(check: str, name: str, example: Example) -> None:
    if example.ranks == 1:
        _run_here(check, name, example)
    else:
        on_ranks(_run_here, example.ranks, example.model, check, name, example)


def _run_engine(check: str, name: str, example: EngineExample) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(of_dialect.on_rank, example.ranks, example.model, check, name, example, folder)


def on_ranks(fn: Callable[..., None], ranks: int, model: Callable[..., Any], *args: Any) -> None:
    """Run ``fn(*args)`` on several processes, which first load the file that defines ``model``: args may refer to it."""
    run_distributed(_run_payload, ranks, FunctionRef.of(model), FunctionRef.of(fn), pickle.dumps(args), timeout=TIMEOUT)


def _run_payload(rank: int, author: FunctionRef, fn: FunctionRef, payload: bytes) -> None:
    author.load()
    fn.load()(*unpickle(payload))


def _run_here(check: str, name: str, example: Example) -> None:
    modes = Case(name, example).modes if check in CHECKS_IN_BOTH_MODES else (True,)
    for training in modes:
        PRIMITIVE_CHECKS[check](Case(name, example, training))
