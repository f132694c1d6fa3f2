"""``python -m slapo``: the command ``slapo``, where it is not on the path or a launcher takes a module."""

from __future__ import annotations

from .cli.app import main

if __name__ == "__main__":
    main()
