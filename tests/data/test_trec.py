from pathlib import Path

import pytest
import torch

from overt.data import trec
from overt.data.splits import hold_out_indices
from overt.data.trec import FINE_NAMES, Trec
from overt.data.vocabulary import Vocabulary
from overt.errors import CorruptFileError, UserError

TRAIN = [
    b"DESC:manner How did serfdom develop ?",
    b"ENTY:cremat What films featured Popeye ?",
    b"LOC:city Which sister\xf0city has the caf\xe9 ?",
    b"HUM:ind Who 's   the king ?",
    b"NUM:date When ?",
    b"ABBR:exp What is NASA ?  ",
]


def write_trec(root: Path, lines: list[bytes] = TRAIN) -> Path:
    folder = root / trec.FOLDER
    folder.mkdir(exist_ok=True)
    (folder / trec.TRAIN_FILE).write_bytes(b"\n".join(lines) + b"\n")
    (folder / trec.TEST_FILE).write_bytes(b"\n".join(TRAIN[::-1]) + b"\n")
    return folder


def open_trec(root: Path, split: str = "train", labels: str = "coarse", **options) -> Trec:
    return Trec(root, split, labels, records=6, validation=2, **options)


def test_batches_match_hand_computed_values(tmp_path):
    write_trec(tmp_path)
    found = open_trec(tmp_path, "train+val")
    batch = found.batch([3, 4])
    assert batch.ids == ("trec6/train/0003", "trec6/train/0004")
    assert batch.text.texts == ("Who 's   the king ?", "When ?")
    assert batch.text.tokens(0) == ["Who", "'s", "the", "king", "?"]
    assert batch.text.tokens(1) == ["When", "?", "", "", ""]
    assert batch.token_mask.tolist() == [[True] * 5, [True] * 2 + [False] * 3]
    assert [found.classes[label] for label in batch.labels] == ["HUM", "NUM"]
    assert batch.groups == ("HUM", "NUM")
    assert torch.equal(batch.tokens, found.batch([3, 4]).tokens)


def test_non_ascii_letters_are_read(tmp_path):
    write_trec(tmp_path)
    text = open_trec(tmp_path, "train+val").batch([2]).text.texts[0]
    assert text == "Which sisterðcity has the café ?"


def test_fine_labels_and_their_names(tmp_path):
    write_trec(tmp_path)
    fine = open_trec(tmp_path, "train+val", "fine").batch(range(6)).labels
    assert [FINE_NAMES[label] for label in fine] == [line.split()[0].decode() for line in TRAIN]
    assert len(FINE_NAMES) == len(set(FINE_NAMES)) == 50 and list(FINE_NAMES) == sorted(FINE_NAMES)


def test_vocabulary_contains_only_train_words(tmp_path):
    write_trec(tmp_path)
    rows, held_out = hold_out_indices(6, 2)
    readers = [open_trec(tmp_path, split).reader for split in ("train", "val", "test", "train+val")]
    assert all(reader == readers[0] for reader in readers)
    texts = [line.split(b" ", 1)[1].decode("iso-8859-1").lower() for line in TRAIN]
    for row in rows:
        assert set(texts[row].split()) <= set(readers[0].words)
    only = {w for row in held_out for w in texts[row].split()} - {
        w for row in rows for w in texts[row].split()
    }
    assert only and not only & set(readers[0].words)


def test_splits_are_disjoint(tmp_path):
    write_trec(tmp_path)
    ids = [open_trec(tmp_path, s).batch(range(n)).ids for s, n in [("train", 4), ("val", 2)]]
    assert not set(ids[0]) & set(ids[1])
    assert set(ids[0]) | set(ids[1]) == set(open_trec(tmp_path, "train+val").batch(range(6)).ids)
    assert open_trec(tmp_path, "test").batch([0]).ids == ("trec6/test/0000",)


def test_reader_can_be_replaced(tmp_path):
    write_trec(tmp_path)
    reader = Vocabulary.build([["when"]])
    assert open_trec(tmp_path, "train+val", reader=reader).batch([4]).tokens.tolist() == [[5, 1]]


@pytest.mark.parametrize("line", [b"", b"DESC How", b"DESC:manner", b"XX:manner How ?", b"a:b c"])
def test_invalid_line_raises_with_its_number(tmp_path, line):
    write_trec(tmp_path, [*TRAIN[:3], line, *TRAIN[4:]])
    with pytest.raises(CorruptFileError, match=r"train_5500.*line 4"):
        open_trec(tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_truncated_file_raises_with_its_line(tmp_path, cut):
    path = write_trec(tmp_path) / trec.TRAIN_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptFileError, match=r"5500.*line \d of 6"):
        open_trec(tmp_path)


def test_missing_lines_files_and_indices_raise(tmp_path):
    folder = write_trec(tmp_path)
    with pytest.raises(CorruptFileError, match="line 7 of 5452"):
        Trec(tmp_path)
    for place in (-1, 4):
        with pytest.raises(UserError, match=str(place)):
            open_trec(tmp_path).batch([place])
    (folder / trec.TRAIN_FILE).unlink()
    with pytest.raises(UserError, match=r"train_5500.*missing"):
        open_trec(tmp_path)


def test_digest_depends_on_data_split_and_labels(tmp_path):
    write_trec(tmp_path)
    kinds = [(s, k) for s in ("train", "val", "test", "train+val") for k in ("fine", "coarse")]
    assert len({open_trec(tmp_path, *kind).digest() for kind in kinds}) == 8
    before = open_trec(tmp_path).digest()
    assert open_trec(tmp_path).digest() == before
    write_trec(tmp_path, [*TRAIN[:-1], b"ABBR:exp What is NATO ?"])
    assert open_trec(tmp_path).digest() != before


@pytest.mark.long
def test_real_trec(data_root, needs):
    needs(data_root, "trec6")
    assert [len(Trec(data_root, split)) for split in ("train", "val", "test")] == [4_952, 500, 500]
    whole = Trec(data_root, "train+val", "fine")
    labels = whole.batch(range(len(whole))).labels
    assert len(labels.unique()) == 50
    assert int((labels == FINE_NAMES.index("HUM:ind")).sum()) == 962  # counted with awk
    assert Trec(data_root, "test").batch([0]).text.texts == (
        "How far is it from Denver to Aspen ?",
    )
