"""Record of one plugin: its origin, and the state of its loading."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint


@dataclass
class PluginRecord:
    """One plugin and the state of its loading.

    Args:
        name: Entry-point name.
        entry_point: Its entry point; None for an object that was passed to the registry.
        plugin: The module or object with the hook implementations; None until it is imported.
        disabled: True if ``SLAPO_DISABLE_PLUGINS`` names it.
        loaded: True if its hooks are called.
        problems: Reasons why it did not load, or why names it provides cannot be used.

    Example:
        >>> record = next(record for record in default_registry().records if record.name == "core")
        >>> record.loaded, record.distribution, record.failure
        (True, 'slapo-core', None)
    """

    name: str
    entry_point: EntryPoint | None = None
    plugin: object | None = None
    disabled: bool = False
    loaded: bool = False
    problems: list[str] = field(default_factory=list)

    @cached_property
    def distribution(self) -> str:
        """Name of the distribution; the plugin's own name if it is not installed.

        Computed on demand, since it reads the metadata file.
        """
        return self._metadata("Name") or self.name

    @cached_property
    def version(self) -> str:
        """Version of the distribution; empty if there is none."""
        return self._metadata("Version")

    @cached_property
    def provider(self) -> str:
        """Distribution and version, e.g. ``"slapo-core 0.1.0"``."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def failure(self) -> str | None:
        """One sentence on why its hooks are not called; None if they are."""
        failed = f"{self} did not load: {'; '.join(self.problems)}"
        return f"{self} is disabled by SLAPO_DISABLE_PLUGINS" if self.disabled else None if self.loaded else failed

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.provider})"

    def _metadata(self, key: str) -> str:
        dist = self.entry_point.dist if self.entry_point else None
        try:
            return str(dist.metadata[key] or "") if dist else ""
        except Exception:  # unreadable metadata must not hide the plugin's own error
            return ""
