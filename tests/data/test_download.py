import hashlib
import io
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.data.download import download, extract, matches, safe_join
from overt.errors import BadInput, Damaged, Failed

DATA = bytes(range(256)) * 2_000
SHA1 = f"sha1:{hashlib.sha1(DATA).hexdigest()}"
SECRET = "outside.txt"


class Server(ThreadingHTTPServer):
    """Serves DATA as /file; it may break off, forget about ranges, or be out of order."""

    daemon_threads = True
    break_at: list[int]  # bytes to send before each of the next answers breaks off
    errors: list[int]  # codes of the next answers
    ranges = True
    length = True
    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append(wanted)
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        start = 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(DATA):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(DATA)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
        else:
            self.send_response(200)
        if self.server.length:
            self.send_header("Content-Length", str(len(DATA) - start))
        self.end_headers()
        end = start + self.server.break_at.pop(0) if self.server.break_at else len(DATA)
        self.wfile.write(DATA[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.break_at, found.errors, found.asked = [], [], []
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_file_is_fetched_with_progress(server, tmp_path):
    heard: list[tuple[int, int | None]] = []
    path = tmp_path / "deep" / "file"
    assert download(server.url, path, SHA1, lambda *at: heard.append(at)) == path
    assert path.read_bytes() == DATA
    assert heard[-1] == (len(DATA), len(DATA)) and heard == sorted(heard)
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_line_that_breaks_off_is_taken_up_where_it_stopped(server, tmp_path):
    server.break_at = [100_000, 0, 200_000, 1]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA
    assert server.asked == [
        *("", "bytes=100000-", "bytes=100000-", "bytes=300000-", "bytes=300001-"),
    ]


def test_a_later_call_goes_on_too(server, tmp_path):
    server.break_at = [70_000, 0, 0]
    with pytest.raises(Failed, match=r"70000 bytes are kept in .*file\.part"):
        download(server.url, tmp_path / "file", SHA1, tries=2, pause=0.0)
    assert not (tmp_path / "file").exists()
    download(server.url, tmp_path / "file", SHA1)
    assert (tmp_path / "file").read_bytes() == DATA and server.asked[-1] == "bytes=70000-"


def test_without_a_checksum_old_pieces_are_not_trusted(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"something else")
    download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA and server.asked == [""]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    server.ranges, server.break_at = False, [100_000]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_server_that_does_not_say_how_much_comes(server, tmp_path):
    server.length = False
    heard: list[int | None] = []
    download(server.url, tmp_path / "file", SHA1, lambda done, total: heard.append(total))
    assert (tmp_path / "file").read_bytes() == DATA and set(heard) == {None}
    server.break_at = [9]
    with pytest.raises(Damaged, match="other bytes"):
        download(server.url, tmp_path / "cut", SHA1)


def test_a_whole_part_needs_no_more_bytes(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA)
    download(server.url, tmp_path / "file", SHA1)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_part_longer_than_the_file_is_thrown_away(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA + b"more")
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA


def test_wrong_bytes_are_deleted_and_named(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 1_000)  # pieces that do not fit
    with pytest.raises(Damaged, match=SHA1):
        download(server.url, tmp_path / "file", SHA1)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_right_is_not_fetched_again(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    download(server.url, path, SHA1)
    assert server.asked == []
    path.write_bytes(b"old")
    download(server.url, path, SHA1)
    assert path.read_bytes() == DATA


def test_errors_of_the_server(server, tmp_path):
    server.errors = [503, 500]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    server.errors = [404]
    with pytest.raises(Failed, match="404"):
        download(server.url, tmp_path / "other", SHA1)
    server.errors = [503] * 3
    with pytest.raises(Failed, match="503"):
        download(server.url, tmp_path / "other", SHA1, tries=3, pause=0.0)


def test_nobody_there(tmp_path):
    with pytest.raises(Failed, match="could not be fetched"):
        download("http://127.0.0.1:9/file", tmp_path / "file", SHA1, tries=2, pause=0.0)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file", "data:,a", "nothing"])
def test_other_addresses_are_refused(tmp_path, url):
    with pytest.raises(BadInput, match="http"):
        download(url, tmp_path / "file")


def test_checksums(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")  # the test vectors of RFC 1321 and FIPS 180
    assert matches(path, "md5:900150983cd24fb0d6963f7d28e17f72")
    assert matches(path, "sha1:A9993E364706816ABA3E25717850C26C9CD0D89D")
    assert not matches(path, "md5:00")
    for wrong in ("abc", "crc:12", "md5:"):
        with pytest.raises(BadInput):
            matches(path, wrong)


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return path


def make_tar(path: Path, members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data), kind
            member.pax_headers = {"path": name}  # a NUL cuts a name anywhere else
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_a_good_archive_is_unpacked(tmp_path, make):
    members = {"set/a.bin": b"a" * 100_000, "./set/deep/b.txt": b"b", "c": b""}
    archive = make(tmp_path / "archive", members)
    names = extract(archive, tmp_path / "out")
    assert len(names) == 3
    for name, data in members.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"]


def test_empty_folders_are_made(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.mkdir("one/two")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path, ".", recursive=False)
        archive.add(tmp_path, "one/two", recursive=False)
    for number, name in enumerate(("a.zip", "a.tar")):
        assert extract(tmp_path / name, tmp_path / str(number)) == []
        assert (tmp_path / str(number) / "one" / "two").is_dir()


HOSTILE = [
    "../outside.txt",
    "a/../../outside.txt",
    "/tmp/outside.txt",
    "//tmp/outside.txt",
    "..\\outside.txt",
    "C:\\outside.txt",
    "C:outside.txt",
    "a\\..\\..\\outside.txt",
    "a/..",
    "out\0side.txt",
]


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_leads_out_is_refused(tmp_path, make, name):
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    if make is make_zip:  # zipfile itself cuts names at NUL, so the bytes are patched in
        data = make(place / "archive", {"good": b"1", name.replace("\0", "@"): b"2"}).read_bytes()
        if "\0" in name:
            (place / "archive").write_bytes(data.replace(b"out@side", b"out\0side"))
    else:
        make(place / "archive", {"good": b"1", name: b"2"})
    with pytest.raises(BadInput, match="refused"):
        extract(place / "archive", place / "out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["archive"]
    assert not (place / "out").exists() and not Path("/tmp", SECRET).exists()


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("name", ["%2e%2e/outside.txt", "..%2foutside.txt", "．．/outside.txt"])
def test_an_encoded_name_stays_inside(tmp_path, make, name):
    extract(make(tmp_path / "archive", {name: b"1"}), tmp_path / "out")
    inside = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "archive"]
    assert len(inside) == 1 and inside[0].is_relative_to(tmp_path / "out")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
        inner = tarfile.TarInfo("link/file")
        archive.addfile(inner, io.BytesIO())
    with pytest.raises(BadInput, match="link or a device"):
        extract(tmp_path / "archive", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_and_encrypted_members_of_a_zip_are_refused(tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(BadInput, match="link"):
        extract(tmp_path / "link.zip", tmp_path / "out")
    data = bytearray(make_zip(tmp_path / "secret.zip", {"a": b"1"}).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "secret.zip").write_bytes(data)
    with pytest.raises(BadInput, match="encrypted"):
        extract(tmp_path / "secret.zip", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_more_than_agreed_is_refused(tmp_path, make):
    archive = make(tmp_path / "bomb", {"a": bytes(600_000), "b": bytes(600_000)})
    assert archive.stat().st_size < 10_000
    with pytest.raises(BadInput, match="more bytes"):
        extract(archive, tmp_path / "out", most_bytes=1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["bomb"]
    assert len(extract(archive, tmp_path / "out", most_bytes=1_200_000)) == 2


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("overt.data.download.MOST_MEMBERS", 3)
    archive = make_zip(tmp_path / "many", {str(n): b"" for n in range(4)})
    with pytest.raises(BadInput, match="more than 3"):
        extract(archive, tmp_path / "out")


def test_a_name_used_twice_is_refused(tmp_path):
    with tarfile.open(tmp_path / "twice", "w") as archive:
        for name in ("a", "a/b"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(BadInput, match="twice"):
        extract(tmp_path / "twice", tmp_path / "out")
    make_tar(tmp_path / "twice", {"a": b"1"})
    with tarfile.open(tmp_path / "again", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    with pytest.raises(BadInput, match="twice"):
        extract(tmp_path / "again", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_a_broken_archive_is_damaged_and_leaves_nothing(tmp_path, make):
    data = make(tmp_path / "archive", {"a": bytes(range(256)) * 500, "b": b"2"}).read_bytes()
    for length in range(0, len(data) - 30, max(1, len(data) // 25)):
        (tmp_path / "archive").write_bytes(data[:length])
        with pytest.raises(Damaged, match="archive"):
            extract(tmp_path / "archive", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_changed_archives_end_in_a_sentence_or_inside(tmp_path, make):
    data = make(tmp_path / "archive", {"a": bytes(range(256)), "b/c": b"2"}).read_bytes()
    for place in range(0, len(data), max(1, len(data) // 120)):
        changed = bytearray(data)
        changed[place] ^= 0x21
        (tmp_path / "archive").write_bytes(changed)
        try:
            extract(tmp_path / "archive", tmp_path / f"out{place}")
        except (BadInput, Damaged):
            assert not (tmp_path / f"out{place}").exists()


def test_a_place_that_is_taken_and_a_file_that_is_missing(tmp_path):
    archive = make_zip(tmp_path / "archive", {"a": b""})
    with pytest.raises(BadInput, match="already there"):
        extract(archive, tmp_path)
    (tmp_path / "text").write_text("no archive")
    for name in ("text", "none"):
        with pytest.raises(Damaged, match=name):
            extract(tmp_path / name, tmp_path / "out")


@given(st.text(max_size=12))
def test_a_joined_name_is_inside_or_refused(name):
    root = Path("/srv/root")
    try:
        path = safe_join(root, name)
    except BadInput:
        return
    assert path.resolve().is_relative_to(root) and path != root
