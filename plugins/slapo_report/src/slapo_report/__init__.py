"""Pages of Slapo: single HTML files that load nothing, in light and dark, for screens from 400 pixels up and for print."""

from .charts.axes import Axis, axis_from_zero, integer_axis, linear_axis, log_axis, step_axis
from .charts.line_chart import Limit, Line, line_chart
from .charts.scatter import Point, scatter
from .charts.share_bars import share_bars
from .charts.stacked_bars import StackedBar, stacked_bars
from .charts.timeline import ACTIONS, timeline
from .charts.traffic_matrix import traffic_matrix
from .document import cards, document, embed_json
from .javascript import SCRIPT
from .pages.plan_page import plan_page
from .pages.tune_page import tune_page
from .stylesheet import CHART_STYLE, STYLE
from .tables import Cell, sortable_table, table
from .units import (
    Scale,
    byte_scale,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
    second_scale,
)

__all__ = [
    "ACTIONS",
    "Axis",
    "CHART_STYLE",
    "Cell",
    "Limit",
    "Line",
    "Point",
    "SCRIPT",
    "STYLE",
    "Scale",
    "StackedBar",
    "axis_from_zero",
    "byte_scale",
    "cards",
    "document",
    "embed_json",
    "format_bytes",
    "format_count",
    "format_flops",
    "format_percent",
    "format_seconds",
    "integer_axis",
    "line_chart",
    "linear_axis",
    "log_axis",
    "plan_page",
    "scatter",
    "second_scale",
    "share_bars",
    "sortable_table",
    "stacked_bars",
    "step_axis",
    "table",
    "timeline",
    "traffic_matrix",
    "tune_page",
]
