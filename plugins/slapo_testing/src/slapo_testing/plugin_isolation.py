"""Registry of only core and the plugins that a test names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import Registry, use_registry


@contextmanager
def isolated_plugins(*plugins: object) -> Iterator[Registry]:
    """Make a registry of core and the given plugins the default of this process in a ``with`` block.

    Installed plugins are not imported, and ``SLAPO_DISABLE_PLUGINS`` affects only core.

    Args:
        *plugins: Modules, classes or objects with ``@hookimpl`` functions.

    Yields:
        The registry, also for ``create_schedule(..., plugins=registry)``.

    Raises:
        PluginError: a given plugin fails to load.
    """
    with use_registry(Registry(plugins)) as registry:
        yield registry
