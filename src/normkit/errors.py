"""Exceptions in one line, for messages about what foreign code raised."""

from __future__ import annotations


def message(error: BaseException, most: int = 300) -> str:
    """What an exception says, without line breaks and cut to ``most`` characters.

    Its type stands for one that says nothing, and before what is no error (``SystemExit: 1``) or a key alone.
    """
    text = " ".join(str(error).split())
    if not text or not isinstance(error, Exception) or isinstance(error, KeyError):
        return described(error, most)
    return _cut(text, most)


def described(error: BaseException, most: int = 300) -> str:
    """Type and message of an exception, in one line of at most ``most`` characters."""
    text = " ".join(str(error).split())
    return _cut(f"{type(error).__name__}: {text}" if text else type(error).__name__, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
