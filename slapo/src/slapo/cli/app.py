"""The ``slapo`` command: our subcommands and those of plugins."""

from __future__ import annotations

from ..launch.signals import exit_immediately, signal_handler

with signal_handler(exit_immediately):
    import logging
    import sys
    from collections.abc import Iterator
    from contextlib import ExitStack, contextmanager
    from typing import Annotated

    import typer

    from slapo_core import SlapoError, default_registry, get_logger

    from ..launch.errors import InterruptedRunError, RankError
    from ..run_data.versions import versions
    from . import listing, plan, train, tune, verify

BUILTIN_COMMANDS = ("train", "verify", "plan", *listing.NAMES)
"""The commands that have nothing to clean up until they say so; a plugin's get Ctrl-C as Python programs do."""


def create_app() -> typer.Typer:
    """The command line with everything installed plugins add to it."""
    app = typer.Typer(
        name="slapo",
        help="Train large PyTorch models by schedule.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    app.command(context_settings={"allow_interspersed_args": False})(tune.tune)  # a script's flags are its own
    for command in (train.train, verify.verify, plan.plan, listing.primitives, listing.dialects, listing.plugins):
        app.command()(command)
    default_registry().call_each("slapo_commands", app=app)
    return app


def main() -> None:
    """Run the command line; an error made on purpose is one sentence on stderr and exit status 2.

    The error of a rank, or of a signal, has the exit status of the run.
    """
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    with ExitStack() as signals:
        signals.enter_context(signal_handler(exit_immediately))
        try:
            if command in listing.NAMES:
                with _without_failures():
                    default_registry()
            app = create_app()
            if command not in BUILTIN_COMMANDS:
                signals.close()
            app(prog_name="slapo")
        except (RankError, InterruptedRunError) as error:
            print(f"{error.traceback}slapo: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except SlapoError as error:
            print(f"slapo: {error}", file=sys.stderr)
            sys.exit(2)


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print what is installed, and exit.", is_eager=True, callback=_print_versions)
    ] = False,
) -> None:
    """Train large PyTorch models by schedule."""


def _print_versions(asked: bool) -> None:
    if asked:
        for name, version in versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@contextmanager
def _without_failures() -> Iterator[None]:
    """Leave out the warnings about plugins that did not load, for a command that lists them itself."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger = get_logger()
    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
    failures = {record.failure for record in default_registry().records}
    for record in held:
        if record.getMessage() not in failures:
            logger.handle(record)
