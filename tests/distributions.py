"""Writes installed distributions by hand, for tests and benchmarks of plugin loading."""

from __future__ import annotations

from pathlib import Path


def write_distribution(site: Path, name: str, plugin: str, *, version: str = "1.0", entry_points: str | None = None) -> str:
    """Put a plugin distribution into a folder of ``sys.path``, as ``pip install`` would.

    Args:
        site: The folder.
        name: Distribution name, e.g. ``"slapo-quant"``; the module is ``slapo_quant_plugin``, the entry point ``quant``.
        plugin: Source of the plugin module.
        version: Its version.
        entry_points: Text of ``entry_points.txt`` where it is not to be the usual one.

    Returns:
        The name of the module.
    """
    stem = name.replace("-", "_")
    module = f"{stem}_plugin"
    if entry_points is None:
        entry_points = f"[slapo]\n{name.removeprefix('slapo-')} = {module}\n"
    (site / f"{module}.py").write_text(plugin)
    info = site / f"{stem}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return module
