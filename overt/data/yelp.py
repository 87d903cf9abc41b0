"""Yelp-HAT: restaurant reviews, and the words by which people told whether they are good or bad.

Sen, Hartvigsen, Yin, Kong and Rundensteiner, "Human Attention Maps for Text Classification: Do
Humans and Neural Networks Focus on the Same Words?", ACL 2020,
https://github.com/cansusen/Human-Attention-for-Text-Classification. In `yelp_hat/` lie four tables,
one row a person and review: `Input.label` (1 good, 0 bad), `Input.text`, `Answer.Q1Answer` (what
the person said: yes, no, idk or nothing) and `Answer.html_output`, the words of the review in
`<span>`s, those that the person marked with `class="active"`.
"""

import csv
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.data.asked import words_of
from overt.data.batch import Batch
from overt.data.marks import Marked, Range, by_person, map_of
from overt.data.photos import ALL, split_or_all
from overt.data.splits import Split, held_out
from overt.data.vocabulary import Reader, pad
from overt.errors import BadInput, Damaged
from overt.files import digest
from overt.geometry import TextGeometry

FOLDER = "yelp_hat"
PARTS = {  # by the number of words of a review; part 7 has 52 to 73 of them
    "50": "ham_part1(50words).csv",
    "100": "ham_part6(100words).csv",
    "200": "ham_part8(200words).csv",
    "7": "ham_part7.csv",
}
COLUMNS = ("Input.label", "Input.text", "Answer.Q1Answer", "Answer.html_output")
CLASSES = ("bad", "good")
SAID = {"yes": 1, "no": 0}  # the rest did not know, or did not say
PIECE = re.compile(r"<(/?)([a-zA-Z]+)([^<>]*)>|([^<]+)")  # a tag, or text between tags
MAPS, REVIEWS = 4_853, 1_545
TEST, VALIDATION = 300, 150

Fuse = Callable[[Float[Tensor, "b p n"], Bool[Tensor, "b p"]], Float[Tensor, "b n"]]


@dataclass(frozen=True)
class Person:
    """What one person said of a review (1 good, 0 bad, None: no idea) and the characters marked."""

    said: int | None
    marked: tuple[Range, ...]


@dataclass(frozen=True)
class Review:
    """One review with all who read it."""

    id: str
    part: str
    text: str
    label: int
    people: tuple[Person, ...]


Trust = Callable[[Review, Person], bool]


def anybody(review: Review, person: Person) -> bool:
    """Count everyone's marks."""
    return True


def who_was_right(review: Review, person: Person) -> bool:
    """Count the marks of those who said what the review is."""
    return person.said == review.label


def mean_of_people(
    maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]
) -> Float[Tensor, "b n"]:
    """The share of people who marked each token."""
    return maps.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)


def consensus(maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b n"]:
    """1 for what everybody marked: the paper's consensus attention map."""
    everybody = ((maps > 0) | ~there[..., None]).all(dim=1)
    return (everybody & there.any(dim=1, keepdim=True)).float()


def union(maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b n"]:
    """1 for what anybody marked: the paper's super attention map."""
    return (maps > 0).any(dim=1).float()


class YelpHat:
    """Reviews, whether they are good, and what people looked at to tell.

    `parts` are the published sets by length. The reviews were published to compare with, and have
    no split of their own: `all` is all of them, and train, val and test are ours, 1,095 / 150 / 300
    by one fixed permutation, for those who have no other reviews to learn from. The target is what
    `fuse` makes of the marks of those whom `trust` counts, normalised; where nothing is marked its
    row is zero and sees no token. `groups` are the parts.
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        parts: Sequence[str] = tuple(PARTS),
        fuse: Fuse = mean_of_people,
        trust: Trust = anybody,
        reader: Reader | None = None,
        reviews: int | None = REVIEWS,
        test: int = TEST,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.classes = "yelp_hat", split_or_all(split), CLASSES
        self._folder = root / FOLDER
        for part in parts:
            if part not in PARTS:
                raise BadInput(f"There is no part {part!r}; choose from {', '.join(PARTS)}.")
        whole = [one for part in PARTS for one in read_part(self._folder / PARTS[part], part)]
        if reviews is not None and len(whole) != reviews:
            raise Damaged(f"{self._folder} has {len(whole)} reviews, not {reviews}; get it again.")
        rows = _rows(len(whole), test, validation)
        chosen = {ALL: range(len(whole)), **rows}[self.split]
        self.reviews = [whole[row] for row in chosen if whole[row].part in parts]
        self._fuse, self._trust = fuse, trust
        self.reader = reader or words_of(whole[row].text for row in rows[Split.TRAIN])
        self._about = f"{sorted(parts)} {fuse.__name__} {trust.__name__} {test} {validation}"

    def __len__(self) -> int:
        return len(self.reviews)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The reviews at these places, with what people marked as target."""
        chosen = self._chosen(indices)
        tokens, mask, text = self._read(chosen)
        maps, there = by_person(self._marked(chosen), text, mask)
        fused = self._fuse(maps, there)
        seen = mask & (fused.sum(dim=-1, keepdim=True) > 0)
        keys = words(tokens.shape[1], geometry=text)
        return Batch(
            ids=tuple(review.id for review in chosen),
            tokens=tokens,
            token_mask=mask,
            text=text,
            labels=torch.tensor([review.label for review in chosen], dtype=torch.long),
            groups=tuple(review.part for review in chosen),
            target=AttentionMap.from_cells(fused, keys, seen).normalize(),
        )

    def people(self, indices: Sequence[int]) -> AttentionMap:
        """What each person marked: 1 or 0 a token, one query a person.

        Reviews were read by one to four people: a person who is not there, or not trusted, sees no
        token. `.each_row()` makes a sample of every person.
        """
        chosen = self._chosen(indices)
        _, mask, text = self._read(chosen)
        return map_of(*by_person(self._marked(chosen), text, mask), text, mask)

    def digest(self) -> str:
        """A hash of the four tables, the split and how marks are counted."""
        whole = hashlib.sha256(f"yelp_hat {self.split} {self._about} {len(self)}".encode())
        for name in PARTS.values():
            whole.update(digest(self._folder / name).encode())
        return whole.hexdigest()

    def _chosen(self, indices: Sequence[int]) -> list[Review]:
        places = [int(place) for place in indices]
        for place in places:
            if not 0 <= place < len(self):
                raise BadInput(f"yelp_hat {self.split} has 0 to {len(self) - 1}, not {place}.")
        return [self.reviews[place] for place in places]

    def _read(self, chosen: Sequence[Review]) -> tuple[Tensor, Tensor, TextGeometry]:
        read = [self.reader.read(review.text) for review in chosen]
        tokens, mask, spans = pad(
            [ids for ids, _ in read], [spans for _, spans in read], self.reader.padding
        )
        return tokens, mask, TextGeometry(tuple(review.text for review in chosen), spans)

    def _marked(self, chosen: Sequence[Review]) -> Marked:
        """What those marked who are trusted."""
        return [
            [person.marked for person in review.people if self._trust(review, person)]
            for review in chosen
        ]


def read_part(path: Path, part: str) -> list[Review]:
    """The reviews of a table in the order in which they first appear, each with all its people."""
    if not path.is_file():
        raise BadInput(f"{path} is missing; `overt data list` says how to get it.")
    found: dict[str, tuple[int, list[Person]]] = {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.reader(file, strict=True)
            if tuple(next(table, ())) != COLUMNS:
                raise Damaged(f"{path} does not start with {','.join(COLUMNS)}; get it again.")
            for number, row in enumerate(table, start=1):
                text, label, person = _person(path, number, row)
                known = found.setdefault(text, (label, []))
                if known[0] != label:
                    raise Damaged(f"{path}: row {number} calls a review good that was called bad.")
                known[1].append(person)
    except (csv.Error, UnicodeDecodeError) as problem:
        raise Damaged(f"{path} is not a table of text: {problem}; get it again.") from problem
    return [
        Review(f"yelp_hat/{part}/{number:04d}", part, text, label, tuple(people))
        for number, (text, (label, people)) in enumerate(found.items())
    ]


def marked_ranges(text: str, html: str) -> tuple[Range, ...]:
    """The characters of `text` that are marked in `html`, which has the same words in spans.

    Nothing of the page is run or fetched. A page with other words is `BadInput`.
    """
    ranges, at = [], 0
    for word, active in _spans(html):
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(word, at):
            raise BadInput(f"the page has {word[:20]!r} where the review has {text[at:][:20]!r}")
        if active and word:
            ranges.append((at, at + len(word)))
        at += len(word)
    if text[at:].strip():
        raise BadInput(f"the page ends before {text[at:].strip()[:20]!r} of the review")
    return tuple(ranges)


def _spans(html: str) -> list[tuple[str, bool]]:
    """The text of each `<span>` and whether it is active; other tags are looked through.

    Some people had a program at work that put tags of its own around words.
    """
    found: list[tuple[str, bool]] = []
    inside = False
    for closing, tag, rest, data in PIECE.findall(html):
        if tag.lower() == "span":
            inside = not closing
            if inside:
                found.append(("", 'class="active"' in rest))
        elif data and inside:
            text, active = found[-1]
            found[-1] = (text + unescape(data), active)
    return found


def _person(path: Path, number: int, row: Sequence[str]) -> tuple[str, int, Person]:
    if len(row) != len(COLUMNS) or row[0] not in ("0", "1") or not row[1].strip():
        raise Damaged(f"{path}: row {number} is not {', '.join(COLUMNS)}; get it again.")
    try:
        marked = marked_ranges(row[1], row[3])
    except BadInput as problem:
        raise Damaged(f"{path}: row {number}: {problem}.") from problem
    return row[1], int(row[0]), Person(SAID.get(row[2]), marked)


def _rows(count: int, test: int, validation: int) -> dict[str, list[int]]:
    """Our own split: the test reviews first, then those of val out of the rest."""
    rest, tested = held_out(count, test)
    train, val = held_out(len(rest), validation)
    return {
        Split.TRAIN: rest[train].tolist(),
        Split.VAL: rest[val].tolist(),
        Split.TEST: tested.tolist(),
        Split.TRAIN_VAL: rest.tolist(),
    }
