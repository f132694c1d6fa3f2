"""Validation of DeepSpeed's configuration before the engine starts; a key that DeepSpeed ignores or refuses is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from slapo_core import BuildError, UnknownNameError
from slapo_training.engines import without_warnings

from ..process_state._deepspeed_private import config_models, read_config
from .config_optimizer import check_made


def check_config(config: Mapping[str, Any], given: Mapping[str, Any], replicas: int) -> None:
    """Let DeepSpeed read a configuration, and check that it reads every key that the user gave.

    DeepSpeed ignores an unknown key, for example ``zero_optimisation``, and would train with its defaults. Batch sizes depend
    on the number of data-parallel ``replicas``.

    Raises:
        BuildError: DeepSpeed never reads a given key, or refuses the configuration, or cannot make its optimizer.
    """
    from pydantic import ValidationError  # noqa: PLC0415  comes with DeepSpeed

    check_made(config)
    _check_pipeline(given)
    asked = _ReadTracker(config)
    try:
        with without_warnings():
            # DeepSpeed asks an ``mpu`` for the number of replicas when it reads batch sizes
            read_config(asked, SimpleNamespace(get_data_parallel_world_size=lambda: replicas))
    except ValidationError as err:
        raise BuildError(f"DeepSpeed refuses its config: {'; '.join(_refusals(err, given))}") from err
    except (AssertionError, TypeError, ValueError, KeyError) as err:
        raise BuildError(f"DeepSpeed refuses its config: {str(err) or type(err).__name__}") from err
    for section, key, known in asked.unread():
        if _has_path(given, [section, key] if section else [key]):
            whose = f"{section} in DeepSpeed's config" if section else "DeepSpeed's config"
            raise BuildError(str(UnknownNameError.of("key", key, known, whose=whose)))


_PIPELINE = ("activation_checkpoint_interval", "grad_partitioned", "pipe_partitioned", "use_reentrant")


def _check_pipeline(given: Mapping[str, Any]) -> None:
    """Refuse unknown keys: DeepSpeed iterates over the whole section, so unread keys do not show, but uses only these."""
    for key in given.get("pipeline", {}):
        if key not in _PIPELINE:
            notes = ["the schedule says what the stages are"]
            raise BuildError(str(UnknownNameError.of("key", key, _PIPELINE, notes, "pipeline in DeepSpeed's config")))


class _ReadTracker(dict[str, Any]):
    """Dict that records which keys were read, in nested dicts too; iterating over a dict reads all of its keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({key: _ReadTracker(value) if isinstance(value, Mapping) else value for key, value in values.items()})
        self._asked: set[str] = set()

    def unread(self) -> Iterator[tuple[str, str, set[str]]]:
        """Yield each unread key: its section, the key, and the keys of the section that were read.

        Deeper sections are not checked: they are arguments, for example of an optimizer's class, which checks them.
        """
        for section, value in super().items():
            if section not in self._asked:
                yield "", section, self._asked
            elif isinstance(value, _ReadTracker) and value._asked:  # otherwise the section was read as a whole
                for key in dict.keys(value) - value._asked:
                    yield section, key, value._asked

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._asked.update(super().keys())
        return super().__iter__()

    def items(self) -> Any:
        self._asked.update(super().keys())
        return super().items()

    def keys(self) -> Any:
        return self  # so that a membership test reads the key

    def __copy__(self) -> _ReadTracker:
        return self

    def __deepcopy__(self, memo: Any) -> _ReadTracker:
        return self


def _refusals(error: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield pydantic's findings, each with its path in the configuration."""
    for found in error.errors():
        place = [str(key) for key in found["loc"]]
        section = [key for key, value in given.items() if isinstance(value, Mapping) and _has_path(value, place)]
        sentence = f"{'.'.join([*section[:1], *place])}: {found['msg']}"
        fields = [name for model in config_models() if model.__name__ == error.title for name in _names(model)]
        near = difflib.get_close_matches(place[-1], fields, n=1) if found["type"] == "extra_forbidden" else []
        yield f"{sentence}, did you mean {near[0]!r}?" if near else sentence


def _names(model: Any) -> Iterator[str]:
    """Yield the keys of a section of DeepSpeed's config, and of the sections in it."""
    for name, field in model.model_fields.items():
        yield name
        for kind in getattr(field.annotation, "__args__", (field.annotation,)):
            if hasattr(kind, "model_fields"):
                yield from kind.model_fields


def _has_path(values: Any, path: list[str]) -> bool:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
    return True
