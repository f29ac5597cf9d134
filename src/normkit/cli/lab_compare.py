"""``normkit lab compare``: your own norm or placement beside the built-in ones."""

from __future__ import annotations


def command() -> None:
    """Compare."""
