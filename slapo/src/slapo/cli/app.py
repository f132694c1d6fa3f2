"""The ``slapo`` command: our subcommands and those of plugins."""

from __future__ import annotations

import sys

import typer

from slapo_core.errors import SlapoError
from slapo_core.registry import default_registry

from . import listing, train


def create_app() -> typer.Typer:
    """The command line with everything installed plugins add to it."""
    app = typer.Typer(
        name="slapo",
        help="Train large PyTorch models by schedule.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for commands in (train, listing):
        commands.register(app)
    default_registry().call_each("slapo_commands", app=app)
    return app


def main() -> None:
    """Run the command line; an error made on purpose is one sentence on stderr and exit status 2."""
    try:
        create_app()(prog_name="slapo")
    except SlapoError as error:
        print(f"slapo: {error}", file=sys.stderr)
        sys.exit(2)
