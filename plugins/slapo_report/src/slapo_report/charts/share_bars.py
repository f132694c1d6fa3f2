"""Horizontal bars of shares of a whole."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ..units import format_percent


def share_bars(title: str, shares: Mapping[str, float]) -> str:
    """Return a row per name, the largest share first, as an HTML ``figure``.

    Args:
        title: Heading of the figure.
        shares: Name to its share of 1; the longest bar is the largest share.
    """
    largest = max([*shares.values(), 1e-12])
    rows = "".join(
        _row(name, share, 100 * max(share, 0.0) / largest)
        for name, share in sorted(shares.items(), key=lambda entry: entry[1], reverse=True)
    )
    return f"""
<figure class="shares">
<figcaption><h3>{escape(title)}</h3></figcaption>
{rows}
</figure>"""


def _row(name: str, share: float, width: float) -> str:
    said = format_percent(share)
    bar = f'<i class="part part-0" style="left:0;width:{width:.2f}%" title="{escape(f"{name}: {said}")}"></i>'
    who, busy = f'<span class="who">{escape(name)}</span>', f'<span class="busy">{said}</span>'
    return f'<div class="row">{who}<div class="track">{bar}</div>{busy}</div>'
