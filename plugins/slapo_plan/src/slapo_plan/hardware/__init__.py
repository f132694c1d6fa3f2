"""Descriptions of clusters, and the seconds that operators and collectives take on them.

``Hardware`` is read from a small TOML file: ready ones are in ``files``, and ``calibrate`` measures the machine it runs on.
``operator_seconds`` and ``collective_seconds`` turn records into seconds: by measured curves where the file has them, and by
peak rates, latencies and assumed efficiencies otherwise. It may import ``records`` and ``measurement``.
"""

from .calibration import calibrate
from .cluster_parts import Link, Measurements
from .collective_seconds import LinkBytes, collective_seconds, link_bytes
from .description import Hardware
from .operator_seconds import WorkSeconds, operator_seconds, work_seconds
from .rate_curve import Curve

__all__ = [
    "Curve",
    "Hardware",
    "Link",
    "LinkBytes",
    "Measurements",
    "WorkSeconds",
    "calibrate",
    "collective_seconds",
    "link_bytes",
    "operator_seconds",
    "work_seconds",
]
