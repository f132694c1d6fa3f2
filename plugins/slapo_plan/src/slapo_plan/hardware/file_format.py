"""Reads and writes hardware files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

from slapo_core import SlapoError, UnknownNameError

from .cluster_parts import Efficiency, Link, Measurements
from .rate_curve import Curve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_TOPOLOGIES = ("all-to-all", "ring", "switched")
_NUMBERS = ("ranks", "launch_seconds", "hook_seconds", "unit_seconds", "pointwise", "in_place")
_Made = TypeVar("_Made")


def read_fields(path: Path) -> dict[str, Any]:
    """Return the arguments of ``Hardware`` that a file holds.

    Raises:
        SlapoError: the file cannot be read, or a key is missing, unknown or of a wrong kind.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise SlapoError(f"hardware file {str(path)!r} cannot be read: {err.strerror}") from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise SlapoError(f"hardware file {str(path)!r} is not TOML: {err}") from err
    return _Table(path, "", data).fields()


def hardware_text(values: Mapping[str, Any]) -> str:
    """Return the content of a file that ``read_fields`` reads, from the attributes of a ``Hardware``."""
    hardware = SimpleNamespace(**values)
    lines = [f"name = {_value(hardware.name)}"]
    lines += ["aliases = [" + ", ".join(f'"{alias}"' for alias in hardware.aliases) + "]"]
    device = {
        "type": hardware.device_type,
        "memory_bytes": hardware.memory_bytes,
        "usable_bytes": hardware.usable_bytes,
        "bandwidth": hardware.bandwidth,
        "launch_seconds": hardware.launch_seconds,
    }
    lines += _section("device", device) + _section("device.flops", hardware.flops)
    lines += _section("node", {"devices": hardware.devices_per_node})
    lines += _section("link", asdict(hardware.link)) + _section("network", asdict(hardware.network))
    lines += _section("efficiency", asdict(hardware.efficiency))
    for each in hardware.measurements:
        numbers = {name: getattr(each, name) for name in _NUMBERS}
        lines += ["", "[[measured]]", *_section("", numbers)[2:]]
        for name in ("matmul", "attention", "operators", "collectives"):
            lines += _section(f"measured.{name}", getattr(each, name))
    return "\n".join(lines) + "\n"


def _section(name: str, values: Mapping[str, Any]) -> list[str]:
    return ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items())]


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() else f'"{key}"'


def _value(value: Any) -> str:
    if isinstance(value, Curve):
        return "[" + ", ".join(f"[{size:.6g}, {measured:.6g}]" for size, measured in value.points) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, int) else f"{value:.6g}"


class _Table:
    """One table of a file, whose keys are read once each; ``close`` refuses those that nobody read."""

    def __init__(self, path: Path, name: str, values: Any) -> None:
        self._path, self._name, self._read = path, name, set[str]()
        self._values: Mapping[str, Any] = values
        if not isinstance(values, dict):
            self._fail(name, f"is {values!r}; write a table [{name}]")

    def fields(self) -> dict[str, Any]:
        device, node = self.table("device"), self.table("node")
        found: dict[str, Any] = {
            "name": self.text("name"),
            "memory_bytes": device.whole("memory_bytes"),
            "usable_bytes": device.whole("usable_bytes"),
            "flops": device.table("flops").numbers(),
            "bandwidth": device.number("bandwidth"),
            "launch_seconds": device.number("launch_seconds"),
            "devices_per_node": node.whole("devices"),
            "link": self.table("link").link(),
            "network": self.table("network").link(),
            "device_type": device.text("type", "cuda"),
            "efficiency": self.table("efficiency", {}).efficiency(),
            "measurements": tuple(each.measurements() for each in self.tables("measured")),
            "aliases": tuple(map(str, self._value("aliases", []))),
        }
        if "float32" not in found["flops"]:
            self._fail("device.flops.float32", "is missing; give the FLOP/s of float32 products")
        if found["usable_bytes"] > found["memory_bytes"]:
            self._fail("device.usable_bytes", f"is {found['usable_bytes']}, more than memory_bytes; give at most that")
        for table in (device, node, self):
            table.close()
        return found

    def link(self) -> Link:
        topology = self.text("topology", "switched")
        if topology not in _TOPOLOGIES:
            self._fail(f"{self._name}.topology", str(UnknownNameError.of("topology", topology, _TOPOLOGIES)), says=True)
        made = Link(self.number("bandwidth"), self.number("latency"), topology, self.number("efficiency", 1.0))
        self.close()
        return made

    def efficiency(self) -> Efficiency:
        made = Efficiency(**{each.name: self.number(each.name, each.default, zero=True) for each in fields(Efficiency)})
        self.close()
        return made

    def measurements(self) -> Measurements:
        made = Measurements(
            ranks=self.whole("ranks"),
            launch_seconds=self.number("launch_seconds"),
            matmul=self.table("matmul").curves(),
            attention=self.table("attention", {}).curves(),
            pointwise=self.curve("pointwise"),
            in_place=self.curve("in_place"),
            operators=self.table("operators", {}).numbers(),
            collectives=self.table("collectives", {}).curves(rises=True),
            hook_seconds=self.number("hook_seconds", 0.0, zero=True),
            unit_seconds=self.number("unit_seconds", 0.0, zero=True),
        )
        self.close()
        return made

    def table(self, key: str, default: Any = None) -> _Table:
        return _Table(self._path, self._full(key), self._value(key, default))

    def tables(self, key: str) -> list[_Table]:
        found = self._value(key, [])
        if not isinstance(found, list):
            self._fail(self._full(key), f"is {found!r}; write tables [[{key}]]")
        return [_Table(self._path, self._full(key), each) for each in found]

    def numbers(self) -> dict[str, float]:
        return {key: self.number(key) for key in self._values}

    def curves(self, rises: bool = False) -> dict[str, Curve]:
        return {key: self.curve(key, rises) for key in self._values}

    def curve(self, key: str, rises: bool = False) -> Curve:
        return self._made(key, lambda found: Curve(found, rises), "give points [[size, value], ...] with increasing sizes")

    def text(self, key: str, default: str | None = None) -> str:
        found = self._value(key, default)
        if not isinstance(found, str):
            self._fail(self._full(key), f"is {found!r}; give a string")
        return found

    def number(self, key: str, default: Any = None, zero: bool = False) -> float:
        found = self._value(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not (found > 0 or zero and found == 0):
            self._fail(self._full(key), f"is {found!r}; give a positive number")
        return float(found)

    def whole(self, key: str) -> int:
        found = self._value(key, None)
        if type(found) is not int or found < 1:
            self._fail(self._full(key), f"is {found!r}; give a whole number from 1 on")
        return found

    def close(self) -> None:
        """Refuse keys that nothing reads."""
        for key in self._values:
            if key not in self._read:
                self._fail("", str(UnknownNameError.of("key", self._full(key), map(self._full, sorted(self._read)))), says=True)

    def _made(self, key: str, make: Callable[[Any], _Made], remedy: str) -> _Made:
        found = self._value(key, None)
        try:
            return make(found)
        except (TypeError, ValueError):
            self._fail(self._full(key), f"is {found!r}; {remedy}")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        if key not in self._values and default is None:
            self._fail(self._full(key), "is missing")
        return self._values.get(key, default)

    def _full(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _fail(self, key: str, why: str, says: bool = False) -> NoReturn:
        raise SlapoError(f"hardware file {str(self._path)!r}: {why if says else f'{key} {why}'}")
