import json
from pathlib import Path

import pytest
import torch

from overt.data import sets
from overt.data.eraser import Eraser
from overt.data.source import Source
from overt.data.vocabulary import Vocabulary
from overt.errors import BadInput, Damaged

DOCUMENTS = {
    "neg.txt": "the plot is bad .\nreally bad , it isn't fun .\n",
    "pos.txt": "a joy .\n\nwatch it !",
}


def evidence(document: str, start: int, end: int) -> dict:
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
        "evidences": [[evidence("neg.txt", 3, 4)], [evidence("neg.txt", 8, 11)]],
        "query": "Is it good ?",
        "query_type": None,
        "docids": None,
    },
    {
        "annotation_id": "x",
        "classification": "POS",
        "evidences": [[evidence("pos.txt", 1, 2), evidence("neg.txt", 0, 1)]],
        "query": "And this ?",
        "query_type": "pair",
        "docids": ["pos.txt", "neg.txt"],
    },
    {"annotation_id": "pos.txt", "classification": "POS", "evidences": []},
]


def write(root: Path, samples: list = SAMPLES, one_file: bool = False) -> Path:
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
def test_batches_by_hand(tmp_path, one_file):
    write(tmp_path, one_file=one_file)
    found = Eraser(tmp_path)
    batch = found.batch([0, 1, 2])
    assert isinstance(found, Source) and len(found) == 3
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


def test_words_and_classes_are_those_of_train(tmp_path):
    folder = write(tmp_path)
    (folder / "test.jsonl").write_text(json.dumps({**SAMPLES[0], "classification": "MIXED"}))
    test = Eraser(tmp_path, "test")
    assert test.classes == ("NEG", "POS") and test.batch([0]).labels.tolist() == [-1]
    assert test.reader == Eraser(tmp_path).reader
    reader = Vocabulary(("bad",))
    assert Eraser(tmp_path, reader=reader).batch([0]).tokens.max() == 5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"evidences": [[evidence("neg.txt", 4, 4)]]}, "line 2 is no sample"),
        ({"evidences": [[evidence("neg.txt", -1, 4)]]}, "line 2 is no sample"),
        ({"evidences": [[{"docid": "neg.txt"}]]}, "line 2 is no sample"),
        ({"evidences": 3}, "line 2 is no sample"),
        ({"classification": None}, "line 2 is no sample"),
        ({"docids": ["gone.txt"]}, "'gone.txt', which is not there"),
        ({"docids": ["../../secret"]}, "leads out of it"),
        ({"evidences": [[evidence("neg.txt", 0, 99)]]}, "tokens up to 99"),
    ],
)
def test_broken_samples_are_named(tmp_path, wrong, said):
    write(tmp_path, [SAMPLES[0], {**SAMPLES[1], **wrong}])
    with pytest.raises(Damaged, match=said):
        Eraser(tmp_path).batch([1])


def test_what_is_missing_or_broken_is_named(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(BadInput, match=r"no 'imdb'; choose from boolq"):
        Eraser(tmp_path, name="imdb")
    with pytest.raises(BadInput, match="train, val and test"):
        Eraser(tmp_path, "all")
    with pytest.raises(BadInput, match="0 to 2, not 3"):
        Eraser(tmp_path).batch([3])
    for content, said in [
        (b"", "no samples"),
        (b"{}\n", "line 1 is no sample"),
        (b"[]\n", "line 1 is no object"),
        (b"{\n", "line 1 is not JSON"),
        (b"\xff\n", "line 1 is not JSON"),
    ]:
        (folder / "val.jsonl").write_bytes(content)
        with pytest.raises(Damaged, match=said):
            Eraser(tmp_path, "val")
    (folder / "val.jsonl").unlink()
    with pytest.raises(BadInput, match=r"val\.jsonl is missing"):
        Eraser(tmp_path, "val")
    (folder / "docs" / "neg.txt").write_bytes(b"\xff")
    with pytest.raises(Damaged, match=r"neg\.txt cannot be read"):
        Eraser(tmp_path)
    (folder / "docs.jsonl").write_text('{"docid": 3}\n')
    with pytest.raises(Damaged, match="line 1 has no docid"):
        Eraser(tmp_path)
    (folder / "docs.jsonl").unlink()
    for path in (folder / "docs").iterdir():
        path.unlink()
    (folder / "docs").rmdir()
    with pytest.raises(BadInput, match="docs is missing"):
        Eraser(tmp_path)


def test_digest_tells_splits_and_documents_apart(tmp_path):
    folder = write(tmp_path)
    before = Eraser(tmp_path).digest()
    assert Eraser(tmp_path).digest() == before != Eraser(tmp_path, "val").digest()
    (folder / "docs" / "pos.txt").write_text("other words")
    assert Eraser(tmp_path).digest() != before


def test_it_is_listed():
    assert sets.find("eraser").opens
