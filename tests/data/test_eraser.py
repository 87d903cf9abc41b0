import json
from pathlib import Path

import pytest
import torch

from overt.data.dataset import Dataset
from overt.data.eraser import Eraser
from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError, UserError

DOCUMENTS = {
    "neg.txt": "the plot is bad .\nreally bad , it isn't fun .\n",
    "pos.txt": "a joy .\n\nwatch it !",
}


def make_evidence(document: str, start: int, end: int) -> dict:
    return {
        "docid": document,
        "start_token": start,
        "end_token": end,
        "start_sentence": 0,
        "end_sentence": 1,
        "text": "whatever",
    }


SAMPLES = [
    {
        "annotation_id": "neg.txt",
        "classification": "NEG",
        "evidences": [[make_evidence("neg.txt", 3, 4)], [make_evidence("neg.txt", 8, 11)]],
        "query": "Is it good ?",
        "query_type": None,
        "docids": None,
    },
    {
        "annotation_id": "x",
        "classification": "POS",
        "evidences": [[make_evidence("pos.txt", 1, 2), make_evidence("neg.txt", 0, 1)]],
        "query": "And this ?",
        "query_type": "pair",
        "docids": ["pos.txt", "neg.txt"],
    },
    {"annotation_id": "pos.txt", "classification": "POS", "evidences": []},
]


def write_eraser(root: Path, samples: list = SAMPLES, one_file: bool = False) -> Path:
    folder = root / "eraser" / "movies"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        lines = [json.dumps(sample) for sample in samples]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    if one_file:
        lines = [json.dumps({"docid": d, "document": t}) for d, t in DOCUMENTS.items()]
        (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    else:
        (folder / "docs").mkdir(exist_ok=True)
        for name, text in DOCUMENTS.items():
            (folder / "docs" / name).write_text(text)
    return folder


@pytest.mark.parametrize("one_file", [False, True])
def test_batches_match_hand_computed_values(tmp_path, one_file):
    write_eraser(tmp_path, one_file=one_file)
    found = Eraser(tmp_path)
    batch = found.batch([0, 1, 2])
    assert isinstance(found, Dataset) and len(found) == 3
    assert batch.ids[0] == "eraser-movies/neg.txt"
    assert [found.classes[label] for label in batch.labels] == ["NEG", "POS", "POS"]
    assert batch.text.texts[0] == "the plot is bad .\nreally bad , it isn't fun .\n"
    assert batch.text.texts[1].startswith("a joy .\nwatch it !\nthe plot")
    assert batch.references[0] == ("Is it good ?",) and batch.groups == ("", "pair", "")
    weights = batch.target.weights[:, 0, 0, 0]
    marked = [
        [batch.text.tokens(row)[place] for place in weights[row].nonzero()[:, 0]]
        for row in range(3)
    ]
    assert marked == [["bad", "it", "isn", "'t", "fun"], ["joy", "the"], []]
    torch.testing.assert_close(batch.target.weights[:2].sum(-1).flatten(), torch.ones(2))
    assert batch.target.rows[:, 0].tolist() == [True, True, False]
    batch.target.check()


def test_empty_spans_mark_nothing(tmp_path):
    """14 of the 199 reviews of the official movies test split have empty spans."""
    empty = {**SAMPLES[0], "evidences": [[make_evidence("neg.txt", 4, 4)]]}
    mixed = {
        **SAMPLES[0],
        "evidences": [[make_evidence("neg.txt", 0, 0)], [make_evidence("neg.txt", 3, 4)]],
    }
    behind = {
        **SAMPLES[0],
        "evidences": [[make_evidence("neg.txt", 12, 12)]],
    }  # the end of the text
    write_eraser(tmp_path, [SAMPLES[0], empty, mixed, behind])
    found = Eraser(tmp_path, "test")
    target = found.batch(range(4)).target
    assert target.rows[:, 0].tolist() == [True, False, True, False]
    assert (target.weights[:, 0, 0, 0] > 0).sum(dim=-1).tolist() == [5, 0, 1, 0]
    assert found.samples[1].evidences == (("neg.txt", 4, 4),)
    target.check()


def test_vocabulary_and_classes_come_from_train(tmp_path):
    folder = write_eraser(tmp_path)
    (folder / "test.jsonl").write_text(json.dumps({**SAMPLES[0], "classification": "MIXED"}))
    test = Eraser(tmp_path, "test")
    assert test.classes == ("NEG", "POS") and test.batch([0]).labels.tolist() == [-1]
    assert test.reader == Eraser(tmp_path).reader
    reader = Vocabulary(("bad",))
    assert Eraser(tmp_path, reader=reader).batch([0]).tokens.max() == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"evidences": [[make_evidence("neg.txt", 5, 4)]]}, "line 2 .*sample"),
        ({"evidences": [[make_evidence("neg.txt", -1, 4)]]}, "line 2 .*sample"),
        ({"evidences": [[{"docid": "neg.txt"}]]}, "line 2 .*sample"),
        ({"evidences": 3}, "line 2 .*sample"),
        ({"classification": None}, "line 2 .*sample"),
        ({"docids": ["gone.txt"]}, "'gone.txt' .*missing"),
        ({"docids": ["../../secret"]}, "points outside"),
        ({"evidences": [[make_evidence("neg.txt", 0, 99)]]}, "tokens.*99"),
    ],
)
def test_invalid_samples_raise_with_their_line(tmp_path, wrong, message):
    write_eraser(tmp_path, [SAMPLES[0], {**SAMPLES[1], **wrong}])
    with pytest.raises(CorruptFileError, match=message):
        Eraser(tmp_path).batch([1])


def test_missing_or_corrupt_files_raise_with_their_name(tmp_path):
    folder = write_eraser(tmp_path)
    with pytest.raises(UserError, match=r"'imdb'.*boolq"):
        Eraser(tmp_path, name="imdb")
    with pytest.raises(UserError, match="train, val and test"):
        Eraser(tmp_path, "all")
    with pytest.raises(UserError, match=r"3 \w+: 3 is out"):
        Eraser(tmp_path).batch([3])
    for content, message in [
        (b"", "no samples"),
        (b"{}\n", "line 1 .*sample"),
        (b"[]\n", "line 1 .*object"),
        (b"{\n", "line 1 .*JSON"),
        (b"\xff\n", "line 1 .*JSON"),
    ]:
        (folder / "val.jsonl").write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            Eraser(tmp_path, "val")
    (folder / "val.jsonl").unlink()
    with pytest.raises(UserError, match=r"val\.jsonl.*missing"):
        Eraser(tmp_path, "val")
    (folder / "docs" / "neg.txt").write_bytes(b"\xff")
    with pytest.raises(CorruptFileError, match=r"neg\.txt.*read"):
        Eraser(tmp_path)
    (folder / "docs.jsonl").write_text('{"docid": 3}\n')
    with pytest.raises(CorruptFileError, match="line 1 .*docid"):
        Eraser(tmp_path)
    (folder / "docs.jsonl").unlink()
    for path in (folder / "docs").iterdir():
        path.unlink()
    (folder / "docs").rmdir()
    with pytest.raises(UserError, match="docs.*missing"):
        Eraser(tmp_path)


def test_digest_depends_on_split_and_documents(tmp_path):
    folder = write_eraser(tmp_path)
    before = Eraser(tmp_path).digest()
    assert Eraser(tmp_path).digest() == before != Eraser(tmp_path, "val").digest()
    (folder / "docs" / "pos.txt").write_text("other words")
    assert Eraser(tmp_path).digest() != before
