"""1,000 mutations over all kinds of artefacts: none read with other values, one exception class."""

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from overt import files, models
from overt.attention import AttentionMap, grid
from overt.data import features
from overt.data.vocabulary import Vocabulary
from overt.errors import Damaged
from overt.recipes import folder as run_folder
from overt.show.export import load_map, save_map
from overt.show.sample import Sample, load_gallery, save_gallery
from overt.supervise.surrogate.kept import Surrogates
from overt.supervise.surrogate.making import surrogates
from overt.supervise.surrogate.masks import Grids
from overt.train import checkpoint
from overt.train.checkpoint import State
from tests import toys as runs
from tests.data import test_features as cached
from tests.supervise.surrogate.toys import Planted, Toys
from tests.train import toys
from tests.trust import lives
from tests.trust.mutants import mutate, picture


@dataclass(frozen=True)
class Kind:
    """An artefact: `write(path, seed)` makes one, `read(path)` gives all its values as bytes."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], bytes]


def of_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(name.encode() + one.numpy().tobytes() for name, one in sorted(tensors.items()))


def write_checkpoint(path: Path, seed: int) -> None:
    net, sets = toys.make(seed=seed)
    state = State("train", seed, step=1)
    checkpoint.save(path, state, net, {name: one.optimizer for name, one in sets.items()})


def read_checkpoint(path: Path) -> bytes:
    net, sets = toys.make(seed=9)
    optimizers = {name: one.optimizer for name, one in sets.items()}
    state = checkpoint.load(path / "step-000000001", net, optimizers)
    groups = [optimizer.state_dict()["param_groups"] for optimizer in optimizers.values()]
    return of_tensors(net.state_dict()) + repr((state, groups)).encode()


def write_export(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    words = {"vocabulary.json": {"words": ["a", "b", str(seed)]}}
    models.SmallCNN(3, width=0.0625).save_pretrained(path / "model", words)


def read_export(path: Path) -> bytes:
    net = models.SmallCNN.from_pretrained(path / "model")
    words = files.read_json(path / "model/vocabulary.json")
    return of_tensors(net.state_dict()) + repr((words, net.config())).encode()


def write_surrogates(path: Path, seed: int) -> None:
    options = {"masks": Grids(4, 2), "shard": 3, "batch": 3}
    surrogates(Planted(good=5 + seed), Toys(4), path / "surrogates", **options)


def read_surrogates(path: Path) -> bytes:
    found = Surrogates(path / "surrogates")
    found.check()
    ids = found.ids
    parts = (found.target(ids).values, found.mask(ids), found.base(ids), found.best(ids))
    return b"".join(part.numpy().tobytes() for part in parts) + repr(ids).encode()


def write_features(path: Path, seed: int) -> None:
    key = features.Key("toy", str(seed), "none", "123")
    features.build(path / "cache", key, cached.Toy(), cached.encode, shard=5, batch=5)


def read_features(path: Path) -> bytes:
    found = features.FeatureCache(path / "cache")
    found.check()
    ids = tuple(found._at)
    return found.get(ids).numpy().tobytes() + repr((ids, found.key)).encode()


def write_gallery(path: Path, seed: int) -> None:
    image = np.full((6, 6, 3), 7 + seed, np.uint8)
    cells = np.full((2, 2), 0.25)
    save_gallery(path / "gallery", [Sample(id=str(seed), image=image, cells=cells, text="a text")])


def read_gallery(path: Path) -> bytes:
    (found,) = load_gallery(path / "gallery")
    return found.image.tobytes() + found.cells.tobytes() + repr((found.id, found.text)).encode()


def write_results(path: Path, seed: int) -> None:
    results = runs.leave(path / "run", runs.TABLE.rows[0].recipe(), seed)
    files.write_arrays(path / "run/samples.npz", {"right": np.arange(20) + seed})
    assert results["seed"] == seed
    files.seal(path / "run", ["results.json", "samples.npz"])


def read_results(path: Path) -> bytes:
    files.verify(path / "run")
    held = run_folder.look(path / "run")
    assert held is not None
    samples = files.read_arrays(path / "run/samples.npz")
    return repr(held.results).encode() + samples["right"].tobytes()


def write_words(path: Path, seed: int) -> None:
    Vocabulary(("one", "two", f"word{seed}")).save(path / "words.json")


def write_map(path: Path, seed: int) -> None:
    scores = torch.linspace(0, 1, 16).reshape(1, 1, 1, 1, 16) * (1 + seed)
    save_map(path / "map.npz", AttentionMap.from_scores(scores, grid(4, 4)))


def read_map(path: Path) -> bytes:
    found = load_map(path / "map.npz")
    said = (found.keys.spans, found.queries.spans, found.kind, found.form, found.mask)
    return found.values.numpy().tobytes() + repr(said).encode()


KINDS = {
    "checkpoint": Kind(write_checkpoint, read_checkpoint),
    "exported model": Kind(write_export, read_export),
    "surrogates": Kind(write_surrogates, read_surrogates),
    "feature cache": Kind(write_features, read_features),
    "gallery": Kind(write_gallery, read_gallery),
    "results": Kind(write_results, read_results),
    "vocabulary": Kind(
        write_words, lambda path: repr(Vocabulary.load(path / "words.json").words).encode()
    ),
    "map": Kind(write_map, read_map),
}
ALONE = {"vocabulary", "map"}  # one file: another whole one in its place cannot be told


class Hung(BaseException):
    """A reader that would wait for ever, as for somebody to write into a pipe."""


def hung(number: int, frame: object) -> None:
    raise Hung


def survey(kind: str, parent: Path, count: int, patience: int) -> dict[str, object]:
    """Mutate an artefact `count` times: how often it was read with other values, what was raised.

    Mutations that leave the values alone, such as a new file beside them, may be read.
    """
    one, chance = KINDS[kind], random.Random(kind)
    for name, seed in (("true", 0), ("other", 1)):
        (parent / name).mkdir(parents=True)
        one.write(parent / name, seed)
    wanted = one.read(parent / "true")
    assert one.read(parent / "other") != wanted
    before = inside(parent / "true")
    silent = made = 0
    raised: set[str] = set()
    signal.signal(signal.SIGALRM, hung)
    mutant = parent / "mutant"
    while made < count:
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(parent / "true", mutant)
        change(mutant, parent / "other", chance, alone=kind in ALONE)
        if inside(mutant) == before:
            continue  # zeros over zeros
        made += 1
        signal.alarm(patience)
        try:
            silent += one.read(mutant) != wanted
        except (Exception, Hung) as error:
            raised.add(type(error).__name__)
        signal.alarm(0)
    return {"silent": silent, "raised": sorted(raised)}


def inside(folder: Path) -> dict[Path, object]:
    return {path.relative_to(folder): had for path, had in picture(folder).items()}


def change(mutant: Path, other: Path, chance: random.Random, alone: bool) -> None:
    """Any change to a folder of files; to a file alone any change of its bytes."""
    if not alone:
        mutate(mutant, other, chance)
        return
    (path,) = mutant.iterdir()
    data = bytearray(path.read_bytes())
    where = chance.randrange(len(data))
    match chance.randrange(4):
        case 0 | 1:
            data[where] ^= 1 << chance.randrange(8)
        case 2:
            del data[where:]
        case 3:
            data[where : where + 8] = chance.randbytes(8)
    path.write_bytes(data)


def forget_checksums() -> None:
    """Read as most programs do: what the formats accept is taken for good."""
    patch = pytest.MonkeyPatch()
    for module in (files, features):
        patch.setattr(module, "verify", lambda folder: {})
    patch.setattr("overt.supervise.surrogate.kept.verify", lambda folder: {})
    patch.setattr(files, "check", lambda path: None)
    patch.setattr("overt.data.vocabulary.read_sealed", files.read_json)
    patch.setattr("zipfile.ZipExtFile._update_crc", lambda self, data: None)


def surveyed(kind: str, parent: Path, count: int, naive: bool) -> dict[str, object]:
    """The survey in a process of its own, so that a crash is one more thing to be found."""

    def work() -> None:
        if naive:
            forget_checksums()
        found = survey(kind, parent, count, patience=2 if naive else 120)
        (parent / "found.json").write_text(json.dumps(found))

    parent.mkdir(parents=True)
    code = lives.outcome(lives.forked(work))
    if code:
        return {"silent": 0, "raised": [f"exit {code}"]}
    return json.loads((parent / "found.json").read_text())


@pytest.mark.long
def test_no_mutated_artefact_is_read_with_other_values(tmp_path, reached, full) -> None:
    each = 125 if full else 25
    found = {kind: surveyed(kind, tmp_path / kind / "ours", each, naive=False) for kind in KINDS}
    assert {kind: one["silent"] for kind, one in found.items()} == dict.fromkeys(KINDS, 0)
    assert {name for one in found.values() for name in one["raised"]} == {Damaged.__name__}
    naive = {kind: surveyed(kind, tmp_path / kind / "naive", each, naive=True) for kind in KINDS}
    fooled = sum(int(str(one["silent"])) for one in naive.values())
    classes = {name for one in naive.values() for name in one["raised"]}
    assert fooled > 0 and len(classes) > 1
    total = each * len(KINDS)
    reached(
        9,
        "1,000 mutations: 0 silent, 0 crash, 0 hang; one exception class",
        f"{total} mutations of {len(KINDS)} kinds ({', '.join(KINDS)}): 0 silent, 0 crash, 0 hang; "
        f"{Damaged.__name__} alone",
        f"{fooled} of {total} silent, {len(classes)} classes: {', '.join(sorted(classes))}",
    )


def test_the_survey_sees_an_artefact_that_was_changed(tmp_path) -> None:
    """Every kind can be read, two of a kind differ, and its bytes are all that is read."""
    for name, kind in KINDS.items():
        for seed in (0, 1):
            (tmp_path / name / str(seed)).mkdir(parents=True)
            kind.write(tmp_path / name / str(seed), seed)
        values = [kind.read(tmp_path / name / str(seed)) for seed in (0, 1)]
        shutil.copytree(tmp_path / name / "0", tmp_path / name / "copy")
        assert values[0] != values[1] and kind.read(tmp_path / name / "copy") == values[0]
        assert hashlib.sha256(values[0]).digest() != hashlib.sha256(values[1]).digest()
