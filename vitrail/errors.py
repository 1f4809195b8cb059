"""The one exception a user may meet: what is wrong, where, and what to do, in a single line."""

from collections.abc import Iterable
from difflib import get_close_matches


class VitrailError(ValueError):
    """A mistake the user can mend. The command line prints it without a traceback."""

    exit_code = 2


class FailureError(VitrailError):
    """What went wrong lies outside: a network, a disk, another program."""

    exit_code = 1


class DamagedError(FailureError):
    """A file is there, but what it holds cannot be meant."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error line: `; did you mean 'B/16'?`, or nothing when no name is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had too little memory: torch says it in words, of a GPU or of a CPU."""
    return any(text in str(error) for text in ("out of memory", "can't allocate memory"))


def one_line(said: object) -> str:
    """What a library or a file says, fit for a message: its first line, without escape codes."""
    text = getattr(said, "strerror", None) or str(said).strip() or type(said).__name__
    text = text.splitlines()[0].rstrip(".")
    return "".join(letter if letter.isprintable() else " " for letter in text)[:200]
