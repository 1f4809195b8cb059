"""What stands behind the question mark of a request."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from vitrail.errors import did_you_mean
from vitrail.serving.limits import RequestError


def refuse_unknown(request: Request, known: Sequence[str]) -> None:
    """A misspelt parameter is no parameter: better a word about it than another answer."""
    for name in request.query_params:
        if name not in known:
            hint = did_you_mean(name, known) or f"; expected {', '.join(known) or 'none'}"
            raise RequestError(400, "bad_parameter", f"no parameter '{name[:40]}'{hint}")
        if len(request.query_params.getlist(name)) > 1:
            raise RequestError(400, "bad_parameter", f"`{name}` is given more than once")


def number(
    request: Request, name: str, default: Any, *, words: Sequence[str] = (), least: int = 0
) -> Any:
    """A whole number, or one of some words."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if text in words:
        return text
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= least:
        return int(text)
    told = " or ".join([f"a whole number from {least} up", *words])
    raise RequestError(400, "bad_parameter", f"{name}={text[:40]}: expected {told}")
