"""The skeleton of a page: one HTML file that loads nothing, and whose policy lets nothing load."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

from .stylesheet import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def document(title: str, product: str, *, head: str, main: str, style: str = STYLE, scripts: str = "") -> str:
    """Return a page.

    Args:
        title: Heading and title; it is escaped.
        product: The command that wrote the page, e.g. ``"slapo train"``.
        head: HTML below the heading.
        main: HTML of the sections.
        style: The style sheet.
        scripts: ``script`` elements at the end of the body.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} - {escape(product)}</title>
<style>{style}</style>
</head>
<body>
<header>
<p class="product">{escape(product)}</p>
<h1>{escape(title)}</h1>
{head}
</header>
<main>
{main}
</main>
{scripts}
</body>
</html>
"""


def cards(values: Mapping[str, str]) -> str:
    """Return the main numbers of a page as a row of cards; names and values are escaped."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="cards">{shown}</dl>'


def embed_json(data: Any) -> str:
    """Return JSON that cannot end the script element around it; a number that is not finite becomes null."""
    text = json.dumps(_drop_non_finite(data), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _drop_non_finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _drop_non_finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_drop_non_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
