"""A registry with nothing but core and the plugins a test names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slapo_core import Registry, use_registry


@contextmanager
def isolated_plugins(*plugins: object) -> Iterator[Registry]:
    """Let the default registry hold core and the given plugins alone, in this process, for the block.

    Installed plugins are not imported and ``SLAPO_DISABLE_PLUGINS`` matters to core alone. A given plugin that is broken
    is an error at once.

    Args:
        *plugins: Modules, classes or objects with ``@hookimpl`` functions.

    Yields:
        The registry, also good for ``create_schedule(..., plugins=registry)``.

    Raises:
        PluginError: a given plugin is broken.
    """
    with use_registry(Registry(plugins)) as registry:
        yield registry
