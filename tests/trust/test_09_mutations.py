"""1,000 mutations of all artifacts: none is read with other values, one exception class."""

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

from overt import io, nn
from overt.attention import AttentionMap, grid
from overt.data import feature_cache
from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError
from overt.experiments import run_folder
from overt.targets.surrogate.generate import generate_surrogates
from overt.targets.surrogate.masks import GridMasks
from overt.targets.surrogate.store import Surrogates
from overt.train import checkpoint
from overt.train.checkpoint import TrainState
from overt.viz.export import load_map, save_map
from overt.viz.gallery_sample import GallerySample, load_gallery, save_gallery
from tests import toys as runs
from tests.data import test_feature_cache as cached
from tests.targets.surrogate.toys import Planted, Toys
from tests.train import toys
from tests.trust import child_process
from tests.trust.mutants import mutate, snapshot


@dataclass(frozen=True)
class Kind:
    """An artifact: `write(path, seed)` writes one, `read(path)` returns its values as bytes."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], bytes]


def tensor_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return b"".join(name.encode() + one.numpy().tobytes() for name, one in sorted(tensors.items()))


def write_checkpoint(path: Path, seed: int) -> None:
    net, sets = toys.make(seed=seed)
    state = TrainState("train", seed, step=1)
    checkpoint.save(path, state, net, {name: one.optimizer for name, one in sets.items()})


def read_checkpoint(path: Path) -> bytes:
    net, sets = toys.make(seed=9)
    optimizers = {name: one.optimizer for name, one in sets.items()}
    state = checkpoint.load(path / "step-000000001", net, optimizers)
    groups = [optimizer.state_dict()["param_groups"] for optimizer in optimizers.values()]
    return tensor_bytes(net.state_dict()) + repr((state, groups)).encode()


def write_export(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    words = {"vocabulary.json": {"words": ["a", "b", str(seed)]}}
    nn.SmallCNN(3, width=0.0625).save_pretrained(path / "model", words)


def read_export(path: Path) -> bytes:
    net = nn.SmallCNN.from_pretrained(path / "model")
    words = io.read_json(path / "model/vocabulary.json")
    return tensor_bytes(net.state_dict()) + repr((words, net.config())).encode()


def write_surrogates(path: Path, seed: int) -> None:
    options = {"masks": GridMasks(4, 2), "shard": 3, "batch": 3}
    generate_surrogates(Planted(good=5 + seed), Toys(4), path / "surrogates", **options)


def read_surrogates(path: Path) -> bytes:
    found = Surrogates(path / "surrogates")
    found.check()
    ids = found.ids
    parts = (found.target(ids).values, found.mask(ids), found.base(ids), found.best(ids))
    return b"".join(part.numpy().tobytes() for part in parts) + repr(ids).encode()


def write_features(path: Path, seed: int) -> None:
    key = feature_cache.FeatureKey("toy", str(seed), "none", "123")
    feature_cache.build_feature_cache(
        path / "cache", key, cached.Toy(), cached.encode, shard=5, batch=5
    )


def read_features(path: Path) -> bytes:
    found = feature_cache.FeatureCache(path / "cache")
    found.check()
    ids = tuple(found._at)
    return found.get(ids).numpy().tobytes() + repr((ids, found.key)).encode()


def write_gallery(path: Path, seed: int) -> None:
    image = np.full((6, 6, 3), 7 + seed, np.uint8)
    cells = np.full((2, 2), 0.25)
    save_gallery(
        path / "gallery", [GallerySample(id=str(seed), image=image, cells=cells, text="a text")]
    )


def read_gallery(path: Path) -> bytes:
    (found,) = load_gallery(path / "gallery")
    return found.image.tobytes() + found.cells.tobytes() + repr((found.id, found.text)).encode()


def write_results(path: Path, seed: int) -> None:
    results = runs.write_run_folder(path / "run", runs.TABLE.rows[0].recipe(), seed)
    io.write_arrays(path / "run/samples.npz", {"right": np.arange(20) + seed})
    assert results["seed"] == seed
    io.write_manifest(path / "run", ["results.json", "samples.npz"])


def read_results(path: Path) -> bytes:
    io.verify(path / "run")
    run = run_folder.read_run(path / "run")
    assert run is not None
    samples = io.read_arrays(path / "run/samples.npz")
    return repr(run.results).encode() + samples["right"].tobytes()


def write_words(path: Path, seed: int) -> None:
    Vocabulary(("one", "two", f"word{seed}")).save(path / "words.json")


def write_map(path: Path, seed: int) -> None:
    scores = torch.linspace(0, 1, 16).reshape(1, 1, 1, 1, 16) * (1 + seed)
    save_map(path / "map.npz", AttentionMap.from_scores(scores, grid(4, 4)))


def read_map(path: Path) -> bytes:
    found = load_map(path / "map.npz")
    attributes = (found.keys.spans, found.queries.spans, found.kind, found.form, found.mask)
    return found.values.numpy().tobytes() + repr(attributes).encode()


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
SINGLE_FILES = {"vocabulary", "map"}  # one file: another valid file in its place cannot be detected


class ReadTimeout(BaseException):
    """A reader that does not end, for example on a pipe without a writer."""


def raise_timeout(number: int, frame: object) -> None:
    raise ReadTimeout


def mutate_and_read(kind: str, parent: Path, count: int, timeout: int) -> dict[str, object]:
    """Mutate an artifact `count` times; count reads with other values and collect exceptions.

    Mutations that do not change the values, such as an additional file, may be read.
    """
    one, rng = KINDS[kind], random.Random(kind)
    for name, seed in (("true", 0), ("other", 1)):
        (parent / name).mkdir(parents=True)
        one.write(parent / name, seed)
    expected = one.read(parent / "true")
    assert one.read(parent / "other") != expected
    before = relative_snapshot(parent / "true")
    silent = made = 0
    raised: set[str] = set()
    signal.signal(signal.SIGALRM, raise_timeout)
    mutant = parent / "mutant"
    while made < count:
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(parent / "true", mutant)
        change(mutant, parent / "other", rng, single_file=kind in SINGLE_FILES)
        if relative_snapshot(mutant) == before:
            continue  # nothing changed
        made += 1
        signal.alarm(timeout)
        try:
            silent += one.read(mutant) != expected
        except (Exception, ReadTimeout) as error:
            raised.add(type(error).__name__)
        signal.alarm(0)
    return {"silent": silent, "raised": sorted(raised)}


def relative_snapshot(folder: Path) -> dict[Path, object]:
    return {path.relative_to(folder): content for path, content in snapshot(folder).items()}


def change(mutant: Path, other: Path, rng: random.Random, single_file: bool) -> None:
    """Mutate a folder of files, or the bytes of a single file."""
    if not single_file:
        mutate(mutant, other, rng)
        return
    (path,) = mutant.iterdir()
    data = bytearray(path.read_bytes())
    position = rng.randrange(len(data))
    match rng.randrange(4):
        case 0 | 1:
            data[position] ^= 1 << rng.randrange(8)
        case 2:
            del data[position:]
        case 3:
            data[position : position + 8] = rng.randbytes(8)
    path.write_bytes(data)


def disable_checksums() -> None:
    """Disable all checksums, as in most programs."""
    patch = pytest.MonkeyPatch()
    for module in (io, feature_cache):
        patch.setattr(module, "verify", lambda folder: {})
    patch.setattr("overt.targets.surrogate.store.verify", lambda folder: {})
    patch.setattr(io, "verify_file", lambda path: None)
    patch.setattr("overt.data.vocabulary.read_checksummed_json", io.read_json)
    patch.setattr("zipfile.ZipExtFile._update_crc", lambda self, data: None)


def mutate_in_child_process(kind: str, parent: Path, count: int, naive: bool) -> dict[str, object]:
    """Run the survey in a child process, so that a crash is a result too."""

    def work() -> None:
        if naive:
            disable_checksums()
        found = mutate_and_read(kind, parent, count, timeout=2 if naive else 120)
        (parent / "found.json").write_text(json.dumps(found))

    parent.mkdir(parents=True)
    code = child_process.exit_code(child_process.fork(work))
    if code:
        return {"silent": 0, "raised": [f"exit {code}"]}
    return json.loads((parent / "found.json").read_text())


@pytest.mark.long
def test_no_mutated_artifact_is_read_with_other_values(tmp_path, record_result, full) -> None:
    each = 125 if full else 25
    found = {
        kind: mutate_in_child_process(kind, tmp_path / kind / "ours", each, naive=False)
        for kind in KINDS
    }
    assert {kind: one["silent"] for kind, one in found.items()} == dict.fromkeys(KINDS, 0)
    assert {name for one in found.values() for name in one["raised"]} == {CorruptFileError.__name__}
    naive = {
        kind: mutate_in_child_process(kind, tmp_path / kind / "naive", each, naive=True)
        for kind in KINDS
    }
    silent = sum(int(str(one["silent"])) for one in naive.values())
    classes = {name for one in naive.values() for name in one["raised"]}
    assert silent > 0 and len(classes) > 1
    total = each * len(KINDS)
    record_result(
        9,
        "1,000 mutations: 0 silent, 0 crash, 0 hang; one exception class",
        f"{total} mutations of {len(KINDS)} kinds ({', '.join(KINDS)}): 0 silent, 0 crash, 0 hang; "
        f"{CorruptFileError.__name__} alone",
        f"{silent} of {total} silent, {len(classes)} classes: {', '.join(sorted(classes))}",
    )


def test_reading_an_artifact_detects_changed_values(tmp_path) -> None:
    """Every artifact can be read, two of a kind differ, and a copy is equal."""
    for name, kind in KINDS.items():
        for seed in (0, 1):
            (tmp_path / name / str(seed)).mkdir(parents=True)
            kind.write(tmp_path / name / str(seed), seed)
        values = [kind.read(tmp_path / name / str(seed)) for seed in (0, 1)]
        shutil.copytree(tmp_path / name / "0", tmp_path / name / "copy")
        assert values[0] != values[1] and kind.read(tmp_path / name / "copy") == values[0]
        assert hashlib.sha256(values[0]).digest() != hashlib.sha256(values[1]).digest()
