"""The command line of the tuners: ``slapo tune`` and ``python -m slapo.autotune.tune``."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from slapo_core import SlapoError

from .configuration import Configuration
from .search_space.symbol import TuneError
from .study.database import Database
from .trial.process import Interruption, script_program, signal_name
from .tuner import Results, Settings, Tuner

__all__ = ["main", "tune_script"]

TIMEOUT_SECONDS = 3600.0
FLAGS = ("--config", "--db", "--error-stop", "--timeout", "--help", "-h")

DESCRIPTION = """Run SCRIPT once for every configuration of a space and print the one with the highest throughput.

An argument that is the name of a symbol, as in `--batch-size batch_size`, gets the value of a trial; the environment has it as
SLAPO_TUNE_BATCH_SIZE, BATCH_SIZE and batch_size. SCRIPT prints its throughput as a line of JSON, {"throughput": 12.5}, or as
DeepSpeed or Megatron log it."""

EXIT_STATUS_HELP = """exit status: 0 if the whole space was searched; 1 if no trial gave a throughput, or --error-stop all ended
the run; 2 for invalid arguments; 128 plus the signal's number after Ctrl-C or another signal. The best configuration so far
is printed in any case."""


def main(arguments: Sequence[str] | None = None, program: str = "python -m slapo.autotune.tune") -> int:
    """Tune as the arguments say, by default those of the process, and return the exit status."""
    with Interruption() as interruption:
        try:
            settings, database = _settings(sys.argv[1:] if arguments is None else arguments, program)
            return _run(settings, database, interruption)
        except SlapoError as err:
            print(f"tune: {err}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            number = interruption.number or signal.SIGINT
            print(f"tune: interrupted by {signal_name(number)} before the first trial", file=sys.stderr)
            return 128 + number


def tune_script(command: Sequence[str], schedule: str, save: str = "", page: str = "", **settings: Any) -> int:
    """Search the fastest configuration of a script with the space of a schedule file, and return the exit status.

    Args:
        command: The script and its arguments.
        schedule: The schedule file.
        save: Path of a schedule file for the best, or ``""``.
        page: Path of the page, or ``""``.
        **settings: Further arguments of ``search_script``.
    """
    from .result_output import check_outputs, show_result  # noqa: PLC0415 - optuna is imported when it is used
    from .script_tuning import search_script  # noqa: PLC0415

    check_outputs(save, page)
    return show_result(search_script(command, schedule, **settings), save, page)


def _run(settings: Settings, database: Database, interruption: Interruption) -> int:
    tuner = Tuner(settings, database, interruption)
    try:
        tuner.run()
    except KeyboardInterrupt:
        interruption.number = interruption.number or signal.SIGINT
    finally:
        _print_best(tuner.results)
    return _status(tuner.results, interruption)


def _print_best(results: Results) -> None:
    if (best := results.best) is not None:
        name, throughput = best
        text = f"best configuration: {name}, {throughput:.5g} samples/s"
        encoding = sys.stdout.encoding or "utf-8"  # one without the letters of a name gets escapes, as for errors
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _status(results: Results, interruption: Interruption) -> int:
    done = f"{len(results.records)} of {results.total} trials"
    if interruption.number is not None:
        name = signal_name(interruption.number)
        print(f"tune: interrupted by {name} after {done}; with --db the same command goes on there", file=sys.stderr)
        return 128 + interruption.number
    if results.stopped:
        print(f"tune: ended by --error-stop all after {done}", file=sys.stderr)
        return 1
    if results.best is None:
        print(f"tune: no throughput after {done}, so there is no best configuration", file=sys.stderr)
        return 1
    return 0


def _settings(arguments: Sequence[str], program: str) -> tuple[Settings, Database]:
    """Return what the arguments say, with everything looked at that can be before the first trial."""
    given = _parse(arguments, program)
    database = Database(given.db)
    database.load()
    if given.db is not None and not os.access(Path(os.path.realpath(given.db)).parent, os.W_OK):
        raise TuneError(f"--db {given.db}: its folder is not there, or cannot be written to; make it, or choose another")
    settings = Settings(
        program=script_program(given.script),
        script=given.script,
        arguments=tuple(given.arguments),
        configuration=Configuration.load(given.config),
        timeout=given.timeout or None,
        error_stop=given.error_stop,
    )
    return settings, database


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TuneError(f"{message}; see {self.prog} --help")


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = _Parser(prog=program, description=DESCRIPTION, epilog=EXIT_STATUS_HELP, allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="Python file with get_bs_range or update_space")
    parser.add_argument("--db", metavar="FILE", help="JSON file of results, made if need be; what is in it is not run again")
    parser.add_argument(
        "--error-stop",
        choices=["none", "symbol", "all"],
        default="none",
        help="after a trial that failed: go on, leave out the later values of the innermost symbol, or end (default: none)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        metavar="S",
        help=f"seconds after which a trial is killed with all that it started; 0: never (default: {TIMEOUT_SECONDS:g})",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script, or a program such as torchrun")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    own = _own_length(arguments, program)
    given = parser.parse_args(arguments[: own + 1])
    given.arguments = arguments[own + 1 :]
    return given


def _own_length(arguments: Sequence[str], program: str) -> int:
    """Return how many arguments stand before SCRIPT, all of them the tuner's own flags."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        flag, equals, _ = arguments[place].partition("=")
        if flag not in FLAGS:
            near = difflib.get_close_matches(flag, FLAGS, n=1)
            hint = f", did you mean {near[0]}" if near else ""
            raise TuneError(f"unknown flag {flag}{hint}; the script's own flags stand behind SCRIPT, see {program} --help")
        place += 1 if equals or flag in ("-h", "--help") else 2
    return place


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
