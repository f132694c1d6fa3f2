"""Availability of a dialect's engine: version, tested version, usability and limits. Imports no engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any


@dataclass(frozen=True)
class EngineInfo:
    """The engine of a dialect, as it declares it by ``slapo_training.engines.dialect.EngineDialect``'s attributes.

    Args:
        engine: The engine's distribution; empty where the dialect names none.
        installed: Its version here; empty where it is not installed.
        tested: The version of it that the dialect was tested with.
        usable: Whether the dialect can be built for.
        note: Why it is not usable, or what to keep in mind; empty else.
        limits: What the engine cannot do, each with what to do instead.
    """

    engine: str = ""
    installed: str = ""
    tested: str = ""
    usable: bool = True
    note: str = ""
    limits: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, target: type) -> EngineInfo:
        """Read the information from a dialect's class and the metadata of installed distributions."""
        engine, tested = str(getattr(target, "distribution", "")), str(getattr(target, "tested", ""))
        limits = tuple((str(limit.asked), str(limit.instead)) for limit in getattr(target, "limits", ()))
        if not engine:
            return cls(limits=limits)
        try:
            installed = metadata.version(engine)
        except metadata.PackageNotFoundError:
            wanted = f"{engine}=={tested}" if tested else engine
            return cls(engine, "", tested, False, f"{engine} is not installed; pip install {wanted}", limits)
        note = f"tested with {engine} {tested}, and {installed} is installed" if tested not in ("", installed) else ""
        return cls(engine, installed, tested, True, note, limits)

    @property
    def label(self) -> str:
        """The engine and its version, in a table."""
        return f"{self.engine} {self.installed or 'not installed'}" if self.engine else ""

    def data(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "limits": [{"asked": asked, "instead": instead} for asked, instead in self.limits]}
