"""The data sets there are: what files each has, how to tell that they are right, how to get them.

Light enough for `overt data list` and `overt doctor`: heavy packages are imported when needed.
"""

import difflib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from overt.data.download import Progress, download, extract, matches
from overt.errors import BadInput, Damaged
from overt.files import lock

Look = Callable[[Path], Iterator[str]]
Open = Callable[[Path], Any]

DOWNLOADS = ".downloads"
CIFAR_PIXELS = 3072


@dataclass(frozen=True)
class File:
    """One file below the root: its exact size and checksum where they are published."""

    path: str
    size: int | None = None
    checksum: str | None = None
    url: str | None = None
    look: Look | None = None  # a closer look at the contents, that can name the record


@dataclass(frozen=True)
class Photos:
    """A folder of pictures, in folders of their own or not, and how many there are."""

    path: str
    count: int


@dataclass(frozen=True)
class Archive:
    """An archive that unpacks to the files of a data set."""

    url: str
    checksum: str


@dataclass(frozen=True)
class DataSet:
    """A data set in words and files. `how` says how to get it where no program can.

    `opens` are the readers of its parts: they find what no size and no checksum can.
    """

    name: str
    what: str
    page: str
    licence: str
    how: str
    files: tuple[File, ...] = ()
    photos: tuple[Photos, ...] = ()
    archive: Archive | None = None
    opens: tuple[Open, ...] = ()


def root_of(given: Path | str | None = None) -> Path:
    """The folder of data sets: the one given, or the one that OVERT_DATA names."""
    found = given or os.environ.get("OVERT_DATA")
    if not found:
        raise BadInput("No data folder is named: give --data FOLDER or set OVERT_DATA.")
    return Path(found)


def find(name: str) -> DataSet:
    """The description of that name; another is `BadInput` with the nearest names, or all."""
    for each in SETS:
        if each.name == name:
            return each
    known = [each.name for each in SETS]
    near = difflib.get_close_matches(name[:80], known, cutoff=0.5)
    offer = f"the nearest: {', '.join(near)}" if near else f"there are {', '.join(known)}"
    raise BadInput(f"There is no data set {name!r}; {offer}.")


def present(root: Path) -> tuple[str, ...]:
    """The names of the data sets whose files are all there; `check` says if they are right."""
    return tuple(each.name for each in SETS if not list(_missing(root, each)))


def check(root: Path, name: str) -> list[str]:
    """Every problem of a data set in one sentence each, with the file and the index; none is good.

    Files are compared with their published size and checksum and looked through record by record.
    """
    chosen = find(name)
    missing = list(_missing(root, chosen))
    if missing or name in MADE:
        return missing
    if name == "easyvqa":
        return _check_easyvqa(root)
    problems: list[str] = []
    for file in chosen.files:
        problems += _check_file(root / file.path, file, chosen)
    for photos in chosen.photos:
        problems += _check_photos(root / photos.path, photos)
    if not problems and chosen.opens:
        problems += _check_opened(root, chosen)
    return problems


def prepare(root: Path, name: str, on_progress: Progress | None = None) -> str:
    """Get a data set and say in a sentence what was done; one that is there and right is kept.

    Scenes are made, in the number that the demo asks for, and kept in the cache.
    """
    chosen = find(name)
    if name == "scenes":
        return _make_scenes(on_progress)
    if name in MADE:
        return f"{name} is made when it is wanted; there is nothing to prepare."
    if not check(root, name):
        where = easyvqa_folder(root) if name == "easyvqa" else root
        return f"{name} is ready in {where}."
    if chosen.archive is None and not (chosen.files and all(file.url for file in chosen.files)):
        raise BadInput(
            f"{name} cannot be fetched by a program. {chosen.how} Its page: {chosen.page}"
        )
    return fetch(root, chosen, on_progress)


def fetch(root: Path, chosen: DataSet, on_progress: Progress | None = None) -> str:
    """Download a data set below `root`; its files appear there only when all of them are right."""
    work = root / DOWNLOADS / chosen.name
    ready = work / "ready"
    with lock(work):
        if chosen.archive is not None:
            path = work / chosen.archive.url.rsplit("/", 1)[-1]
            download(chosen.archive.url, path, chosen.archive.checksum, on_progress)
            shutil.rmtree(ready, ignore_errors=True)
            extract(path, ready)
        for file in chosen.files:
            if file.url is not None:
                download(file.url, ready / file.path, file.checksum, on_progress)
            if not (ready / file.path).is_file():
                raise Damaged(f"{chosen.page}: what was fetched has no {file.path}.")
            for problem in _check_file(ready / file.path, file, chosen):
                raise Damaged(f"What was fetched is not right: {problem}")
        for photos in chosen.photos:
            if not (ready / photos.path).is_dir():
                raise Damaged(f"{chosen.page}: what was fetched has no {photos.path}.")
            for problem in _check_photos(ready / photos.path, photos):
                raise Damaged(f"What was fetched is not right: {problem}")
        for file in chosen.files:
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(ready / file.path, target)
        for photos in chosen.photos:
            _move_photos(ready / photos.path, root / photos.path)
        shutil.rmtree(work, ignore_errors=True)
    return f"{chosen.name} was fetched into {root}."


def easyvqa_folder(root: Path | str | None = None) -> Path:
    """Where easy-VQA lies: `root`, `root`/easy-vqa, or else in the installed package."""
    for folder in [] if root is None else [Path(root, "easy-vqa"), Path(root)]:
        if (folder / "train" / "questions.json").is_file():
            return folder
    package = importlib.util.find_spec("easy_vqa")
    if package is None or not package.submodule_search_locations:
        raise BadInput(f"easy-VQA is not there. {find('easyvqa').how}")
    return Path(next(iter(package.submodule_search_locations))) / "data"


def _missing(root: Path, chosen: DataSet) -> Iterator[str]:
    if chosen.name == "easyvqa":
        try:
            easyvqa_folder(root)
        except BadInput as problem:
            yield str(problem)
    for file in chosen.files:
        if not (root / file.path).is_file():
            yield f"{root / file.path} is missing."
    for photos in chosen.photos:
        if not (root / photos.path).is_dir():
            yield f"{root / photos.path} is missing."


def _check_file(path: Path, file: File, chosen: DataSet) -> Iterator[str]:
    size = path.stat().st_size
    if file.look is not None:
        found = list(file.look(path))
        yield from found
        if found:
            return
    if file.size is not None and size != file.size:
        yield f"{path} has {size} bytes, not {file.size}; get it again."
    elif not size:
        yield f"{path} is empty; get it again."
    elif file.checksum is not None and not matches(path, file.checksum):
        for other in chosen.files:
            if other.checksum is not None and matches(path, other.checksum):
                yield f"{path} holds what belongs into {other.path}; get it again."
                return
        yield f"{path} is not the published file: its checksum is not {file.checksum}."


def _check_photos(folder: Path, photos: Photos) -> Iterator[str]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    if len(found) < photos.count:
        yield f"{folder} has {len(found)} of {photos.count} photos; get the rest."
    for number, path in enumerate(found):
        if not path.stat().st_size:
            yield f"{path}, photo {number} of {len(found)}, is empty; get it again."


def _move_photos(ready: Path, folder: Path) -> None:
    """Put photos where they belong, over those of the same name; others stay."""
    for path in sorted(path for path in ready.rglob("*") if path.is_file()):
        target = folder / path.relative_to(ready)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)


def _check_opened(root: Path, chosen: DataSet) -> Iterator[str]:
    """What the readers of a set refuse, and each photo that cannot be decoded."""
    from overt.data.images import open_image

    for reader in chosen.opens:
        try:
            files = getattr(reader(root), "files", ())
        except (BadInput, Damaged) as problem:
            yield str(problem)
            continue
        for path in files:
            try:
                open_image(path)
            except (BadInput, Damaged) as problem:
                yield str(problem)


def _check_records(path: Path, limits: tuple[int, ...], records: int) -> Iterator[str]:
    """The records of a CIFAR file: their number, and labels within range."""
    length = len(limits) + CIFAR_PIXELS
    size = path.stat().st_size
    if size != records * length:
        yield f"{path} ends in record {size // length} with {size} bytes, not {records * length}."
        return
    with open(path, "rb") as file:
        data = file.read()
    for place, limit in enumerate(limits):
        labels = data[place::length]
        wrong = next((row for row, label in enumerate(labels) if label >= limit), None)
        if wrong is not None:
            yield f"{path}: record {wrong} has label {labels[wrong]}, not 0 to {limit - 1}."


def _check_lines(path: Path, records: int) -> Iterator[str]:
    """The lines of a TREC file: their number and form."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        if not re.fullmatch(rb"[A-Z]+:[a-z]+ .*\S\s*", line):
            yield f"{path}: line {number} is not `COARSE:fine question`."
            return
    if lines[-1] or len(lines) - 1 != records:
        yield f"{path} ends in line {len(lines)} of {records}; get it again."


def _check_easyvqa(root: Path) -> list[str]:
    from overt.data import easyvqa, images

    problems = []
    folder = easyvqa_folder(root)
    for part in ("train", "test"):
        try:
            easyvqa.read_questions(folder / part, easyvqa.read_answers(folder))
            for path in sorted((folder / part / "images").glob("*.png")):
                images.open_image(path)
        except (BadInput, Damaged) as problem:
            problems.append(str(problem))
    return problems


def _make_scenes(on_progress: Progress | None) -> str:
    from overt.data.scenes.store import Scenes, default_cache

    for split, count in SCENES.items():
        Scenes(split, SCENES_SEED, count, on_progress=on_progress)
    return f"scenes are ready in {default_cache()}: {sum(SCENES.values())} of them."


def _cifar(name: str, sha1: str, limits: tuple[int, ...], records: int) -> File:
    size = records * (len(limits) + CIFAR_PIXELS)
    look = partial(_check_records, limits=limits, records=records)
    return File(name, size, f"sha1:{sha1}", look=look)


def _trec(name: str, size: int, sha256: str, records: int) -> File:
    url = f"https://cogcomp.seas.upenn.edu/Data/QA/QC/{name}"
    look = partial(_check_lines, records=records)
    return File(f"trec/{name}", size, f"sha256:{sha256}", url, look)


def _opens(home: str, name: str, *splits: str) -> tuple[Open, ...]:
    """The readers of these splits, imported when they are called; a set without splits has ""."""

    def reader(root: Path, split: str) -> Any:
        opened = getattr(import_module(f"overt.data.{home}"), name)
        return opened(root, split) if split else opened(root)

    return tuple(partial(reader, split=split) for split in splits)


def _files(folder: str, *names: str) -> tuple[File, ...]:
    return tuple(File(f"{folder}/{name}") for name in names)


CIFAR_SHA1 = {
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}
SVHN_URL = "http://ufldl.stanford.edu/housenumbers"
SVHN_MD5 = {
    "train_32x32.mat": (182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test_32x32.mat": (64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
}
STL10_MD5 = {
    "train_X.bin": (138_240_000, "918c2871b30a85fa023e0c44e0bee87f"),
    "train_y.bin": (5_000, "5a34089d4802c674881badbb80307741"),
    "test_X.bin": (221_184_000, "7f263ba9f9e0b06b93213547f721ac82"),
    "test_y.bin": (8_000, "36f9794fa4beb8a2c72628de14fa638e"),
}
SCENES = {"train": 4000, "val": 100, "test": 504}  # as many as the demo asks for, to the scene
SCENES_SEED = 1
MADE = ("scenes", "sortclevr")  # by a program of ours
PROGRAMS = (*MADE, "easyvqa")  # nothing of theirs lies below the root

VQA1_FILES = tuple(
    f"{kind}.json"
    for part in ("train2014", "val2014")
    for kind in (f"OpenEnded_mscoco_{part}_questions", f"mscoco_{part}_annotations")
)
COCO = (Photos("coco/train2014", 82_783), Photos("coco/val2014", 40_504))


def _vqa(name: str, what: str, page: str, how: str, *files: str) -> DataSet:
    parts = ("train", "test") if "cp" in name else ("train", "val")
    return DataSet(
        name=name,
        what=what,
        page=page,
        licence="CC BY 4.0; photos belong to their owners",
        how=how,
        files=_files("vqa", *files),
        photos=COCO,
        opens=_opens("vqa", name, *parts),
    )


SETS: tuple[DataSet, ...] = (
    DataSet(
        name="scenes",
        what="questions about drawn scenes whose deciding evidence is known by intervention",
        page="made by overt itself",
        licence="that of overt",
        how="Nothing to get: scenes are made when they are wanted; `overt data prepare scenes` "
        "makes them now.",
    ),
    DataSet(
        name="sortclevr",
        what="196,000 questions about 9,800 drawn pictures of six coloured shapes, and any number "
        "more",
        page="https://arxiv.org/abs/1706.01427",
        licence="that of overt",
        how="Nothing to get: pictures are drawn when they are wanted, and nothing is kept.",
    ),
    DataSet(
        name="cifar10",
        what="60,000 pictures of 32 x 32 pixels in 10 classes",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="no licence stated; cite Krizhevsky 2009",
        how="`overt data prepare cifar10` fetches the binary version (170 MB).",
        files=tuple(
            _cifar(f"cifar-10-batches-bin/{stem}.bin", sha1, (10,), 10_000)
            for stem, sha1 in CIFAR_SHA1.items()
        ),
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    DataSet(
        name="cifar100",
        what="60,000 pictures of 32 x 32 pixels in 100 fine and 20 coarse classes",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="no licence stated; cite Krizhevsky 2009",
        how="`overt data prepare cifar100` fetches the binary version (161 MB).",
        files=(
            _cifar(
                "cifar-100-binary/train.bin",
                "e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
                (20, 100),
                50_000,
            ),
            _cifar(
                "cifar-100-binary/test.bin",
                "8fb6623e830365ff53cf14adec797474f5478006",
                (20, 100),
                10_000,
            ),
        ),
        archive=Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
        ),
    ),
    DataSet(
        name="svhn",
        what="99,289 digits of house numbers, 32 x 32 pixels",
        page="http://ufldl.stanford.edu/housenumbers/",
        licence="non-commercial use; cite Netzer et al. 2011",
        how="`overt data prepare svhn` fetches train and test (246 MB); extra_32x32.mat (1.3 GB) "
        "goes below svhn/ too, where it is wanted.",
        files=tuple(
            File(f"svhn/{name}", size, f"md5:{md5}", f"{SVHN_URL}/{name}")
            for name, (size, md5) in SVHN_MD5.items()
        ),
        opens=_opens("svhn", "Svhn", "train+val", "test"),
    ),
    DataSet(
        name="stl10",
        what="13,000 pictures of 96 x 96 pixels in 10 classes, and 100,000 without one",
        page="https://cs.stanford.edu/~acoates/stl10/",
        licence="no licence stated; cite Coates et al. 2011",
        how="`overt data prepare stl10` fetches the binary version (2.6 GB) and keeps the pictures "
        "with labels; unlabeled_X.bin goes below stl10_binary/ too, where it is wanted.",
        files=(
            *(
                File(f"stl10_binary/{name}", size, f"md5:{md5}")
                for name, (size, md5) in STL10_MD5.items()
            ),
            File("stl10_binary/fold_indices.txt"),
        ),
        archive=Archive(
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
            "md5:91f7769df0f17e558f3565bffb0c7dfb",
        ),
        opens=_opens("stl10", "Stl10", "train+val", "test"),
    ),
    DataSet(
        name="cub",
        what="11,788 photos of 200 kinds of birds, each with a box and 15 parts",
        page="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        licence="non-commercial research; photos belong to their owners",
        how="`overt data prepare cub` fetches CUB_200_2011.tgz (1.2 GB).",
        files=_files(
            "CUB_200_2011",
            "classes.txt",
            "images.txt",
            "image_class_labels.txt",
            "train_test_split.txt",
            "bounding_boxes.txt",
            "parts/parts.txt",
            "parts/part_locs.txt",
        ),
        photos=(Photos("CUB_200_2011/images", 11_788),),
        archive=Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "md5:97eceeb196236b17998738112f37df78",
        ),
        opens=_opens("cub", "Cub", "all"),
    ),
    DataSet(
        name="caltech101",
        what="8,677 photos of 101 kinds of things",
        page="https://data.caltech.edu/records/mzrjq-6wc02",
        licence="see its page; cite Fei-Fei et al. 2006",
        how="Fetch caltech-101.zip from its page, and unpack 101_ObjectCategories.tar.gz from it.",
        photos=(Photos("101_ObjectCategories", 8_677),),
        opens=_opens("caltech", "caltech101", "all"),
    ),
    DataSet(
        name="caltech256",
        what="29,780 photos of 256 kinds of things",
        page="https://data.caltech.edu/records/nyy15-4j048",
        licence="see its page; cite Griffin et al. 2007",
        how="Fetch 256_ObjectCategories.tar from its page, and unpack it.",
        photos=(Photos("256_ObjectCategories", 29_780),),
        opens=_opens("caltech", "caltech256", "all"),
    ),
    DataSet(
        name="event8",
        what="about 1,579 photos of 8 sports",
        page="http://vision.stanford.edu/lijiali/event_dataset/",
        licence="no licence stated; cite Li and Fei-Fei 2007",
        how="Fetch event_dataset.rar from its page, and put its eight folders of photos below "
        "event_dataset/.",
        photos=(Photos("event_dataset", 1_574),),
        opens=_opens("sports", "event8", "all"),
    ),
    DataSet(
        name="action40",
        what="9,532 photos of people doing one of 40 things",
        page="http://vision.stanford.edu/Datasets/40actions.html",
        licence="no licence stated; cite Yao et al. 2011",
        how="Fetch Stanford40_JPEGImages.zip and Stanford40_ImageSplits.zip from its page, and "
        "unpack both below stanford40/.",
        files=_files("stanford40/ImageSplits", "actions.txt"),
        photos=(Photos("stanford40/JPEGImages", 9_532),),
        opens=_opens("actions", "action40", "all"),
    ),
    DataSet(
        name="scene67",
        what="15,620 photos of 67 kinds of rooms",
        page="https://web.mit.edu/torralba/www/indoor.html",
        licence="research use; photos belong to their owners",
        how="Fetch indoorCVPR_09.tar, TrainImages.txt and TestImages.txt from its page, and put "
        "Images/ and both lists below indoorCVPR_09/.",
        files=_files("indoorCVPR_09", "TrainImages.txt", "TestImages.txt"),
        photos=(Photos("indoorCVPR_09/Images", 15_613),),
        opens=_opens("rooms", "scene67", "train+val", "test"),
    ),
    DataSet(
        name="discovery",
        what="300 photos of airplanes, cars and horses with masks drawn by hand",
        page="https://people.csail.mit.edu/mrub/ObjectDiscovery/",
        licence="research use; photos belong to their owners",
        how="Fetch ObjectDiscovery-data.zip from its page, and unpack it as ObjectDiscovery-data/.",
        photos=tuple(
            Photos(f"ObjectDiscovery-data/Data/{kind}100", 200)  # photos and masks
            for kind in ("Airplane", "Car", "Horse")
        ),
        opens=_opens("discovery", "ObjectDiscovery", "all"),
    ),
    DataSet(
        name="trec6",
        what="5,952 questions in 6 coarse and 50 fine classes",
        page="https://cogcomp.seas.upenn.edu/Data/QA/QC/",
        licence="no licence stated; cite Li and Roth 2002",
        how="`overt data prepare trec6` fetches the two files (0.4 MB).",
        files=(
            _trec(
                "train_5500.label",
                335_858,
                "9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3",
                5_452,
            ),
            _trec(
                "TREC_10.label",
                23_354,
                "033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e",
                500,
            ),
        ),
    ),
    DataSet(
        name="eraser",
        what="texts to classify with the words that decide, seven sets (movies and others)",
        page="https://www.eraserbenchmark.com",
        licence="see its page; cite DeYoung et al. 2020",
        how="Fetch the sets you want from its page and unpack them below eraser/, a folder each; "
        "`check` looks at movies.",
        files=_files("eraser/movies", "train.jsonl", "val.jsonl", "test.jsonl"),
        opens=_opens("eraser", "Eraser", "train", "val", "test"),
    ),
    DataSet(
        name="easyvqa",
        what="48,248 simple questions about 5,000 pictures of one coloured shape",
        page="https://github.com/vzhou842/easy-VQA",
        licence="see its page",
        how="Install the package that carries it: pip install easy-vqa.",
    ),
    _vqa(
        "vqa1",
        "369,861 questions about 123,287 photos, with ten answers each",
        "https://visualqa.org/vqa_v1_download.html",
        "Unpack questions and annotations of train and val below vqa/, and the photos of COCO 2014 "
        "below coco/; test needs its questions and coco/test2015/.",
        *VQA1_FILES,
    ),
    _vqa(
        "vqa2",
        "658,111 questions about 123,287 photos, with ten answers each",
        "https://visualqa.org/download.html",
        "Unpack questions and annotations of train and val below vqa/, and the photos of COCO 2014 "
        "below coco/; test needs its questions and coco/test2015/.",
        *(
            f"v2_{kind}.json"
            for part in ("train2014", "val2014")
            for kind in (f"OpenEnded_mscoco_{part}_questions", f"mscoco_{part}_annotations")
        ),
    ),
    _vqa(
        "vqacp1",
        "about 370,000 questions of VQA v1, parted so that answers have other priors at test time",
        "https://computing.ece.vt.edu/~aish/vqacp/",
        "Fetch the four files of v1 from its page and put them below vqa/, and the photos of COCO "
        "2014 below coco/.",
        *(
            f"vqacp_v1_{part}_{kind}.json"
            for part in ("train", "test")
            for kind in ("questions", "annotations")
        ),
    ),
    _vqa(
        "vqacp2",
        "658,111 questions of VQA v2, parted so that answers have other priors at test time",
        "https://computing.ece.vt.edu/~aish/vqacp/",
        "Fetch the four files of v2 from its page and put them below vqa/, and the photos of COCO "
        "2014 below coco/.",
        *(
            f"vqacp_v2_{part}_{kind}.json"
            for part in ("train", "test")
            for kind in ("questions", "annotations")
        ),
    ),
    DataSet(
        name="vqa_hat",
        what="62,597 maps of where people looked to answer 59,849 questions of VQA v1",
        page="https://abhishekdas.com/vqa-hat/",
        licence="no licence stated; cite Das et al. 2016",
        how="Fetch vqahat_train.zip and vqahat_val.zip from its page, and unpack both below "
        "vqa-hat/; questions and photos are those of vqa1.",
        files=_files("vqa", *VQA1_FILES),
        photos=(
            Photos("vqa-hat/vqahat_train", 58_475),
            Photos("vqa-hat/vqahat_val", 4_122),
            *COCO,
        ),
        opens=_opens("hat", "VqaHat", "train", "val"),
    ),
    DataSet(
        name="clevr",
        what="999,968 questions about 100,000 rendered scenes, with the programs that answer them",
        page="https://cs.stanford.edu/people/jcjohns/clevr/",
        licence="CC BY 4.0",
        how="Fetch CLEVR_v1.0.zip (18 GB) from its page, and unpack it.",
        files=_files(
            "CLEVR_v1.0",
            *(f"questions/CLEVR_{part}_questions.json" for part in ("train", "val", "test")),
            *(f"scenes/CLEVR_{part}_scenes.json" for part in ("train", "val")),
        ),
        photos=(
            Photos("CLEVR_v1.0/images/train", 70_000),
            Photos("CLEVR_v1.0/images/val", 15_000),
            Photos("CLEVR_v1.0/images/test", 15_000),
        ),
        opens=_opens("clevr", "Clevr", "train", "val", "test"),
    ),
    DataSet(
        name="daquar",
        what="12,468 human questions about 1,449 indoor photos",
        page="https://www.mpi-inf.mpg.de/departments/computer-vision-and-machine-learning/"
        "research/vision-and-language/visual-turing-challenge",
        licence="research use; photos are those of NYU Depth v2",
        how="Put data.csv, train_images_list.txt, test_images_list.txt and the photos in images/ "
        "below daquar/.",
        files=_files("daquar", "data.csv", "train_images_list.txt", "test_images_list.txt"),
        photos=(Photos("daquar/images", 1_449),),
        opens=_opens("daquar", "Daquar", "train+val", "test"),
    ),
    DataSet(
        name="wordnet",
        what="82,115 senses of English nouns and what they are kinds of, for the measure WUPS",
        page="https://wordnet.princeton.edu/download",
        licence="WordNet 3.0 license: free with its notice",
        how="Fetch the database files of version 3.0 from its page, and put index.noun, data.noun "
        "and noun.exc below wordnet/; some systems have them as a package (wordnet-base).",
        files=_files("wordnet", "index.noun", "data.noun", "noun.exc"),
        opens=_opens("wordnet", "WordNet", ""),
    ),
    DataSet(
        name="flickr8k",
        what="8,000 photos with five captions each, and human judgements of captions",
        page="https://hockenmaier.cs.illinois.edu/8k-pictures.html",
        licence="research use; photos belong to their owners",
        how="Ask for it on its page, and unpack both archives below flickr8k/.",
        files=_files(
            "flickr8k",
            "Flickr8k.token.txt",
            "Flickr_8k.trainImages.txt",
            "Flickr_8k.devImages.txt",
            "Flickr_8k.testImages.txt",
            "ExpertAnnotations.txt",
        ),
        photos=(Photos("flickr8k/Flicker8k_Dataset", 8_000),),
        opens=_opens("captions", "flickr8k", "train", "val", "test"),
    ),
    DataSet(
        name="coco_captions",
        what="616,767 captions of 123,287 photos of COCO, in the splits of Karpathy",
        page="https://cs.stanford.edu/people/karpathy/deepimagesent/",
        licence="CC BY 4.0; photos belong to their owners",
        how="Put dataset_coco.json (of caption_datasets.zip) below captions/, and the photos of "
        "COCO 2014 below coco/; dataset_flickr8k.json is read as well.",
        files=_files("captions", "dataset_coco.json"),
        photos=COCO,
        opens=_opens("captions", "karpathy", "train", "val", "test"),
    ),
    DataSet(
        name="flickr30k_captions",
        what="155,070 captions of 31,014 photos of Flickr30k, in the splits of Karpathy",
        page="https://cs.stanford.edu/people/karpathy/deepimagesent/",
        licence="research use; photos belong to their owners",
        how="Put dataset_flickr30k.json (of caption_datasets.zip) below captions/, and the photos, "
        "which one asks for at https://hockenmaier.cs.illinois.edu/DenotationGraph, below "
        "flickr30k_entities/images/.",
        files=_files("captions", "dataset_flickr30k.json"),
        photos=(Photos("flickr30k_entities/images", 31_014),),
        opens=_opens("captions", "flickr30k", "train", "val", "test"),
    ),
    DataSet(
        name="flickr30k_entities",
        what="14,481 phrases of the test split with boxes, and pairs of phrases",
        page="https://github.com/BryanPlummer/flickr30k_entities",
        licence="research use; photos belong to their owners",
        how="Put annotation_test.json, vgp_pairs.json, images.json and the photos in images/ below "
        "flickr30k_entities/.",
        files=_files("flickr30k_entities", "annotation_test.json", "vgp_pairs.json", "images.json"),
        photos=(Photos("flickr30k_entities/images", 285),),
        opens=_opens("phrases", "flickr30k_phrases", "test"),
    ),
    DataSet(
        name="coco",
        what="118,287 + 5,000 photos with every thing of 80 kinds outlined (COCO 2017)",
        page="https://cocodataset.org",
        licence="CC BY 4.0; photos belong to their owners",
        how="Unpack annotations_trainval2017.zip to coco/annotations/, and the photos to "
        "coco/train2017/ and coco/val2017/; `check` looks at val. 2014 is read as well.",
        files=_files("coco/annotations", "instances_val2017.json"),
        photos=(Photos("coco/val2017", 5_000),),
        opens=_opens("coco", "coco_objects", "val"),
    ),
    DataSet(
        name="voc",
        what="9,963 photos with the boxes of things of 20 kinds, and outlines for some (VOC 2007)",
        page="http://host.robots.ox.ac.uk/pascal/VOC/",
        licence="no licence stated; cite Everingham et al. 2010",
        how="Unpack trainval and test of VOC 2007 to VOCdevkit/VOC2007/; 2012 is read as well.",
        files=_files("VOCdevkit/VOC2007/ImageSets/Main", "trainval.txt", "test.txt"),
        photos=(Photos("VOCdevkit/VOC2007/JPEGImages", 9_963),),
        opens=_opens("voc", "voc_boxes", "trainval", "test"),
    ),
    DataSet(
        name="pets",
        what="7,349 photos of cats and dogs of 37 breeds, each cut out by hand",
        page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        licence="CC BY-SA 4.0; photos belong to their owners",
        how="Unpack images.tar.gz and annotations.tar.gz of its page below oxford-iiit-pet/.",
        files=_files("oxford-iiit-pet/annotations", "trainval.txt", "test.txt"),
        photos=(Photos("oxford-iiit-pet/annotations/trimaps", 7_390),),
        opens=_opens("pets", "oxford_pets", "trainval", "test"),
    ),
    DataSet(
        name="osie",
        what="700 photos with the eye fixations of 15 people each",
        page="https://github.com/NUS-VIP/predicting-human-gaze-beyond-pixels",
        licence="MIT",
        how="Put fixations.json and the photos in images/ below osie/.",
        files=_files("osie", "fixations.json"),
        photos=(Photos("osie/images", 700),),
        opens=_opens("osie", "Osie", "all"),
    ),
    DataSet(
        name="refcoco",
        what="expressions that refer to one thing, with boxes (test splits, no photos)",
        page="https://github.com/lichengunc/refer",
        licence="see its page; expressions are about photos of COCO",
        how="Put the four *_test*.json files below refcoco/.",
        files=_files(
            "refcoco",
            "refcoco+_testA.json",
            "refcoco+_testB.json",
            "refcoco_test.json",
            "refcocog_test.json",
        ),
        opens=_opens("phrases", "refcoco", "testA", "testB"),
    ),
    DataSet(
        name="yelp_hat",
        what="4,853 human attention maps over 1,545 restaurant reviews",
        page="https://github.com/cansusen/Human-Attention-for-Text-Classification",
        licence="no licence stated; cite Sen et al. 2020",
        how="Put the four ham_part*.csv files of its page below yelp_hat/.",
        files=_files(
            "yelp_hat",
            "ham_part1(50words).csv",
            "ham_part6(100words).csv",
            "ham_part7.csv",
            "ham_part8(200words).csv",
        ),
        opens=_opens("yelp", "YelpHat", "all"),
    ),
)
