"""Trust 12: archive members, listed names and requests stay inside their root folder."""

import contextlib
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from httpx import Response
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from overt import io as overt_io
from overt.data.download import extract, safe_join
from overt.data.photo_dataset import PhotoDataset, PhotoEntry
from overt.errors import CorruptFileError, UserError
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from tests.inspect.server.conftest import write_run

ESCAPES = [
    "../outside",
    "a/../../outside",
    "a/b/../../../outside",
    "/outside",
    "//outside",
    "..\\outside",
    "a\\..\\..\\outside",
    "C:\\outside",
    "C:outside",
    "\\\\server\\share\\outside",
    "..",
    "a/..",
    "out\0side",
    "../outside\0.txt",
    ".//..//outside",
]
ENCODED = [
    "%2e%2e/outside",
    "..%2foutside",
    "%252e%252e%252foutside",
    "．．/outside",
    "..；/outside",
]
ENCODED += ["\u2025/outside", "a/%00outside", "..%c0%afoutside", "~/outside", "$HOME/outside"]
HOSTILE = [*ESCAPES, *ENCODED]


def in_zip(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("good", b"1")
        archive.writestr(zipfile.ZipInfo(name.replace("\0", "@")), b"2")
    if "\0" in name:  # zipfile would truncate the name
        data = path.read_bytes().replace(name.replace("\0", "@").encode(), name.encode())
        path.write_bytes(data)


def in_tar(path: Path, name: str) -> None:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for one in ("good", name):
            member = tarfile.TarInfo(one)
            member.size, member.pax_headers = 1, {"path": one}
            archive.addfile(member, io.BytesIO(b"2"))


def as_link(path: Path, name: str) -> None:
    """A link to the parent folder, and a file through the link."""
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("way")
        link.type, link.linkname = tarfile.SYMTYPE, ".."
        archive.addfile(link)
        through = tarfile.TarInfo("way/outside")
        through.size = 1
        archive.addfile(through, io.BytesIO(b"2"))


def as_hard_link(path: Path, name: str) -> None:
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("way")
        link.type, link.linkname = tarfile.LNKTYPE, "../secret"
        archive.addfile(link)


def as_zipped_link(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("way")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "..")


def as_device(path: Path, name: str) -> None:
    with tarfile.open(path, "w") as archive:
        pipe = tarfile.TarInfo("way")
        pipe.type = tarfile.FIFOTYPE
        archive.addfile(pipe)


def extract_naively(archive: Path, root: Path) -> None:
    """Extract with joined names and with links, which allows zip slip."""
    root.mkdir()
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for member in opened.infolist():
                target = Path(os.path.join(root, member.filename))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(opened.read(member))
        return
    with tarfile.open(archive) as opened_tar:
        opened_tar.extractall(root, filter="fully_trusted")


def files_outside(place: Path, before: set[str]) -> set[str]:
    """Return new files outside the root, and links."""
    now = {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}
    return {name for name in now - before if not name.startswith("deep/inside/")} | {
        str(path) for path in place.rglob("*") if path.is_symlink()
    }


def test_no_archive_writes_outside_its_root(
    tmp_path: Path, record_result: Callable[..., None]
) -> None:
    cases: list[tuple[Callable[[Path, str], None], str]]
    cases = [(kind, name) for name in HOSTILE for kind in (in_zip, in_tar)]
    cases += [(kind, "") for kind in (as_link, as_hard_link, as_zipped_link, as_device)]
    refused, inside, escaped = 0, 0, 0
    for number, (kind, name) in enumerate(cases):
        for unpack in (extract, extract_naively):
            place = tmp_path / f"{number}-{unpack.__name__}"
            (place / "deep").mkdir(parents=True)
            (place / "secret").write_text("secret")
            # an absolute name would leave the folder of this test: use one inside it
            absolute = name.startswith("/") and unpack is extract_naively
            kind(place / "archive", f"{place}/abs" if absolute else name)
            before = {"archive", "secret"}
            if unpack is extract_naively:
                with contextlib.suppress(Exception):
                    extract_naively(place / "archive", place / "deep/inside")
                escaped += bool(files_outside(place, before))
                continue
            try:
                extract(place / "archive", place / "deep/inside")
                inside += 1
                assert name in ENCODED
            except (UserError, CorruptFileError) as problem:
                refused += 1
                message = str(problem)
                assert "archive" in message and "\n" not in message
                assert not (place / "deep/inside").exists()
            assert files_outside(place, before) == set(), name
            assert (place / "secret").read_text() == "secret"
    assert refused >= 2 * len(ESCAPES) + 4 and escaped > 5
    record_result(
        12,
        "archives: inside the root or rejected",
        f"{refused} rejected and {inside} inside of {len(cases)}; 0 outside",
        "joined names, and tarfile without its data filter, write "
        f"{escaped} of {len(cases)} outside",
    )


@pytest.mark.long
@settings(max_examples=500)
@given(
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "\0", "a", "b c", "C:", "%2e", "~", "…", "\n", "é"])
        | st.text(max_size=4),
        max_size=8,
    ).map("".join)
)
def test_safe_join_stays_inside_the_root_or_raises(name: str) -> None:
    root = Path("/srv/root")
    try:
        found = safe_join(root, name)
    except UserError:
        return
    assert Path(os.path.normpath(found)).is_relative_to(root) and found != root


# --- names in lists, tables and manifests


def read_photo_entry(folder: Path, name: str) -> object:
    return PhotoDataset("own", "all", folder, [PhotoEntry(name, 0)], ("a",), (8, 8))


def verify_manifest(folder: Path, name: str) -> object:
    folder_with_manifest = folder / "sealed"
    folder_with_manifest.mkdir()
    body = {"format": 1, "closed": False, "files": {name: {"size": 6, "sha256": SECRET}}}
    (folder_with_manifest / overt_io.MANIFEST).write_text(overt_io._manifest_text(body))
    return overt_io.verify(folder_with_manifest)


SECRET = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
READERS = (read_photo_entry, verify_manifest)


@pytest.mark.parametrize("read", READERS)
def test_names_outside_the_root_raise_in_lists_and_manifests(
    tmp_path: Path, read: Callable[[Path, str], object]
) -> None:
    (tmp_path / "outside").write_text("secret")
    for number, name in enumerate(ESCAPES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises((CorruptFileError, UserError)):
            read(folder, name)


# --- requests


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    write_run(tmp_path / "runs/soft")
    (tmp_path / "secret").write_text("secret words")
    app = create_app(ModelCache(find_models([str(tmp_path / "runs/soft")])))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


REQUESTED_NAMES = [
    *HOSTILE,
    "secret",
    "../secret",
    "..%2fsecret",
    "model/config.json",
    "etc/passwd",
]
PREFIXES = ("/", "/api/", "/api/models/", "/static/", "/runs/soft/")


@pytest.fixture
def naive_client(tmp_path: Path) -> Iterator[TestClient]:
    """A server that joins the requested path to its root."""
    root = tmp_path / "runs"
    root.mkdir(exist_ok=True)
    app = FastAPI()

    @app.get("/{name:path}")
    def read_file(name: str) -> PlainTextResponse:
        path = root / name.removeprefix("static/")
        if not path.is_file():
            return PlainTextResponse("not here", 404)
        return PlainTextResponse(path.read_text(errors="replace"))

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


def responses(client: TestClient) -> Iterator[Response]:
    """Yield the response to every address that the client accepts."""
    for name in REQUESTED_NAMES:
        for place in PREFIXES:
            try:
                found = client.get(f"{place}{name}")
            except Exception:
                continue
            yield found


def contains_secret(response: Response) -> bool:
    """Whether the response contains a file outside the root."""
    return "secret words" in response.text or "root:x:" in response.text


def test_requests_never_return_a_file(
    client: TestClient, naive_client: TestClient, record_result: Callable[..., None]
) -> None:
    """The server has no route to files, so no request returns one."""
    found = list(responses(client))
    pages = [one for one in found if one.status_code == 200]  # names that resolve to its pages
    assert {one.url.path for one in pages} <= {"/", "/api/models"}
    assert {one.status_code for one in found if one not in pages} <= {400, 404, 405}
    assert not any(map(contains_secret, found))
    request_count, naive_responses = len(found), list(responses(naive_client))
    for name in REQUESTED_NAMES:
        for query in ({"model": name}, {"model": f"soft/../{name}"}):
            response = client.get("/api/examples", params=query)
            request_count += 1
            assert response.status_code in (400, 422) and set(response.json()) == {"error"}
        body = {"model": name, "text": "a", "picture": name}
        response = client.post("/api/ask", json=body)
        request_count += 1
        assert response.status_code in (400, 422) and "\n" not in response.json()["error"]
    naive = sum(map(contains_secret, naive_responses))
    assert request_count > 150 and naive > 0
    record_result(
        12,
        "requests: no file outside the root",
        f"0 of {request_count} returned a file",
        f"joining names to the root returns one at {naive} of {len(naive_responses)} addresses",
    )
