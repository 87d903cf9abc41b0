"""Bind address of the server: its URL, and the Host and Origin headers that belong to it."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

LOOPBACK = "127.0.0.1"
# An IPv6 address in brackets, or a name without characters that separate parts of a URL; then a
# port.
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\[\]:/@?#\\\s]+))(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """The address that a server is bound to, and the names that clients may call it by.

    A web page elsewhere can point a DNS name of its own at this machine (DNS rebinding). Its
    requests then carry that name as their Host. So a Host is accepted only if it is `localhost`,
    an IP address, the name that was bound, the name of this machine, or one of `also`. On a
    loopback address only loopback addresses count. A port is ignored: it may be forwarded.

    Args:
        host: the address to bind, as of `overt serve --host`.
        also: further names, each with or without a port, as of `overt serve --allow-host`.
        bound: the IP address that `host` was resolved to, once a socket is bound to it.

    Example:
        >>> Address("::1").url(8642)
        'http://[::1]:8642'
        >>> Address("127.0.0.2").accepts("127.0.0.2:8642"), Address("::1").accepts("example.org")
        (True, False)
    """

    host: str = LOOPBACK
    also: Sequence[str] = ()
    bound: str | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        # The bound address decides, if it is known: any name may resolve to a loopback address.
        found = _ip(self.bound or self.host)
        return self.host.lower() == "localhost" if found is None else found.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether the server listens at every address of this machine."""
        found = _ip(self.bound or self.host)
        return found is not None and found.is_unspecified

    def url(self, port: int) -> str:
        """Return the URL of the page on this machine."""
        host = self.host
        # A browser cannot open a wildcard address.
        if self.is_wildcard:
            host = "::1" if ":" in (self.bound or host) else LOOPBACK
        return f"http://{_in_url(host)}:{port}"

    def url_elsewhere(self, port: int) -> str | None:
        """Return the URL of the page on other machines; None if they cannot reach it."""
        if self.is_loopback:
            return None
        return f"http://{_in_url(socket.gethostname() if self.is_wildcard else self.host)}:{port}"

    def accepts(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        parsed = split_host(header)
        if parsed is None:
            return False
        name = parsed[0]
        if name in {one[0] for one in map(split_host, self.also) if one is not None}:
            return True
        found = _ip(name)
        # Rebinding needs a name: an IP address is safe, except that a loopback server has no
        # others.
        if found is not None:
            return found.is_loopback if self.is_loopback else True
        return name == "localhost" or name in self._names()

    def same_origin(self, origin: str, header: str) -> bool:
        """Return whether an Origin header is that of a page of this server.

        Args:
            origin: the Origin header, such as `http://127.0.0.1:8642`; `null` is not accepted.
            header: the Host header of the same request.
        """
        scheme, mark, rest = origin.lower().partition("://")
        sender, own = split_host(rest), split_host(header)
        # `null`, the origin of sandboxed pages and of files, has no `://`.
        if not mark or scheme not in _PORTS or sender is None or own is None:
            return False
        # Browsers leave out the default port of a scheme.
        default = _PORTS[scheme]
        also = [one for one in map(split_host, self.also) if one is not None]
        return any(
            (sender[0], sender[1] or default) == (name, port or default)
            for name, port in [own, *also]
        )

    def _names(self) -> set[str]:
        """Return the names by which other machines may address this one."""
        own = {self.host}
        if not self.is_loopback:
            own |= {socket.gethostname(), socket.getfqdn()}
        return {name.lower().rstrip(".") for name in own}


def split_host(header: str) -> tuple[str, int | None] | None:
    """Split a Host header into a lower-case name without brackets and a port; None if malformed."""
    found = _HOST.fullmatch(header.strip())
    if found is None or (found[3] and int(found[3]) > 65535):
        return None
    if found[1] and _ip(found[1]) is None:
        return None
    name = (found[1] or found[2]).lower().rstrip(".")
    return (name, int(found[3]) if found[3] else None) if name else None


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _in_url(host: str) -> str:
    """Return a host as a URL holds it: IPv6 in brackets, the zone's percent sign escaped."""
    return f"[{host.replace('%', '%25')}]" if ":" in host else host
