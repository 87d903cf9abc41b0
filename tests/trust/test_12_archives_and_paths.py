"""Trust 12: whatever a name says, a file lands inside its root or is refused."""

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

from overt import files
from overt.data.download import extract, safe_join
from overt.data.photos import Entry, PhotoSet
from overt.errors import BadInput, Damaged
from overt.serve.app import make
from overt.serve.shelf import Shelf, offer
from tests.serve.conftest import write_run

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
    if "\0" in name:  # zipfile itself would cut the name
        data = path.read_bytes().replace(name.replace("\0", "@").encode(), name.encode())
        path.write_bytes(data)


def in_tar(path: Path, name: str) -> None:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for one in ("good", name):
            member = tarfile.TarInfo(one)
            member.size, member.pax_headers = 1, {"path": one}
            archive.addfile(member, io.BytesIO(b"2"))


def as_link(path: Path, name: str) -> None:
    """A link that leads out, and then a file through it."""
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


def naive(archive: Path, root: Path) -> None:
    """The loop that zip-slip was named after: names are joined, and links are made."""
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


def outside(place: Path, before: set[str]) -> set[str]:
    """What has come to lie beside the root, or is a link that leads out of it."""
    now = {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir()}
    return {name for name in now - before if not name.startswith("deep/inside/")} | {
        str(path) for path in place.rglob("*") if path.is_symlink()
    }


def test_no_archive_writes_outside_its_root(tmp_path: Path, reached: Callable[..., None]) -> None:
    cases: list[tuple[Callable[[Path, str], None], str]]
    cases = [(kind, name) for name in HOSTILE for kind in (in_zip, in_tar)]
    cases += [(kind, "") for kind in (as_link, as_hard_link, as_zipped_link, as_device)]
    refused, inside, escaped = 0, 0, 0
    for number, (kind, name) in enumerate(cases):
        for unpack in (extract, naive):
            place = tmp_path / f"{number}-{unpack.__name__}"
            (place / "deep").mkdir(parents=True)
            (place / "secret").write_text("secret")
            # an absolute name would leave the folder of this test: it is brought back into it
            absolute = name.startswith("/") and unpack is naive
            kind(place / "archive", f"{place}/abs" if absolute else name)
            before = {"archive", "secret"}
            if unpack is naive:
                with contextlib.suppress(Exception):
                    naive(place / "archive", place / "deep/inside")
                escaped += bool(outside(place, before))
                continue
            try:
                extract(place / "archive", place / "deep/inside")
                inside += 1
                assert name in ENCODED
            except (BadInput, Damaged) as problem:
                refused += 1
                told = str(problem)
                assert "archive" in told and "\n" not in told
                assert not (place / "deep/inside").exists()
            assert outside(place, before) == set(), name
            assert (place / "secret").read_text() == "secret"
    assert refused >= 2 * len(ESCAPES) + 4 and escaped > 5
    reached(
        12,
        "archives: inside the root or refused",
        f"{refused} refused and {inside} inside of {len(cases)}; 0 outside",
        f"joining names, and tarfile with trust, leave {escaped} of {len(cases)} outside",
    )


@settings(max_examples=500)
@given(
    st.lists(
        st.sampled_from(["..", ".", "/", "\\", "\0", "a", "b c", "C:", "%2e", "~", "…", "\n", "é"])
        | st.text(max_size=4),
        max_size=8,
    ).map("".join)
)
def test_any_name_is_joined_inside_or_refused(name: str) -> None:
    root = Path("/srv/root")
    try:
        found = safe_join(root, name)
    except BadInput:
        return
    assert Path(os.path.normpath(found)).is_relative_to(root) and found != root


# --- names in lists, tables and manifests


def from_entry(folder: Path, name: str) -> object:
    return PhotoSet("own", "all", folder, [Entry(name, 0)], ("a",), (8, 8))


def from_manifest(folder: Path, name: str) -> object:
    made = folder / "sealed"
    made.mkdir()
    body = {"format": 1, "closed": False, "files": {name: {"size": 6, "sha256": SECRET}}}
    (made / files.MANIFEST).write_text(files._render(body))
    return files.verify(made)


SECRET = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
READERS = (from_entry, from_manifest)


@pytest.mark.parametrize("read", READERS)
def test_no_list_names_a_file_outside(tmp_path: Path, read: Callable[[Path, str], object]) -> None:
    (tmp_path / "outside").write_text("secret")
    for number, name in enumerate(ESCAPES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises((Damaged, BadInput)):
            read(folder, name)


# --- requests


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    write_run(tmp_path / "runs/soft")
    (tmp_path / "secret").write_text("secret words")
    app = make(Shelf(offer([str(tmp_path / "runs/soft")])))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


ASKED = [*HOSTILE, "secret", "../secret", "..%2fsecret", "model/config.json", "etc/passwd"]
PLACES = ("/", "/api/", "/api/models/", "/static/", "/runs/soft/")


@pytest.fixture
def usual(tmp_path: Path) -> Iterator[TestClient]:
    """A server that joins what is asked for to its root, as short ones do."""
    root = tmp_path / "runs"
    root.mkdir(exist_ok=True)
    app = FastAPI()

    @app.get("/{name:path}")
    def give(name: str) -> PlainTextResponse:
        path = root / name.removeprefix("static/")
        if not path.is_file():
            return PlainTextResponse("not here", 404)
        return PlainTextResponse(path.read_text(errors="replace"))

    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as opened:
        yield opened


def answers(client: TestClient) -> Iterator[Response]:
    """What a server says to every address that the client itself does not refuse."""
    for name in ASKED:
        for place in PLACES:
            try:
                found = client.get(f"{place}{name}")
            except Exception:
                continue
            yield found


def gives_away(answer: Response) -> bool:
    """Whether there is a file in it that is none of the server's business."""
    return "secret words" in answer.text or "root:x:" in answer.text


def test_no_request_reaches_a_file(
    client: TestClient, usual: TestClient, reached: Callable[..., None]
) -> None:
    """The server has no route to a file at all; whatever is asked for, none is handed out."""
    found = list(answers(client))
    shown = [one for one in found if one.status_code == 200]  # names that amount to its own pages
    assert {one.url.path for one in shown} <= {"/", "/api/models"}
    assert {one.status_code for one in found if one not in shown} <= {400, 404, 405}
    assert not any(map(gives_away, found))
    asked, addresses = len(found), list(answers(usual))
    for name in ASKED:
        for query in ({"model": name}, {"model": f"soft/../{name}"}):
            answer = client.get("/api/examples", params=query)
            asked += 1
            assert answer.status_code in (400, 422) and set(answer.json()) == {"error"}
        body = {"model": name, "text": "a", "picture": name}
        answer = client.post("/api/ask", json=body)
        asked += 1
        assert answer.status_code in (400, 422) and "\n" not in answer.json()["error"]
    naive = sum(map(gives_away, addresses))
    assert asked > 150 and naive > 0
    reached(
        12,
        "requests: no file outside the root",
        f"0 of {asked} reached a file",
        f"joining names to the root hands one out at {naive} of {len(addresses)} addresses",
    )
