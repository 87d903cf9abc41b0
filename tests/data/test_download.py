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
from overt.errors import CorruptFileError, RunError, UserError
from tests.test_io import write_overlapping_npz

DATA = bytes(range(256)) * 2_000
SHA1 = f"sha1:{hashlib.sha1(DATA).hexdigest()}"
SECRET = "outside.txt"


class Server(ThreadingHTTPServer):
    """Serves DATA as /file; can break the connection, ignore ranges or return errors."""

    daemon_threads = True
    break_at: list[int]  # bytes to send before each of the next responses breaks off
    errors: list[int]  # status codes of the next responses
    ranges = True
    length = True
    requests: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        requested_range = self.headers.get("Range", "")
        self.server.requests.append(requested_range)
        if self.server.errors:
            self.send_error(self.server.errors.pop(0))
            return
        start = 0
        if requested_range and self.server.ranges:
            start = int(requested_range.removeprefix("bytes=").removesuffix("-"))
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
    found.break_at, found.errors, found.requests = [], [], []
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_download_reports_progress(server, tmp_path):
    progress: list[tuple[int, int | None]] = []
    path = tmp_path / "deep" / "file"
    assert download(server.url, path, SHA1, lambda *at: progress.append(at)) == path
    assert path.read_bytes() == DATA
    assert progress[-1] == (len(DATA), len(DATA)) and progress == sorted(progress)
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_broken_connection_resumes_at_the_last_byte(server, tmp_path):
    server.break_at = [100_000, 0, 200_000, 1]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA
    assert server.requests == [
        *("", "bytes=100000-", "bytes=100000-", "bytes=300000-", "bytes=300001-"),
    ]


def test_later_call_resumes_the_partial_file(server, tmp_path):
    server.break_at = [70_000, 0, 0]
    with pytest.raises(RunError, match=r"70000.*file\.part"):
        download(server.url, tmp_path / "file", SHA1, tries=2, pause=0.0)
    assert not (tmp_path / "file").exists()
    download(server.url, tmp_path / "file", SHA1)
    assert (tmp_path / "file").read_bytes() == DATA and server.requests[-1] == "bytes=70000-"


def test_partial_file_is_not_resumed_without_a_checksum(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"something else")
    download(server.url, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == DATA and server.requests == [""]


def test_server_without_ranges_restarts_the_download(server, tmp_path):
    server.ranges, server.break_at = False, [100_000]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA


def test_server_without_content_length(server, tmp_path):
    server.length = False
    progress: list[int | None] = []
    download(server.url, tmp_path / "file", SHA1, lambda done, total: progress.append(total))
    assert (tmp_path / "file").read_bytes() == DATA and set(progress) == {None}
    server.break_at = [9]
    with pytest.raises(CorruptFileError, match="checksum"):
        download(server.url, tmp_path / "cut", SHA1)


def test_complete_partial_file_needs_no_more_bytes(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA)
    download(server.url, tmp_path / "file", SHA1)
    assert (tmp_path / "file").read_bytes() == DATA


def test_partial_file_longer_than_the_file_is_deleted(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA + b"more")
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    assert (tmp_path / "file").read_bytes() == DATA


def test_wrong_checksum_raises_and_deletes_the_file(server, tmp_path):
    (tmp_path / "file.part").write_bytes(b"x" * 1_000)  # bytes of another file
    with pytest.raises(CorruptFileError, match=SHA1):
        download(server.url, tmp_path / "file", SHA1)
    assert not list(tmp_path.iterdir())


def test_file_with_the_right_checksum_is_not_downloaded_again(server, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    download(server.url, path, SHA1)
    assert server.requests == []
    path.write_bytes(b"old")
    download(server.url, path, SHA1)
    assert path.read_bytes() == DATA


def test_server_errors_are_retried_and_missing_files_raise(server, tmp_path):
    server.errors = [503, 500]
    download(server.url, tmp_path / "file", SHA1, pause=0.0)
    server.errors = [404]
    with pytest.raises(RunError, match="404"):
        download(server.url, tmp_path / "other", SHA1)
    server.errors = [503] * 3
    with pytest.raises(RunError, match="503"):
        download(server.url, tmp_path / "other", SHA1, tries=3, pause=0.0)


def test_unreachable_server_raises(tmp_path):
    with pytest.raises(RunError, match="downloaded"):
        download("http://127.0.0.1:9/file", tmp_path / "file", SHA1, tries=2, pause=0.0)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/file", "data:,a", "nothing"])
def test_urls_without_http_raise(tmp_path, url):
    with pytest.raises(UserError, match="http"):
        download(url, tmp_path / "file")


def test_checksums_match_the_rfc_test_vectors(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")  # the test vectors of RFC 1321 and FIPS 180
    assert matches(path, "md5:900150983cd24fb0d6963f7d28e17f72")
    assert matches(path, "sha1:A9993E364706816ABA3E25717850C26C9CD0D89D")
    assert not matches(path, "md5:00")
    for wrong in ("abc", "crc:12", "md5:"):
        with pytest.raises(UserError):
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
def test_archive_is_extracted(tmp_path, make):
    members = {"set/a.bin": b"a" * 100_000, "./set/deep/b.txt": b"b", "c": b""}
    archive = make(tmp_path / "archive", members)
    names = extract(archive, tmp_path / "out")
    assert len(names) == 3
    for name, data in members.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "out"]


def test_empty_folders_are_extracted(tmp_path):
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
def test_member_name_outside_the_target_raises(tmp_path, make, name):
    target = tmp_path / "a" / "b"
    target.mkdir(parents=True)
    if make is make_zip:  # zipfile itself cuts names at NUL, so the bytes are patched in
        data = make(target / "archive", {"good": b"1", name.replace("\0", "@"): b"2"}).read_bytes()
        if "\0" in name:
            (target / "archive").write_bytes(data.replace(b"out@side", b"out\0side"))
    else:
        make(target / "archive", {"good": b"1", name: b"2"})
    with pytest.raises(UserError, match="rejected"):
        extract(target / "archive", target / "out")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["archive"]
    assert not (target / "out").exists() and not Path("/tmp", SECRET).exists()


@pytest.mark.parametrize("make", [make_zip, make_tar])
@pytest.mark.parametrize("name", ["%2e%2e/outside.txt", "..%2foutside.txt", "．．/outside.txt"])
def test_percent_encoded_name_stays_inside_the_target(tmp_path, make, name):
    extract(make(tmp_path / "archive", {name: b"1"}), tmp_path / "out")
    inside = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "archive"]
    assert len(inside) == 1 and inside[0].is_relative_to(tmp_path / "out")


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_a_tar_raise(tmp_path, kind):
    with tarfile.open(tmp_path / "archive", "w") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
        inner = tarfile.TarInfo("link/file")
        archive.addfile(inner, io.BytesIO())
    with pytest.raises(UserError, match=r"link.*device"):
        extract(tmp_path / "archive", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_and_encrypted_members_of_a_zip_raise(tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="link"):
        extract(tmp_path / "link.zip", tmp_path / "out")
    data = bytearray(make_zip(tmp_path / "secret.zip", {"a": b"1"}).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "secret.zip").write_bytes(data)
    with pytest.raises(UserError, match="encrypted"):
        extract(tmp_path / "secret.zip", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_archive_larger_than_most_bytes_raises(tmp_path, make):
    archive = make(tmp_path / "bomb", {"a": bytes(600_000), "b": bytes(600_000)})
    assert archive.stat().st_size < 10_000
    with pytest.raises(UserError, match="400000 bytes"):
        extract(archive, tmp_path / "out", most_bytes=1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["bomb"]
    assert len(extract(archive, tmp_path / "out", most_bytes=1_200_000)) == 2


def test_too_many_members_raise(tmp_path, monkeypatch):
    monkeypatch.setattr("overt.data.download.MOST_MEMBERS", 3)
    archive = make_zip(tmp_path / "many", {str(n): b"" for n in range(4)})
    with pytest.raises(UserError, match="more than 3"):
        extract(archive, tmp_path / "out")


def test_duplicate_member_name_raises(tmp_path):
    with tarfile.open(tmp_path / "twice", "w") as archive:
        for name in ("a", "a/b"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="twice"):
        extract(tmp_path / "twice", tmp_path / "out")
    make_tar(tmp_path / "twice", {"a": b"1"})
    with tarfile.open(tmp_path / "again", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    with pytest.raises(UserError, match="twice"):
        extract(tmp_path / "again", tmp_path / "out")


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_truncated_archive_raises_and_extracts_nothing(tmp_path, make):
    data = make(tmp_path / "archive", {"a": bytes(range(256)) * 500, "b": b"2"}).read_bytes()
    for length in range(0, len(data) - 30, max(1, len(data) // 25)):
        (tmp_path / "archive").write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match="archive"):
            extract(tmp_path / "archive", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["archive"]


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_changed_archive_raises_or_extracts_inside_the_target(tmp_path, make):
    data = make(tmp_path / "archive", {"a": bytes(range(256)), "b/c": b"2"}).read_bytes()
    for offset in range(0, len(data), max(1, len(data) // 120)):
        changed = bytearray(data)
        changed[offset] ^= 0x21
        (tmp_path / "archive").write_bytes(changed)
        try:
            extract(tmp_path / "archive", tmp_path / f"out{offset}")
        except (UserError, CorruptFileError):
            assert not (tmp_path / f"out{offset}").exists()


def test_existing_target_and_missing_archive_raise(tmp_path):
    archive = make_zip(tmp_path / "archive", {"a": b""})
    with pytest.raises(UserError, match="exists"):
        extract(archive, tmp_path)
    (tmp_path / "text").write_text("no archive")
    for name in ("text", "none"):
        with pytest.raises(CorruptFileError, match=name):
            extract(tmp_path / name, tmp_path / "out")


@pytest.mark.long
@given(st.text(max_size=12))
def test_safe_join_stays_inside_or_raises(name):
    root = Path("/srv/root")
    try:
        path = safe_join(root, name)
    except UserError:
        return
    assert path.resolve().is_relative_to(root) and path != root


# Archives with wrong sizes in their headers


def write_tar(path, *members):
    """A tar archive of (header, content); the sizes in the headers are not checked."""
    with open(path, "wb") as file:
        for header, content in members:
            file.write(header)
            file.write(content.ljust(-(-len(content) // 512) * 512, b"\0"))
        file.write(bytes(1024))
    return path


def make_header(name="a", size=0, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.type = kind
    made = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    number = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
    made[124:136] = number
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE])
@pytest.mark.parametrize("size", [-1, -512, -1024])
def test_negative_size_raises(tmp_path, kind, size):
    path = write_tar(
        tmp_path / "a.tar", (make_header("good", 1), b"x"), (make_header("bad", size, kind), b"")
    )
    with pytest.raises((CorruptFileError, UserError)):
        extract(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_negative_size_in_a_pax_attribute_raises(tmp_path):
    record = b"13 size=-512\n"
    path = write_tar(
        tmp_path / "a.tar",
        (make_header("x", len(record), tarfile.XHDTYPE), record),
        (make_header("a"), b""),
    )
    with pytest.raises(UserError, match="plain size"):
        extract(path, tmp_path / "out")


def test_pax_attribute_of_many_digits_raises_quickly(tmp_path):
    """Python before 3.11.10 needs many minutes for half a million digits."""
    digits = b"1" * 500_000
    hostile = (make_header("x", len(digits), tarfile.XHDTYPE), digits)
    path = write_tar(
        tmp_path / "a.tar", (make_header("good"), b""), hostile, (make_header("a"), b"")
    )
    with pytest.raises(CorruptFileError, match="256 digits"):
        extract(path, tmp_path / "out")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_oversized_headers_raise_before_they_are_read(tmp_path, kind):
    path = write_tar(
        tmp_path / "a.tar", (make_header("good"), b""), (make_header("x", 2**32, kind), b"y")
    )
    with pytest.raises(CorruptFileError, match=r"header.*4294967296"):
        extract(path, tmp_path / "out")


def test_valid_pax_attributes_are_read(tmp_path):
    long = f"{'n' * 150}/{'m' * 150}"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in (long, "ä/ö", "plain"):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 3, {"mtime": "1700000000.123456789", "comment": "x"}
            archive.addfile(member, io.BytesIO(b"abc"))
    assert extract(tmp_path / "a.tar.gz", tmp_path / "out") == [long, "ä/ö", "plain"]
    assert (tmp_path / "out" / "plain").read_bytes() == b"abc"


def test_overlapping_members_of_a_zip_raise(tmp_path):
    path = write_overlapping_npz(tmp_path / "a.npz")
    with pytest.raises((UserError, CorruptFileError), match="overlap"):
        extract(path, tmp_path / "out")
