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

from overt.data import catalog
from overt.data.catalog import Archive, DatasetEntry, DatasetFile
from overt.data.scenes.balanced_questions import ROUND
from overt.errors import CorruptFileError, UserError
from overt.papers import demo


@pytest.fixture(scope="module")
def file_server(tmp_path_factory) -> Iterator[tuple[str, Path]]:
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


def make_toy_dataset(url: str, folder: Path, **changes) -> DatasetEntry:
    """A dataset of two CIFAR-like files, of 3 and 2 records, in an archive that `url` serves."""
    data = {"toy/a.bin": bytes(3 * 3073), "toy/b.bin": (b"\5" + bytes(3072)) * 2}
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as archive:
        for name, content in {**data, "toy/readme.html": b"hello"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = checksum((folder / "toy.tar.gz").read_bytes())
    files = tuple(
        DatasetFile(
            name,
            len(content),
            checksum(content),
            check=partial(catalog._check_records, limits=(10,), records=len(content) // 3073),
        )
        for name, content in data.items()
    )
    found = DatasetEntry(
        "toy", "a toy", "page", "none", "ask", files, archive=Archive(f"{url}/toy.tar.gz", packed)
    )
    return replace(found, **changes)


@pytest.fixture
def toy_dataset(file_server, monkeypatch) -> DatasetEntry:
    found = make_toy_dataset(*file_server)
    monkeypatch.setattr(catalog, "DATASETS", (*catalog.DATASETS, found))
    return found


def test_catalog_imports_no_heavy_packages():
    code = "import sys, pathlib, overt.data.catalog as s; s.available_datasets(pathlib.Path('x'));"
    code += "print([n for n in ('torch', 'numpy', 'PIL', 'transformers') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"


def test_every_entry_is_complete():
    names = [each.name for each in catalog.DATASETS]
    assert len(set(names)) == len(names)
    for each in catalog.DATASETS:
        assert each.description and each.licence and each.instructions.endswith(".")
        assert each.homepage.startswith(("https://", "http://")) or each.name == "scenes"
        assert each.files or each.photos or each.name in catalog.WITHOUT_FOLDER
        for part in (*each.files, *each.photos):
            assert not Path(part.path).is_absolute() and ".." not in part.path
        fetched = each.archive is not None or (each.files and all(f.url for f in each.files))
        assert bool(fetched) == (f"`overt data prepare {each.name}`" in each.instructions) or (
            each.name == "scenes"
        )


def test_data_root_is_an_argument_or_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OVERT_DATA", str(tmp_path))
    assert catalog.data_root() == tmp_path and catalog.data_root(Path("other")) == Path("other")
    monkeypatch.delenv("OVERT_DATA")
    with pytest.raises(UserError, match="OVERT_DATA"):
        catalog.data_root()


def test_unknown_name_raises_with_the_known_names(tmp_path):
    for act in (
        catalog.find_dataset,
        partial(catalog.check_dataset, tmp_path),
        partial(catalog.prepare_dataset, tmp_path),
    ):
        with pytest.raises(UserError, match=r"'mnist'.*cifar10"):
            act("mnist")


def test_commands_in_the_instructions_exist():
    """Every `overt data ...` in the instructions of a dataset is a command with its name."""
    from overt.cli import data_app

    commands = {command.name for command in data_app.registered_commands}
    found = [
        (command, about, each.name)
        for each in catalog.DATASETS
        for command, about in re.findall(r"`overt data (\S+) ?(\S*)`", each.instructions)
    ]
    assert {name for *_, name in found} >= {"scenes", "cifar10", "cifar100", "trec6"}
    assert all(command in commands and about == name for command, about, name in found)
    assert all(command == "prepare" for command, *_ in found)


def test_datasets_with_all_files_are_available(tmp_path, toy_dataset):
    assert "scenes" in catalog.available_datasets(
        tmp_path
    ) and "toy" not in catalog.available_datasets(tmp_path)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/a.bin").touch()
    assert "toy" not in catalog.available_datasets(tmp_path)
    (tmp_path / "toy/b.bin").touch()
    assert "toy" in catalog.available_datasets(tmp_path)
    assert len(catalog.check_dataset(tmp_path, "toy")) == 2


def test_prepare_downloads_checks_and_removes_the_archive(tmp_path, toy_dataset):
    progress: list[int] = []
    message = catalog.prepare_dataset(tmp_path, "toy", lambda done, total: progress.append(done))
    assert "downloaded" in message and progress
    assert catalog.check_dataset(tmp_path, "toy") == [] and "toy" in catalog.available_datasets(
        tmp_path
    )
    assert not list((tmp_path / catalog.DOWNLOADS).rglob("*"))
    shutil.rmtree(tmp_path / catalog.DOWNLOADS)
    # nothing is downloaded a second time
    assert "ready" in catalog.prepare_dataset(tmp_path, "toy")
    assert not (tmp_path / catalog.DOWNLOADS).exists()


def test_prepare_replaces_corrupt_files_and_keeps_others(tmp_path, toy_dataset):
    catalog.prepare_dataset(tmp_path, "toy")
    (tmp_path / "toy/a.bin").write_bytes(b"broken")
    (tmp_path / "toy/mine.txt").write_text("keep me")
    catalog.prepare_dataset(tmp_path, "toy")
    assert catalog.check_dataset(tmp_path, "toy") == []
    assert (tmp_path / "toy/mine.txt").read_text() == "keep me"


def test_single_files_are_downloaded(tmp_path, file_server, monkeypatch):
    url, folder = file_server
    (folder / "one.txt").write_bytes(b"hello\n")
    file = DatasetFile("texts/one.txt", 6, checksum(b"hello\n"), f"{url}/one.txt")
    found = DatasetEntry("texts", "texts", "page", "none", "ask", (file,))
    monkeypatch.setattr(catalog, "DATASETS", (found,))
    catalog.prepare_dataset(tmp_path, "texts")
    assert (tmp_path / "texts/one.txt").read_bytes() == b"hello\n"


def test_archive_with_wrong_files_changes_nothing(tmp_path, file_server, toy_dataset):
    wrong = replace(toy_dataset, files=(*toy_dataset.files, DatasetFile("toy/c.bin")))
    with pytest.raises(CorruptFileError, match=r"no toy/c\.bin"):
        catalog.download_dataset(tmp_path, wrong)
    wrong = replace(toy_dataset, files=(replace(toy_dataset.files[0], checksum="sha1:00"),))
    with pytest.raises(CorruptFileError, match=r"a\.bin.*published"):
        catalog.download_dataset(tmp_path, wrong)
    assert not (tmp_path / "toy").exists()


def test_dataset_without_download_raises_with_its_homepage(tmp_path):
    with pytest.raises(UserError, match=r"flickr8k.*//hocken"):
        catalog.prepare_dataset(tmp_path, "flickr8k")


def test_scenes_are_generated_once_and_cached(tmp_path, monkeypatch):
    assert catalog.check_dataset(tmp_path, "scenes") == []
    monkeypatch.setenv("OVERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "DEMO_SCENES", {"train": 3, "val": 2})
    progress: list[int] = []
    assert "5 scenes" in catalog.prepare_dataset(
        tmp_path, "scenes", lambda done, total: progress.append(done)
    )
    assert progress
    progress.clear()
    catalog.prepare_dataset(tmp_path, "scenes", lambda done, total: progress.append(done))
    assert not progress


def test_generated_datasets_need_no_files(tmp_path):
    assert (
        "sortclevr" in catalog.available_datasets(tmp_path)
        and catalog.check_dataset(tmp_path, "sortclevr") == []
    )
    assert "nothing to prepare" in catalog.prepare_dataset(tmp_path, "sortclevr")
    assert not list(tmp_path.iterdir())


def test_demo_uses_the_prepared_scenes():
    (row,) = demo.select_rows(["question-only"])
    data = demo.demo_recipe(row).data
    assert {"train": data.train, "val": data.val, "test": data.test} == catalog.DEMO_SCENES
    assert data.world == catalog.SCENES_SEED
    assert catalog.DEMO_SCENES["test"] % ROUND == 0


def test_missing_easyvqa_raises_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "easyvqa" not in catalog.available_datasets(tmp_path)
    assert "pip install easy-vqa" in catalog.check_dataset(tmp_path, "easyvqa")[0]
    with pytest.raises(UserError, match="install easy-vqa"):
        catalog.prepare_dataset(tmp_path, "easyvqa")


def test_easyvqa_problems_contain_file_and_question(tmp_path):
    for part in ("train", "test"):
        (tmp_path / "easy-vqa" / part / "images").mkdir(parents=True)
        questions = json.dumps([["q", "red", 4]] if part == "train" else [["q", "blue", 4]])
        (tmp_path / "easy-vqa" / part / "questions.json").write_text(questions)
        (tmp_path / "easy-vqa" / part / "images" / "4.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "easy-vqa" / "answers.txt").write_text("red")
    train, test = catalog.check_dataset(tmp_path, "easyvqa")
    assert "4.png" in train and "question 0" in test


def test_problems_contain_file_and_record(tmp_path, toy_dataset):
    catalog.prepare_dataset(tmp_path, "toy")
    first, second = tmp_path / "toy/a.bin", tmp_path / "toy/b.bin"
    whole = first.read_bytes()
    first.write_bytes(whole[:7_000])
    assert catalog.check_dataset(tmp_path, "toy") == [
        f"{first} ends in record 2: 7000 bytes, expected {3 * 3073}."
    ]
    first.write_bytes(whole[:3073] + b"\x0b" + whole[3074:])
    assert catalog.check_dataset(tmp_path, "toy") == [
        f"{first}: record 1 has label 11, not 0 to 9."
    ]
    first.write_bytes(whole[:-1] + b"\1")
    assert "checksum" in catalog.check_dataset(tmp_path, "toy")[0]
    first.unlink()
    assert catalog.check_dataset(tmp_path, "toy") == [f"{first} is missing."]
    first.write_bytes(whole)
    second.write_bytes(b"")
    assert "ends in record 0" in catalog.check_dataset(tmp_path, "toy")[0]


def test_swapped_files_are_found_by_checksum(tmp_path, file_server, monkeypatch):
    found = replace(make_toy_dataset(*file_server), archive=None)
    a, b = bytes(3073 * 2), (b"\1" + bytes(3072)) * 2
    check = partial(catalog._check_records, limits=(10,), records=2)
    files = [DatasetFile(n, len(d), checksum(d), check=check) for n, d in [("t/a", a), ("t/b", b)]]
    monkeypatch.setattr(catalog, "DATASETS", (replace(found, files=tuple(files)),))
    (tmp_path / "t").mkdir()
    (tmp_path / "t/a").write_bytes(b)
    (tmp_path / "t/b").write_bytes(a)
    problems = catalog.check_dataset(tmp_path, "toy")
    assert [problem.split(";")[0] for problem in problems] == [
        f"{tmp_path / 't/a'} has the contents of t/b",
        f"{tmp_path / 't/b'} has the contents of t/a",
    ]


def test_lines_and_photos_are_counted(tmp_path):
    path = tmp_path / "x.label"
    path.write_bytes(b"A:b one ?\nC:d tw\xf0 ?\n")
    assert list(catalog._check_lines(path, 2)) == []
    assert "line 3 of 4" in next(catalog._check_lines(path, 4))
    path.write_bytes(b"A:b one ?\nnonsense\n")
    assert "line 2" in next(catalog._check_lines(path, 2))
    (tmp_path / "images").mkdir()
    (tmp_path / "images/1.jpg").touch()
    problems = list(catalog._check_photos(tmp_path / "images", catalog.PhotoFolder("images", 2)))
    assert "1 of 2 photos" in problems[0] and "1.jpg, photo 0 of 1, is empty" in problems[1]


def make_photo_dataset(url: str, folder: Path, write_photo, **changes) -> DatasetEntry:
    """A dataset with a list and two photos in one folder each, in an archive that `url` serves."""
    made = folder / "made" / "birds"
    for name in ("a/1.jpg", "b/2.jpg"):
        write_photo(made / "images" / name)
    (made / "list.txt").write_text("a/1.jpg\nb/2.jpg\n")
    with tarfile.open(folder / "birds.tar", "w") as archive:
        archive.add(made, "birds")
    packed = checksum((folder / "birds.tar").read_bytes())
    found = DatasetEntry(
        "birds",
        "birds",
        "page",
        "none",
        "ask",
        (DatasetFile("birds/list.txt"),),
        (catalog.PhotoFolder("birds/images", 2),),
        Archive(f"{url}/birds.tar", packed),
    )
    return replace(found, **changes)


def test_photos_of_an_archive_are_extracted(tmp_path, file_server, monkeypatch, write_photo):
    found = make_photo_dataset(*file_server, write_photo)
    monkeypatch.setattr(catalog, "DATASETS", (found,))
    write_photo(tmp_path / "birds/images/b/mine.jpg")
    (tmp_path / "birds/images/b/2.jpg").write_bytes(b"")
    assert "downloaded" in catalog.prepare_dataset(tmp_path, "birds")
    assert catalog.check_dataset(tmp_path, "birds") == []
    images = tmp_path / "birds/images"
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.jpg"))
    assert names == ["a/1.jpg", "b/2.jpg", "b/mine.jpg"]


def test_archive_with_missing_photos_changes_nothing(tmp_path, file_server, write_photo):
    for path, count, match in [
        ("birds/images", 3, "2 of 3 photos"),
        ("birds/more", 1, "no birds/"),
    ]:
        wrong = make_photo_dataset(
            *file_server, write_photo, photos=(catalog.PhotoFolder(path, count),)
        )
        with pytest.raises(CorruptFileError, match=match):
            catalog.download_dataset(tmp_path, wrong)
        assert not (tmp_path / "birds").exists()


def test_errors_of_the_reader_are_problems_of_the_dataset(tmp_path, monkeypatch, write_photo):
    """Event-8 in its official layout; the reader runs and every photo is opened."""
    from overt.data.uiuc_sports import FOLDER

    few = replace(catalog.find_dataset("event8"), photos=(catalog.PhotoFolder(FOLDER, 8),))
    monkeypatch.setattr(catalog, "DATASETS", (few,))
    for name in "climbing badminton bocce croquet polo rowing sailing snowboarding".split():
        write_photo(tmp_path / FOLDER / name / "1.jpg")
    assert (
        catalog.available_datasets(tmp_path) == ("event8",)
        and catalog.check_dataset(tmp_path, "event8") == []
    )
    broken = tmp_path / FOLDER / "polo" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])
    (problem,) = catalog.check_dataset(tmp_path, "event8")
    assert str(broken) in problem
    broken.rename(tmp_path / FOLDER / "rowing" / "2.jpg")
    (problem,) = catalog.check_dataset(tmp_path, "event8")
    assert "polo has no photos" in problem


WITHOUT_READER = (*catalog.WITHOUT_FOLDER, "cifar10", "cifar100", "trec6")  # checked by record


@pytest.mark.parametrize(
    "name", [each.name for each in catalog.DATASETS if each.name not in WITHOUT_READER]
)
def test_readers_of_every_dataset_raise_on_missing_files(tmp_path, name):
    found = catalog.find_dataset(name)
    assert name not in catalog.available_datasets(tmp_path)
    assert catalog.check_dataset(tmp_path, name) and found.readers
    for reader in found.readers:
        with pytest.raises(UserError, match="missing"):
            reader(tmp_path)


@pytest.mark.parametrize("name", ["caltech101", "caltech256", "event8", "action40", "discovery"])
def test_prepare_downloads_nothing_without_an_archive(tmp_path, name, monkeypatch):
    monkeypatch.setattr(catalog, "download", lambda *a, **b: pytest.fail("downloaded"))
    with pytest.raises(UserError, match=rf"{name} .*downloaded.* Download"):
        catalog.prepare_dataset(tmp_path, name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "trec6", "osie", "daquar", "flickr8k"])
def test_real_datasets_have_no_problems(data_root, needs, name):
    needs(data_root, name)
    assert catalog.check_dataset(data_root, name) == []


def test_urls_are_https_and_checksums_are_described():
    for each in catalog.DATASETS:
        urls = [file.url for file in each.files if file.url is not None]
        urls += [each.archive.url] if each.archive is not None else []
        assert all(url.startswith("https://") for url in urls), each.name
    assert catalog.describe_checksum(catalog.find_dataset("svhn")) == "SHA-256"
    assert (
        catalog.describe_checksum(catalog.find_dataset("stl10"))
        == "MD5, which detects accidents but not forgery"
    )


def test_download_message_contains_the_checksum_type(tmp_path, file_server):
    toy_dataset = make_toy_dataset(*file_server)
    message = catalog.download_dataset(tmp_path, toy_dataset)
    assert message.endswith(" and checked by SHA-1, which detects accidents but not forgery.")
