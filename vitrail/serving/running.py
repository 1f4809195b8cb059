"""`vitrail serve`: models loaded, a port bound, and a server until it is told to end."""

import re
import signal
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from vitrail.console import say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.serving.limits import Limits

LOCAL = ("localhost", "127.0.0.1", "::1")


def serve(  # noqa: PLR0913
    models: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    insecure: bool = False,
    origins: Sequence[str] = (),
    device: str = "auto",
    limits: Limits | None = None,
) -> None:
    """Web page and JSON API for some models; returns once SIGTERM or Ctrl-C was obeyed.

    Port 0 stands for any that is free. Pages of `origins`, as "https://example.org", may use the
    models as the server's own page does.
    """
    try:
        import uvicorn

        from vitrail.serving.app import application
        from vitrail.serving.connections import allow_files, configuration
        from vitrail.serving.served import open_models
    except ModuleNotFoundError as error:
        if error.name in {"starlette", "uvicorn", "python_multipart", "prometheus_client"}:
            raise VitrailError(
                "vitrail serve needs the serving extra: pip install 'vitrail[serve]'"
            ) from None
        raise
    from vitrail.training.devices import choose

    refuse_open_doors(host, token, insecure)
    check_origins(origins)
    limits = limits or Limits()
    allow_files(limits.connections)
    with bind(host, port) as door:
        served = open_models(models, choose(device))
        app = application(
            served, limits, token=token, hosts=local_names(host), origins=tuple(origins)
        )
        number = door.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        for one in served:
            told = one.describe(labels=False)
            say(f"{one.name}  {told['variant']} · {told['parameters']:,} parameters")
        say(f"http://{shown}:{number}/  (Ctrl-C ends it)")
        run(uvicorn.Server(configuration(app, limits)), door)


def run(server: Any, door: socket.socket) -> None:
    """Until a signal: then no more connections, and every request that came in is answered."""
    # uvicorn raises the signals again once it has obeyed them; being obeyed, they are no failure.
    before = {sign: signal.signal(sign, ignore) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[door])
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def ignore(_sign: int, _frame: Any) -> None:
    """A signal that has been obeyed."""


def refuse_open_doors(host: str, token: str, insecure: bool) -> None:
    """Whoever can reach the port can use the models."""
    if not (is_local(host) or token or insecure):
        raise VitrailError(
            f"--host {host} lets others in; set --token SECRET or VITRAIL_TOKEN, or say --insecure"
        )
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise VitrailError("--token: expected printable ASCII letters without spaces")


def check_origins(origins: Sequence[str]) -> None:
    """Browsers send an origin in one form only; any other would never match."""
    for origin in origins:
        if not re.fullmatch(r"https?://([0-9a-z._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", origin):
            raise VitrailError(f"--origin {origin}: expected a form like https://example.org")


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_names(host: str) -> tuple[str, ...]:
    """The names that requests to this machine alone may use; none where others are let in."""
    return (*LOCAL, host) if is_local(host) else ()


def bind(host: str, port: int) -> socket.socket:
    """The port taken, before anything slow is done."""
    if not 0 <= port < 65536:
        raise VitrailError(f"--port {port}: expected 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        told = f"cannot listen on {host}:{port} ({one_line(error)})"
        raise FailureError(f"{told}; try another --port, or 0 for any that is free") from None
