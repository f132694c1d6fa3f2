"""Options of this dialect's engine, and the configuration that is passed to DeepSpeed."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from slapo_core import BuildError
from slapo_training.options import DTYPES, EngineOptions, is_lr_scheduler

from .config_optimizer import check_section, with_torch_adam

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class DeepSpeedOptions(EngineOptions):
    """The arguments of ``build`` for target ``"deepspeed"``.

    Args:
        config: DeepSpeed's own configuration, as a dict or the path of a JSON file; DeepSpeed reads and checks it. Gradient
            accumulation, clipping and precision may be set here or with ``microbatches``, ``clip`` and ``precision``; if both
            are set, they have to agree.
    """

    target: ClassVar[str] = "deepspeed"

    config: Mapping[str, Any] | str | PathLike[str] | None = None

    def validate(self) -> None:
        super().validate()
        if self.precision not in DTYPES:
            raise BuildError(f"precision is {self.precision!r}; give one of {', '.join(DTYPES)}")
        given = self.given
        if self.optimizer is not None and "optimizer" in given:
            raise BuildError("optimizer= and the optimizer in DeepSpeed's config are two; give one of them")
        if self.lr_scheduler is not None and "scheduler" in given:
            raise BuildError("lr_scheduler= and the scheduler in DeepSpeed's config are two; give one of them")
        for name in {"optimizer", "scheduler"} & given.keys():
            check_section(name, self.section(name))
        if "scheduler" in given and not self.trains:
            raise BuildError(
                "there is a scheduler in DeepSpeed's config, but no optimizer; give optimizer=, or one in the config"
            )
        for key in {"train_micro_batch_size_per_gpu", "train_batch_size"} & given.keys():
            if type(given[key]) is not int or given[key] < 1:
                raise BuildError(f"{key} in DeepSpeed's config is {given[key]!r}; it has to be a whole number from 1 on")
        if not self.largest_norm >= 0:
            raise BuildError(f"gradient_clipping in DeepSpeed's config is {self.largest_norm}; it has to be 0 or more")
        if self.parts < 1:
            raise BuildError(f"gradient_accumulation_steps in DeepSpeed's config is {self.parts}; it has to be 1 or more")
        self.full_config()

    def _check_rate(self) -> None:
        rate = self.lr_scheduler
        if rate is not None and self.optimizer is None and "optimizer" in self.given:
            raise BuildError(
                "lr_scheduler= is for optimizer=, and the optimizer is in DeepSpeed's config; give a scheduler there, too, or "
                "optimizer="
            )
        super()._check_rate()
        if rate is not None and not is_lr_scheduler(rate) and (missing := _required_arguments(rate)):
            raise BuildError(
                f"lr_scheduler= is called with the optimizer alone, and {getattr(rate, '__name__', 'it')} needs {missing}; "
                "give a factory, lambda optimizer: ..."
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeepSpeedOptions:
        """Make options from a configuration, and read DeepSpeed's file if one is given; see ``CommonOptions.of``."""
        given = dict(config)
        if isinstance(given.get("config"), (str, PathLike)):
            given["config"] = _read(Path(given["config"]))
        return super().of(given)

    @property
    def given(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration as given, without the keys set to ``"auto"``."""
        if self.config is None:
            return {}
        if not isinstance(self.config, Mapping):
            raise BuildError(f"config is a {type(self.config).__name__}; give a dict, or the path of a JSON file")
        names = {"bfloat16": "bf16"}  # DeepSpeed's former name
        return {names.get(key, key): value for key, value in self.config.items() if value != "auto"}

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of DeepSpeed's configuration; empty if it is missing."""
        section = self.given.get(name, {})
        if not isinstance(section, Mapping):
            raise BuildError(f"{name} in DeepSpeed's config is {section!r}; it has to be an object")
        return section

    @property
    def trains(self) -> bool:
        return super().trains or "optimizer" in self.given

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO: as configured; by default 1 for training in bf16, and 0 otherwise."""
        stage = self.section("zero_optimization").get("stage")
        if stage is None or stage == "auto":
            return 1 if self.settled_precision == "bf16" and self.trains else 0
        if type(stage) is not int:
            raise BuildError(f"stage of zero_optimization in DeepSpeed's config is {stage!r}; it has to be 0, 1, 2 or 3")
        return stage

    @property
    def settled_precision(self) -> str:
        """``"fp32"``, ``"bf16"`` or ``"fp16"``, from ``precision`` or DeepSpeed's configuration.

        Raises:
            BuildError: the two differ, or a value of ``enabled`` is neither true nor false.
        """
        enabled = {name: self.section(name).get("enabled", "auto") for name in ("bf16", "fp16")}
        for name, value in enabled.items():
            if value != "auto" and not isinstance(value, bool):
                raise BuildError(f"enabled of {name} in DeepSpeed's config is {value!r}; it has to be true or false")
        found = {name for name, value in enabled.items() if value is True}
        if len(found) > 1:
            raise BuildError("DeepSpeed's config enables bf16 and fp16; enable one of them")
        configured = next(iter(found), "fp32")
        if self.precision not in ("fp32", configured) and (found or enabled[self.precision] is False):
            raise BuildError(f"precision={self.precision!r}, but DeepSpeed's config says {configured}; let both agree")
        return configured if found else self.precision

    @property
    def parts(self) -> int:
        """Number of micro-batches in a batch.

        Raises:
            BuildError: ``microbatches`` and the configuration differ.
        """
        return self._merge_option("microbatches", self.microbatches, 1, "gradient_accumulation_steps", int)

    @property
    def largest_norm(self) -> float:
        """Largest gradient norm; 0 turns clipping off. DeepSpeed's own default, 1, is not used.

        Raises:
            BuildError: ``clip`` and the configuration differ.
        """
        return self._merge_option("clip", float(self.clip), 0.0, "gradient_clipping", float)

    def configured_rows(self, dp: int) -> tuple[str, int] | None:
        """Return the configuration's key that sets the rows of a micro-batch, and the number of rows; None if there is none."""
        if (rows := self.given.get("train_micro_batch_size_per_gpu")) is not None:
            return "train_micro_batch_size_per_gpu", int(rows)
        if (rows := self.given.get("train_batch_size")) is not None:
            return "train_batch_size", int(rows) // (self.parts * dp)
        return None

    def full_config(self, device_type: str = "") -> dict[str, Any]:
        """Return DeepSpeed's configuration with all required values; a micro-batch has one row if no batch size is given.

        On a ``"cpu"``, Adam and AdamW are torch's.

        Raises:
            BuildError: the configuration and the other options differ.
        """
        config = copy.deepcopy(dict(self.given))
        precision = self.settled_precision
        for name in ("bf16", "fp16"):
            config[name] = {**self.section(name), "enabled": precision == name}
        config["gradient_accumulation_steps"] = self.parts
        config["gradient_clipping"] = self.largest_norm
        config["zero_optimization"] = {**self.section("zero_optimization"), "stage": self.zero_stage}
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("steps_per_print", _NEVER)
        if device_type == "cpu" and "optimizer" in config:
            config["optimizer"] = with_torch_adam(config["optimizer"])
        if "scheduler" in config:
            config["scheduler"].setdefault("params", {})
        if "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", 1)
        # with partitioned messages, only one value with a gradient may cross a boundary
        config["pipeline"] = {**self.section("pipeline"), "pipe_partitioned": False, "grad_partitioned": False}
        return config

    def rank_invariants(self) -> list[str]:
        return [
            f"DeepSpeed's config {json.dumps(self.full_config(), sort_keys=True, default=repr)}",
            *super().rank_invariants(),
        ]

    def _merge_option(self, name: str, ours: Number, default: Number, key: str, kind: type[Number]) -> Number:
        if key not in self.given:
            return ours
        configured = self.given[key]
        if isinstance(configured, bool) or not isinstance(configured, (int, kind)):
            raise BuildError(f"{key} in DeepSpeed's config is {configured!r}; it has to be a {'whole ' * (kind is int)}number")
        configured = kind(configured)
        if configured == ours:
            return ours
        if ours == default:
            return configured
        raise BuildError(f"{name}={ours}, but DeepSpeed's config says {key}={configured}; let both agree, or give one")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_without_twins)
    except OSError as err:
        raise BuildError(f"DeepSpeed's config {str(path)!r} cannot be read: {err.strerror}") from err
    except json.JSONDecodeError as err:
        raise BuildError(f"DeepSpeed's config {str(path)!r} is not JSON: {err}") from err
    if not isinstance(found, dict):
        raise BuildError(f"DeepSpeed's config {str(path)!r} is a {type(found).__name__}; it has to be an object")
    return found


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object, and refuse equal keys, of which Python would use the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twins = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise BuildError(f"DeepSpeed's config has {twins[0]!r} twice in one object; leave one of them out")
    return found


def _required_arguments(factory: Any) -> str:
    """Return the names of the arguments that a factory requires after the first."""
    try:
        _, *others = inspect.signature(factory).parameters.values()
    except ValueError:  # a builtin, or a factory without arguments
        return ""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return " and ".join(each.name for each in others if each.default is each.empty and each.kind not in kinds)


_NEVER = 10**9
