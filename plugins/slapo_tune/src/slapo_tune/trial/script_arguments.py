"""Arguments of a training script: by name, and with the values of symbols in the places of their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class ScriptArguments(Mapping[str, Any]):
    """Arguments of a command line by name: ``["slapo", "--gpus", "8"]`` has ``args["gpus"] == "8"`` and ``"slapo" in args``.

    A flag's value is the text behind it or behind its ``=``. A flag without one, and an argument that belongs to no flag, is
    True. ``args["seq-len"]`` and ``args["seq_len"]`` are the same.

    Args:
        arguments: What stands behind the script's name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values = {_key(name): value for name, value in _parse_flags(arguments)}

    def __getitem__(self, name: str) -> Any:
        return self._values[_key(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ScriptArguments({self._values})"


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _parse_flags(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    flag = ""
    for argument in arguments:
        if _is_flag(argument):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else True
            flag = "" if equals else flag
        else:
            yield (flag, argument) if flag else (argument, True)
            flag = ""


def _is_flag(argument: str) -> bool:
    return re.match(r"--?[^\W\d]", argument) is not None  # not -1, and not a dash alone


def substitute(argument: str, values: Mapping[str, Any]) -> str:
    """Return an argument with the values of symbols in the places of their names.

    A name is replaced where it is the whole argument (``--batch-size batch_size``), all behind the ``=`` of a flag
    (``--batch-size=batch_size``), or stands in braces (``--sizes={batch_size},64``).
    """
    flag, equals, name = argument.partition("=")
    if argument in values:
        return str(values[argument])
    if _is_flag(flag) and equals and name in values:
        return f"{flag}={values[name]}"
    return re.sub(r"\{([^{}]+)\}", lambda match: str(values.get(match[1], match[0])), argument)


def uses_symbol(arguments: Sequence[str], name: str) -> bool:
    """Return whether any of the arguments has the place of a symbol in it."""
    return any(substitute(argument, {name: ""}) != argument for argument in arguments)
