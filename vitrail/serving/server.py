"""`vitrail serve`: loads models, binds a port, and serves until it is stopped."""

import os
import re
import signal
import socket
from collections.abc import Sequence
from errno import errorcode
from ipaddress import ip_address
from pathlib import Path

from vitrail.console import say
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.serving.limits import Limits


def serve(  # noqa: PLR0913
    models: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    insecure: bool = False,
    origins: Sequence[str] = (),
    device: str = "auto",
    fast: bool = False,
    limits: Limits | None = None,
) -> None:
    """Serves a web page and a JSON API for some models until SIGTERM or Ctrl-C.

    Port 0 is any free port. Pages of `origins` (such as "https://example.org") may use the models
    as the server's own page does. `fast` takes the fastest form of each model that decides as the
    model itself does; a line says which.
    """
    try:
        import uvicorn

        from vitrail.serving.app import application
        from vitrail.serving.connections import allow_files, configuration
        from vitrail.serving.models import open_models
    except ModuleNotFoundError as error:
        if error.name in {"starlette", "uvicorn", "python_multipart", "prometheus_client"}:
            raise VitrailError(
                "vitrail serve needs the serving extra: pip install 'vitrail[serve]'"
            ) from None
        raise
    from vitrail.devices import choose_device

    check_access(host, token, insecure, origins)
    limits = limits or Limits()
    allow_files(limits.connections)
    # Bound first, since loading models is slow.
    with bind(host, port) as listener:
        served = open_models(models, choose_device(device), fast=fast)
        hosts = local_names(host)
        app = application(served, limits, token=token, hosts=hosts, origins=tuple(origins))
        for one in served:
            facts = one.describe(labels=False)
            say(f"{one.name}  {facts['variant']} · {facts['parameters']:,} parameters")
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{listener.getsockname()[1]}/  (press Ctrl-C to stop)")
        # uvicorn answers every request that came in, then raises the signal again, which would
        # make a clean end look like a failure.
        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
        try:
            uvicorn.Server(configuration(app, limits)).run(sockets=[listener])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def check_access(host: str, token: str, insecure: bool, origins: Sequence[str] = ()) -> None:
    """Refuses open servers without a token, and tokens and origins that cannot work."""
    if not (local_names(host) or token or insecure):
        raise VitrailError(
            f"--host {host} accepts connections from other machines; set --token SECRET or "
            "VITRAIL_TOKEN, or pass --insecure"
        )
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise VitrailError("--token: expected printable ASCII characters without spaces")
    for origin in origins:
        # Browsers send an origin in this form only; any other would never match.
        if not re.fullmatch(r"https?://([0-9a-z._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", origin):
            raise VitrailError(f"--origin {origin}: expected a form like https://example.org")


def local_names(host: str) -> tuple[str, ...]:
    """The host names that requests may use; none if other machines can reach the server."""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return ("localhost", "127.0.0.1", "::1", host) if local else ()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket."""
    if not 0 <= port < 65536:
        raise VitrailError(f"--port {port}: expected 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno in errorcode else one_line(error)
        message = f"cannot listen on {host}:{port} ({why})"
        raise FailureError(f"{message}; try another --port, or 0 for any free port") from None
