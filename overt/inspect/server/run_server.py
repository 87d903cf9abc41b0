"""`overt serve`: start and stop the server."""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from overt.errors import CorruptFileError, RunError, UserError
from overt.inspect.server.address import LOOPBACK, Address

if TYPE_CHECKING:
    from pathlib import Path

    import uvicorn

    from overt.experiments.recipe_file import RecipeFile
    from overt.inspect.server.model_cache import ModelCache


BACKLOG = 128  # connections that wait while the first model is loaded


def serve(
    names: Sequence[str],
    host: str = LOOPBACK,
    port: int = 8642,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    also: Sequence[str] = (),
    files: "Sequence[RecipeFile]" = (),
    root: "Path | None" = None,
) -> None:
    """Serve these models until Ctrl-C.

    Invalid arguments are reported before the server starts.

    Args:
        names: runs, folders of runs or models.
        host: the address to bind.
        port: the port; 0 takes a free one.
        device: device of the models.
        say: prints a line to the user.
        also: further accepted names of the Host header, as of a proxy.
        files: Python files with the recipes of runs that are not of overt.
        root: folder of the datasets of these recipes.
    """
    import uvicorn

    from overt.inspect.server.app import create_app
    from overt.inspect.server.model_cache import ModelCache, find_models

    _check_host_names(also)
    cache = ModelCache(find_models(names, files), device, files, root)
    # Bind before a model is loaded: a port that is taken is reported at once.
    taken = listen(host, port)
    with taken:
        _load_first(cache, say)  # so that the first request does not wait
        address = Address(host, tuple(also), taken.getsockname()[0])
        announce(cache.names, address, taken.getsockname()[1], say)
        with suppress(KeyboardInterrupt):  # may be raised again after a graceful shutdown
            uvicorn.Server(server_config(create_app(cache, address))).run(sockets=[taken])
        say("Stopped.")


def announce(
    models: Sequence[str], address: Address, port: int, say: Callable[[str], None]
) -> None:
    """Print the URL of the page, and who can open it."""
    listed = ", ".join(models[:6]) + (", ..." if len(models) > 6 else "")
    say(f"Serving {listed} at {address.url(port)} (Ctrl-C stops).")
    elsewhere = address.url_elsewhere(port)
    if elsewhere is not None:
        say(f"Anyone who can reach this machine can use it at {elsewhere}; there is no password.")


def server_config(app: Any) -> "uvicorn.Config":
    """Configure uvicorn: bounded connections, no WebSockets, no proxy headers."""
    import uvicorn

    from overt.inspect.server.connections import BoundedConnection

    return uvicorn.Config(
        app,
        log_level="warning",
        http=BoundedConnection,
        ws="none",
        lifespan="on",
        # Anyone could send such headers, and claim another address.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
        # Limits the headers of a request.
        h11_max_incomplete_event_size=16_384,
    )


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to an address.

    Raises:
        UserError: the address is not one of this machine, or the port is taken.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError(
            f"'{host}' is not an address of this machine ({error}): try {LOOPBACK}."
        ) from error
    try:
        # A new server must not wait for the closed connections of the last one.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
        taken.listen(BACKLOG)  # now: a bound port is not yet taken, and its URL is printed soon
    except (OSError, OverflowError) as error:
        taken.close()
        raise UserError(
            f"cannot bind {host}:{port} ({error}): choose another port with --port, or 0 for "
            "a free one."
        ) from error
    return taken


def _check_host_names(also: Sequence[str]) -> None:
    """Raise on names that no Host header can have."""
    from overt.inspect.server.address import split_host

    for name in also:
        if split_host(name) is None:
            raise UserError(
                f"'{name}' is not a host name: use a name like example.org or example.org:8443."
            )


def _load_first(cache: "ModelCache", say: Callable[[str], None]) -> None:
    """Load the first model that can be loaded; print why the ones before it cannot.

    Raises:
        UserError, CorruptFileError, RunError: if no model can be loaded, with the first reason.
    """
    first: Exception | None = None
    for name in cache.names:
        try:
            cache.load(name)
            return
        except (UserError, CorruptFileError, RunError) as error:
            say(f"{name} cannot be loaded: {error}")
            first = first or error
    if first is not None:
        raise first
