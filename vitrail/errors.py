"""Errors that users see: what is wrong, where, and what to do, in a single line."""

from collections.abc import Iterable
from difflib import get_close_matches


class VitrailError(ValueError):
    """An error that the user can fix. The command line prints it without a traceback."""

    exit_code = 2


class FailureError(VitrailError):
    """A failure that is not the user's fault: network, disk, memory, or a run that diverged."""

    exit_code = 1


class DamagedError(FailureError):
    """A file exists, but its contents are corrupt."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error line: `; did you mean 'B/16'?`, or nothing when no name is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU or a CPU ran out of memory; torch only says so in the message."""
    # The last is cuBLAS, whose handles and workspaces are not torch's.
    texts = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return any(text in str(error) for text in texts)


def one_line(message: object) -> str:
    """The first line of an error or a text, without control characters, for a message of ours."""
    text = getattr(message, "strerror", None) or str(message).strip() or type(message).__name__
    text = text.splitlines()[0].rstrip(".")
    return "".join(letter if letter.isprintable() else " " for letter in text)[:200]
