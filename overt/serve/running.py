"""`overt serve`: the server from the first line it says to its end."""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address

from overt.errors import BadInput

HERE = "127.0.0.1"


def serve(
    names: Sequence[str],
    host: str = HERE,
    port: int = 8642,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> None:
    """Answer questions about these models until somebody presses Ctrl-C.

    With port 0 a free one is taken. Everything that can be wrong is said before the first question.
    """
    import uvicorn

    from overt.serve.app import make
    from overt.serve.shelf import Shelf, offer

    shelf = Shelf(offer(names), device)
    taken = listen(host, port)
    with taken:
        shelf.subject(shelf.names[0])  # so that nobody waits for the first answer
        own = is_this_machine(host)
        app = make(shelf, [HERE, "localhost", "[::1]"] if own else ["*"])
        address = f"http://{host if own else socket.gethostname()}:{taken.getsockname()[1]}"
        told = ", ".join(shelf.names[:6]) + (", ..." if len(shelf.names) > 6 else "")
        say(f"Ask {told} at {address} (Ctrl-C ends it).")
        if not own:
            say("Anyone who can reach this machine can ask; there is no password.")
        settings = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=5, timeout_keep_alive=20
        )
        with suppress(KeyboardInterrupt):  # raised again, or not, when it has ended in good order
            uvicorn.Server(settings).run(sockets=[taken])
        say("Stopped.")


def listen(host: str, port: int) -> socket.socket:
    """A socket at this place; one that is taken, or no place at all, is `BadInput`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        taken = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise BadInput(f"'{host}' is no address of this machine ({error}); try {HERE}.") from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise BadInput(
            f"nobody can be answered at {host}:{port} ({error}); choose another with --port, or 0 "
            "for any that is free."
        ) from error
    return taken


def is_this_machine(host: str) -> bool:
    """Whether an address can only be reached from here."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
