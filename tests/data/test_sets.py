import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from overt.data import sets
from overt.data.scenes.posing import ROUND
from overt.data.sets import Archive, DataSet, File
from overt.errors import BadInput, Damaged
from overt.recipes import demo


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("served")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def checksum(data: bytes) -> str:
    return f"sha1:{hashlib.sha1(data).hexdigest()}"


def toy(url: str, folder: Path, **changes) -> DataSet:
    """A set of two CIFAR-like files, of 3 and 2 records, in an archive that `url` serves."""
    data = {"toy/a.bin": bytes(3 * 3073), "toy/b.bin": (b"\5" + bytes(3072)) * 2}
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as archive:
        for name, content in {**data, "toy/readme.html": b"hello"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = checksum((folder / "toy.tar.gz").read_bytes())
    files = tuple(
        File(
            name,
            len(content),
            checksum(content),
            look=partial(sets._check_records, limits=(10,), records=len(content) // 3073),
        )
        for name, content in data.items()
    )
    found = DataSet(
        "toy", "a toy", "page", "none", "ask", files, archive=Archive(f"{url}/toy.tar.gz", packed)
    )
    return replace(found, **changes)


@pytest.fixture
def known(served, monkeypatch) -> DataSet:
    found = toy(*served)
    monkeypatch.setattr(sets, "SETS", (*sets.SETS, found))
    return found


def test_nothing_heavy_is_imported():
    code = "import sys, overt.data.sets as s; s.present(__import__('pathlib').Path('x'));"
    code += "print([n for n in ('torch', 'numpy', 'PIL', 'transformers') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


def test_every_description_is_complete():
    names = [each.name for each in sets.SETS]
    assert len(set(names)) == len(names)
    for each in sets.SETS:
        assert each.what and each.licence and each.how.endswith(".")
        assert each.page.startswith(("https://", "http://")) or each.name == "scenes"
        assert each.files or each.photos or each.name in sets.PROGRAMS
        for part in (*each.files, *each.photos):
            assert not Path(part.path).is_absolute() and ".." not in part.path
        fetched = each.archive is not None or (each.files and all(f.url for f in each.files))
        assert bool(fetched) == (f"`overt data prepare {each.name}`" in each.how) or (
            each.name == "scenes"
        )


def test_the_root_is_given_or_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERT_DATA", str(tmp_path))
    assert sets.root_of() == tmp_path and sets.root_of(Path("other")) == Path("other")
    monkeypatch.delenv("OVERT_DATA")
    with pytest.raises(BadInput, match="OVERT_DATA"):
        sets.root_of()


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    for act in (sets.find, partial(sets.check, tmp_path), partial(sets.prepare, tmp_path)):
        with pytest.raises(BadInput, match=r"'mnist'.*cifar10"):
            act("mnist")


def test_the_commands_it_names_are_there():
    """Every `overt data ...` in the words on how to get a set is a command, about that set."""
    from overt.cli import data_app

    commands = {command.name for command in data_app.registered_commands}
    found = [
        (command, about, each.name)
        for each in sets.SETS
        for command, about in re.findall(r"`overt data (\S+) ?(\S*)`", each.how)
    ]
    assert {name for *_, name in found} >= {"scenes", "cifar10", "cifar100", "trec6"}
    assert all(command in commands and about == name for command, about, name in found)
    assert all(command == "prepare" for command, *_ in found)


def test_what_is_present(tmp_path, known):
    assert "scenes" in sets.present(tmp_path) and "toy" not in sets.present(tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin").touch()
    assert "toy" not in sets.present(tmp_path)
    (tmp_path / "toy/b.bin").touch()
    assert "toy" in sets.present(tmp_path)
    assert len(sets.check(tmp_path, "toy")) == 2


def test_preparing_fetches_checks_and_tidies_up(tmp_path, known):
    heard: list[int] = []
    said = sets.prepare(tmp_path, "toy", lambda done, total: heard.append(done))
    assert "fetched" in said and heard
    assert sets.check(tmp_path, "toy") == [] and "toy" in sets.present(tmp_path)
    assert not list((tmp_path / sets.DOWNLOADS).rglob("*"))
    shutil.rmtree(tmp_path / sets.DOWNLOADS)
    assert "ready" in sets.prepare(tmp_path, "toy")  # nothing is fetched a second time
    assert not (tmp_path / sets.DOWNLOADS).exists()


def test_preparing_mends_what_is_broken_and_keeps_the_rest(tmp_path, known):
    sets.prepare(tmp_path, "toy")
    (tmp_path / "toy/a.bin").write_bytes(b"broken")
    (tmp_path / "toy/mine.txt").write_text("keep me")
    sets.prepare(tmp_path, "toy")
    assert sets.check(tmp_path, "toy") == []
    assert (tmp_path / "toy/mine.txt").read_text() == "keep me"


def test_single_files_are_fetched_too(tmp_path, served, monkeypatch):
    url, folder = served
    (folder / "one.txt").write_bytes(b"hello\n")
    file = File("texts/one.txt", 6, checksum(b"hello\n"), f"{url}/one.txt")
    found = DataSet("texts", "texts", "page", "none", "ask", (file,))
    monkeypatch.setattr(sets, "SETS", (found,))
    sets.prepare(tmp_path, "texts")
    assert (tmp_path / "texts/one.txt").read_bytes() == b"hello\n"


def test_an_archive_with_other_files_changes_nothing(tmp_path, served, known):
    wrong = replace(known, files=(*known.files, File("toy/c.bin")))
    with pytest.raises(Damaged, match=r"no toy/c\.bin"):
        sets.fetch(tmp_path, wrong)
    wrong = replace(known, files=(replace(known.files[0], checksum="sha1:00"),))
    with pytest.raises(Damaged, match=r"a\.bin is not the published file"):
        sets.fetch(tmp_path, wrong)
    assert not (tmp_path / "toy").exists()


def test_a_set_no_program_can_fetch_says_how(tmp_path):
    with pytest.raises(BadInput, match=r"flickr8k.*Ask for it on its page.*https://hocken"):
        sets.prepare(tmp_path, "flickr8k")


def test_scenes_are_made_and_kept(tmp_path, monkeypatch):
    assert sets.check(tmp_path, "scenes") == []
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sets, "SCENES", {"train": 3, "val": 2})
    heard: list[int] = []
    assert "5 of them" in sets.prepare(tmp_path, "scenes", lambda done, total: heard.append(done))
    assert heard
    heard.clear()
    sets.prepare(tmp_path, "scenes", lambda done, total: heard.append(done))
    assert not heard


def test_what_is_drawn_on_demand_needs_nothing(tmp_path):
    assert "sortclevr" in sets.present(tmp_path) and sets.check(tmp_path, "sortclevr") == []
    assert "nothing to prepare" in sets.prepare(tmp_path, "sortclevr")
    assert not list(tmp_path.iterdir())


def test_the_demo_finds_the_scenes_that_were_made():
    data = demo.recipe_of(demo.ROWS[0]).data
    assert {"train": data.train, "val": data.val, "test": data.test} == sets.SCENES
    assert data.world == sets.SCENES_SEED
    assert sets.SCENES["test"] % ROUND == 0


def test_easyvqa_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "easyvqa" not in sets.present(tmp_path)
    assert "pip install easy-vqa" in sets.check(tmp_path, "easyvqa")[0]
    with pytest.raises(BadInput, match="pip install easy-vqa"):
        sets.prepare(tmp_path, "easyvqa")


def test_problems_of_easyvqa_are_named(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "easy-vqa" / part / "images").mkdir(parents=True)
        questions = json.dumps([["q", "red", 4]] if part == "train" else [["q", "blue", 4]])
        (tmp_path / "easy-vqa" / part / "questions.json").write_text(questions)
        (tmp_path / "easy-vqa" / part / "images" / "4.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "easy-vqa" / "answers.txt").write_text("red")
    train, test = sets.check(tmp_path, "easyvqa")
    assert "4.png" in train and "question 0" in test


def test_problems_name_file_and_record(tmp_path, known):
    sets.prepare(tmp_path, "toy")
    first, second = tmp_path / "toy/a.bin", tmp_path / "toy/b.bin"
    whole = first.read_bytes()
    first.write_bytes(whole[:7_000])
    assert sets.check(tmp_path, "toy") == [
        f"{first} ends in record 2 with 7000 bytes, not {3 * 3073}."
    ]
    first.write_bytes(whole[:3073] + b"\x0b" + whole[3074:])
    assert sets.check(tmp_path, "toy") == [f"{first}: record 1 has label 11, not 0 to 9."]
    first.write_bytes(whole[:-1] + b"\1")
    assert "checksum" in sets.check(tmp_path, "toy")[0]
    first.unlink()
    assert sets.check(tmp_path, "toy") == [f"{first} is missing."]
    first.write_bytes(whole)
    second.write_bytes(b"")
    assert "ends in record 0" in sets.check(tmp_path, "toy")[0]


def test_a_swapped_file_is_told_by_its_checksum(tmp_path, served, monkeypatch):
    found = replace(toy(*served), archive=None)
    a, b = bytes(3073 * 2), (b"\1" + bytes(3072)) * 2
    look = partial(sets._check_records, limits=(10,), records=2)
    files = [File(n, len(d), checksum(d), look=look) for n, d in [("t/a", a), ("t/b", b)]]
    monkeypatch.setattr(sets, "SETS", (replace(found, files=tuple(files)),))
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").write_bytes(b)
    (tmp_path / "t/b").write_bytes(a)
    problems = sets.check(tmp_path, "toy")
    assert [problem.split(";")[0] for problem in problems] == [
        f"{tmp_path / 't/a'} holds what belongs into t/b",
        f"{tmp_path / 't/b'} holds what belongs into t/a",
    ]


def test_lines_and_photos_are_counted(tmp_path):
    path = tmp_path / "x.label"
    path.write_bytes(b"A:b one ?\nC:d tw\xf0 ?\n")
    assert list(sets._check_lines(path, 2)) == []
    assert "line 3 of 4" in next(sets._check_lines(path, 4))
    path.write_bytes(b"A:b one ?\nnonsense\n")
    assert "line 2" in next(sets._check_lines(path, 2))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").touch()
    problems = list(sets._check_photos(tmp_path / "images", sets.Photos("images", 2)))
    assert "1 of 2 photos" in problems[0] and "1.jpg, photo 0 of 1, is empty" in problems[1]


def photo_set(url: str, folder: Path, write_photo, **changes) -> DataSet:
    """A set of a list and two photos in a folder each, in an archive that `url` serves."""
    made = folder / "made" / "birds"
    for name in ("a/1.jpg", "b/2.jpg"):
        write_photo(made / "images" / name)
    (made / "list.txt").write_text("a/1.jpg\nb/2.jpg\n")
    with tarfile.open(folder / "birds.tar", "w") as archive:
        archive.add(made, "birds")
    packed = checksum((folder / "birds.tar").read_bytes())
    found = DataSet(
        "birds",
        "birds",
        "page",
        "none",
        "ask",
        (File("birds/list.txt"),),
        (sets.Photos("birds/images", 2),),
        Archive(f"{url}/birds.tar", packed),
    )
    return replace(found, **changes)


def test_photos_of_an_archive_are_put_in_place(tmp_path, served, monkeypatch, write_photo):
    found = photo_set(*served, write_photo)
    monkeypatch.setattr(sets, "SETS", (found,))
    write_photo(tmp_path / "birds/images/b/mine.jpg")
    (tmp_path / "birds/images/b/2.jpg").write_bytes(b"")
    assert "fetched" in sets.prepare(tmp_path, "birds")
    assert sets.check(tmp_path, "birds") == []
    images = tmp_path / "birds/images"
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.jpg"))
    assert names == ["a/1.jpg", "b/2.jpg", "b/mine.jpg"]


def test_an_archive_without_its_photos_changes_nothing(tmp_path, served, write_photo):
    for path, count, match in [
        ("birds/images", 3, "2 of 3 photos"),
        ("birds/more", 1, "no birds/"),
    ]:
        wrong = photo_set(*served, write_photo, photos=(sets.Photos(path, count),))
        with pytest.raises(Damaged, match=match):
            sets.fetch(tmp_path, wrong)
        assert not (tmp_path / "birds").exists()


def test_what_a_reader_refuses_is_a_problem_of_the_set(tmp_path, monkeypatch, write_photo):
    """Event-8 in its own layout: the reader and every photo are asked."""
    from overt.data.sports import FOLDER

    few = replace(sets.find("event8"), photos=(sets.Photos(FOLDER, 8),))
    monkeypatch.setattr(sets, "SETS", (few,))
    for name in "climbing badminton bocce croquet polo rowing sailing snowboarding".split():
        write_photo(tmp_path / FOLDER / name / "1.jpg")
    assert sets.present(tmp_path) == ("event8",) and sets.check(tmp_path, "event8") == []
    broken = tmp_path / FOLDER / "polo" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])
    (problem,) = sets.check(tmp_path, "event8")
    assert str(broken) in problem
    broken.rename(tmp_path / FOLDER / "rowing" / "2.jpg")
    (problem,) = sets.check(tmp_path, "event8")
    assert "polo has no photos" in problem


@pytest.mark.parametrize(
    "name", "svhn stl10 cub caltech101 caltech256 event8 action40 scene67 discovery".split()
)
def test_every_set_with_a_reader_names_one_that_is_there(tmp_path, name):
    found = sets.find(name)
    assert name not in sets.present(tmp_path) and sets.check(tmp_path, name)
    assert found.opens
    for reader in found.opens:
        with pytest.raises(BadInput, match="missing"):
            reader(tmp_path)


@pytest.mark.parametrize("name", ["caltech101", "caltech256", "event8", "action40", "discovery"])
def test_nothing_is_fetched_where_no_program_can(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sets, "download", lambda *a, **b: pytest.fail("fetched"))
    with pytest.raises(BadInput, match=rf"{name} cannot be fetched by a program\. Fetch"):
        sets.prepare(tmp_path, name)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "trec6", "osie", "daquar", "flickr8k"])
def test_real_data_is_right(data_root, needs, name):
    needs(data_root, name)
    assert sets.check(data_root, name) == []
