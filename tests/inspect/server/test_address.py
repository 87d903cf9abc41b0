"""Server addresses: URLs, accepted hosts, and origins."""

import socket

import pytest

from overt.inspect.server.address import Address, split_host


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("127.0.0.2", "http://127.0.0.2:80"),
        ("::1", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:80"),
        ("192.168.1.5", "http://192.168.1.5:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_the_address_accepts_its_url(host: str, url: str):
    address = Address(host)
    assert address.url(80) == url
    if "%" not in host:
        assert address.accepts(url.removeprefix("http://"))


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        (Address("127.0.0.1"), True),
        (Address("127.0.0.2"), True),
        (Address("::1"), True),
        (Address("localhost"), True),
        (Address("alias", bound="127.0.0.1"), True),
        (Address("0.0.0.0"), False),
        (Address("0", bound="0.0.0.0"), False),
        (Address("x.org"), False),
        (Address("localhost", bound="10.0.0.1"), False),
    ],
)
def test_loopback_addresses_have_no_url_elsewhere(address: Address, loopback: bool):
    assert address.is_loopback is loopback
    assert (address.url_elsewhere(80) is None) is loopback


def test_url_elsewhere_has_the_host_name_or_address():
    assert Address("0.0.0.0").url_elsewhere(80) == f"http://{socket.gethostname()}:80"
    assert Address("192.168.1.5").url_elsewhere(80) == "http://192.168.1.5:80"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "0.0.0.0", "::"])
@pytest.mark.parametrize(
    "header",
    ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "localhost.evil.example", "",
     "a b", "[::1", "::1", "127.0.0.1@evil.example", "x/127.0.0.1", "localhost:99999", "[evil]"],
)  # fmt: skip
def test_no_address_accepts_foreign_hosts(host: str, header: str):
    assert not Address(host).accepts(header)


@pytest.mark.parametrize("header", ["127.0.0.1", "LOCALHOST:1", "localhost.", "[::1]:8642"])
def test_a_loopback_address_accepts_all_loopback_names(header: str):
    assert Address().accepts(header)


def test_only_a_wildcard_address_accepts_network_addresses():
    for header in ("192.168.1.5:8642", "[fe80::1]", socket.gethostname()):
        assert Address("0.0.0.0").accepts(header)
    assert not Address().accepts("192.168.1.5:8642")
    assert Address("named.example", bound="10.0.0.1").accepts("named.example")
    assert Address(also=("proxy.example:8443",)).accepts("proxy.example")


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://127.0.0.1:8642", "127.0.0.1:8642", True),
        ("http://LOCALHOST:80", "localhost", True),
        ("https://localhost", "localhost:443", True),
        ("http://[::1]:8642", "[::1]:8642", True),
        ("http://127.0.0.1:3000", "127.0.0.1:8642", False),
        ("http://localhost:8642", "127.0.0.1:8642", False),
        ("http://evil.example", "127.0.0.1:8642", False),
        ("null", "127.0.0.1:8642", False),
        ("", "127.0.0.1:8642", False),
        ("file://", "127.0.0.1:8642", False),
        ("ftp://127.0.0.1:8642", "127.0.0.1:8642", False),
        ("http://127.0.0.1:8642/path", "127.0.0.1:8642", False),
        ("http://127.0.0.1:8642 http://evil.example", "127.0.0.1:8642", False),
    ],
)
def test_same_origin_compares_host_and_port(origin: str, host: str, same: bool):
    assert Address().same_origin(origin, host) is same


def test_a_proxy_origin_must_be_allowed():
    address = Address(also=("proxy.example",))
    assert address.same_origin("https://proxy.example", "127.0.0.1:8642")
    assert not address.same_origin("https://proxy.example:9000", "127.0.0.1:8642")
    assert not Address().same_origin("https://proxy.example", "127.0.0.1:8642")


def test_split_host_separates_host_and_port():
    assert split_host("[::1]:80") == ("::1", 80) and split_host("A.example.") == ("a.example", None)
    assert split_host("a:b") is None and split_host("[1]") is None
