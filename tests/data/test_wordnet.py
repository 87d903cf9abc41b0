from pathlib import Path

import pytest

from overt.data import catalog
from overt.data.daquar import Daquar, any_answers
from overt.data.wordnet import WordNet
from overt.errors import CorruptFileError, UserError
from overt.metrics import mean
from overt.metrics.answer_accuracy import wups

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
# entity -> thing -> {furniture -> {chair -> {armchair}, table}, animal -> {dog, puppy = dog}}
HYPERNYMS = {
    "entity": (1, []),
    "thing": (2, ["entity"]),
    "furniture": (3, ["thing"]),
    "chair": (4, ["furniture"]),
    "armchair": (5, ["chair"]),
    "table": (6, ["furniture"]),
    "animal": (7, ["thing"]),
    "dog": (8, ["animal"]),
    "fido": (9, ["dog"]),
}


def write_wordnet(root: Path) -> Path:
    folder = root / "wordnet"
    folder.mkdir(parents=True, exist_ok=True)
    index, data = LICENCE, LICENCE
    for word, (offset, above) in HYPERNYMS.items():
        mark = "@i" if word == "fido" else "@"
        pointers = "".join(f" {mark} {HYPERNYMS[up][0]:08d} n 0000" for up in above)
        words = "02 dog 0 puppy 0" if word == "dog" else f"01 {word} 0"
        data += f"{offset:08d} 03 n {words} {len(above):03d}{pointers} | what it is  \n"
        index += f"{word} n 1 1 @ 1 0 {offset:08d}  \n"
    index += "puppy n 1 1 @ 1 0 00000008  \nperson n 2 1 @ 2 0 00000008 00000004  \n"
    (folder / "data.noun").write_text(data)
    (folder / "index.noun").write_text(index)
    (folder / "noun.exc").write_text("people person\n")
    return folder


def test_wup_similarity_matches_hand_computed_values(tmp_path):
    write_wordnet(tmp_path)
    found = WordNet(tmp_path)
    assert found.wup_similarity("chair", "table") == pytest.approx(2 * 3 / (1 + 1 + 2 * 3))
    assert found.wup_similarity("armchair", "chair") == pytest.approx(2 * 4 / (1 + 2 * 4))
    assert found.wup_similarity("armchair", "dog") == pytest.approx(2 * 2 / (3 + 2 + 2 * 2))
    assert found.wup_similarity("dog", "puppy") == 1 == found.wup_similarity("dog", "dog")
    assert found.wup_similarity("fido", "dog") == pytest.approx(2 * 4 / (1 + 2 * 4))  # an instance
    assert found.wup_similarity("chair", "spoon") == 0
    # the best sense counts
    best = found.wup_similarity("chair", "armchair")
    assert found.wup_similarity("person", "armchair") == best


@pytest.mark.parametrize(
    ("word", "senses"),
    [
        ("chairs", (4,)),
        ("Dogs", (8,)),
        ("people", (8, 4)),
        ("puppies", (8,)),
        ("tables", (6,)),
        ("spoons", ()),
    ],
)
def test_senses_of_plurals(tmp_path, word, senses):
    write_wordnet(tmp_path)
    assert WordNet(tmp_path).senses(word) == senses


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("index.noun", "chair n 2 1 @ 2 0 00000004\n", "line 1 .*noun"),
        ("index.noun", "chair v 1 1 @ 1 0 00000004\n", "line 1 .*noun"),
        ("index.noun", "chair n 1 1 @ 1 0 00000099\n", "sense 99 .*'chair'"),
        ("data.noun", "00000001 03 n\n", "line 1 .*sense"),
        ("data.noun", "00000004 03 n 01 chair 0 001 @ 00000077 n 0000 | x\n", "hypernym 77"),
        ("data.noun", "00000004 03 n 01 chair 0 001 @ 00000004 n 0000 | x\n", "own hypernym"),
        ("noun.exc", b"\xff\xfe", "not text"),
    ],
)
def test_invalid_files_raise_with_the_line(tmp_path, name, content, message):
    folder = write_wordnet(tmp_path)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorruptFileError, match=message):
        WordNet(tmp_path)


def test_missing_file_raises_with_its_name(tmp_path):
    (write_wordnet(tmp_path) / "noun.exc").unlink()
    with pytest.raises(UserError, match=r"noun\.exc.*missing"):
        WordNet(tmp_path)


def test_real_wordnet(data_root, needs):
    """Values of NLTK 3.10.4 on the same files."""
    needs(data_root, "wordnet")
    found = WordNet(data_root)
    assert found.wup_similarity("cup", "mug") == pytest.approx(0.8333333333333334)
    assert found.wup_similarity("chair", "sofa") == pytest.approx(0.9)
    assert found.wup_similarity("table", "chairs") == pytest.approx(0.8421052631578947)
    assert found.wup_similarity("sink", "stapler") == pytest.approx(0.6)
    assert catalog.check_dataset(data_root, "wordnet") == []


def test_wups_of_the_most_common_answers(data_root, needs):
    needs(data_root, "wordnet")
    needs(data_root, "daquar")
    test = Daquar(data_root, "test", any_answers)
    truths = test.batch(range(300)).references
    net = WordNet(data_root)
    scores = [mean(wups([("table",)] * 300, truths, net.wup_similarity, t)) for t in (0.0, 0.9)]
    exact = sum(truth == ("table",) for truth in truths) / 300
    assert exact < scores[1] < scores[0] < 1
