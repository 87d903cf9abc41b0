"""Yelp-HAT: restaurant reviews with human rationales for their sentiment.

Sen, Hartvigsen, Yin, Kong and Rundensteiner, "Human Attention Maps for Text Classification: Do
Humans and Neural Networks Focus on the Same Words?", ACL 2020,
https://github.com/cansusen/Human-Attention-for-Text-Classification. `yelp_hat/` has four tables,
one row per person and review: `Input.label` (1 good, 0 bad), `Input.text`, `Answer.Q1Answer` (the
person's label: yes, no, idk or nothing) and `Answer.html_output`, the words of the review in
`<span>`s, the marked ones with `class="active"`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.dataset import check_indices, digest_files
from overt.data.photo_dataset import ALL, check_count, iterate_csv, parse_split_or_all
from overt.data.rationales import Range, RationaleSpans, rationale_attention, rationale_maps
from overt.data.splits import Split, hold_out_indices
from overt.data.vocabulary import PaddedTexts, Tokenizer, read_texts
from overt.data.vqa_dataset import build_vocabulary
from overt.errors import CorruptFileError, UserError

FOLDER = "yelp_hat"
PARTS = {  # by the number of words of a review; part 7 has 52 to 73
    "50": "ham_part1(50words).csv",
    "100": "ham_part6(100words).csv",
    "200": "ham_part8(200words).csv",
    "7": "ham_part7.csv",
}
COLUMNS = ("Input.label", "Input.text", "Answer.Q1Answer", "Answer.html_output")
CLASSES = ("bad", "good")
SAID = {"yes": 1, "no": 0}  # others did not know or did not answer
PIECE = re.compile(r"<(/?)([a-zA-Z]+)([^<>]*)>|([^<]+)")  # a tag, or text between tags
MAPS, REVIEWS = 4_853, 1_545
TEST, VALIDATION = 300, 150
# Digests in results have these names of the filters.
_DIGEST_NAMES = {"all_annotators": "anybody", "correct_annotators": "who_was_right"}

Fuse = Callable[[Float[Tensor, "b p n"], Bool[Tensor, "b p"]], Float[Tensor, "b n"]]


@dataclass(frozen=True)
class ReviewAnnotation:
    """One person's label of a review (1 good, 0 bad, None unknown) and marked characters."""

    said: int | None
    marked: tuple[Range, ...]


@dataclass(frozen=True)
class Review:
    """A review with all of its annotations."""

    id: str
    part: str
    text: str
    label: int
    people: tuple[ReviewAnnotation, ...]


AnnotationFilter = Callable[[Review, ReviewAnnotation], bool]


def all_annotators(review: Review, person: ReviewAnnotation) -> bool:
    """Keep the annotations of all people."""
    return True


def correct_annotators(review: Review, person: ReviewAnnotation) -> bool:
    """Keep the annotations of people whose label is right."""
    return person.said == review.label


def mean_of_people(
    maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]
) -> Float[Tensor, "b n"]:
    """Return the share of people who marked each token."""
    return maps.sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)


def consensus(maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b n"]:
    """Return 1 for tokens that everybody marked: the paper's consensus attention map."""
    everybody = ((maps > 0) | ~there[..., None]).all(dim=1)
    return (everybody & there.any(dim=1, keepdim=True)).float()


def union(maps: Float[Tensor, "b p n"], there: Bool[Tensor, "b p"]) -> Float[Tensor, "b n"]:
    """Return 1 for tokens that anybody marked: the paper's super attention map."""
    return (maps > 0).any(dim=1).float()


class YelpHat:
    """Reviews, their sentiment, and the words that people marked.

    The reviews were published for evaluation without a split: `all` has all of them; train, val and
    test (1,095 / 150 / 300) are ours, by one fixed permutation. Where nothing is marked the target
    row is zero and sees no token. `groups` are the parts.

    Args:
        root: Data folder, see `data_root`.
        split: `train`, `val`, `test`, `train+val` or `all`.
        parts: Published parts by length: `50`, `100`, `200`, `7`.
        fuse: Combines the rationales of people: `mean_of_people`, `consensus` or `union`.
        trust: Which annotations to keep: `all_annotators` or `correct_annotators`.
        reader: Tokenizer; None builds a vocabulary from the training part.
        reviews: Expected number of reviews; None accepts any number.
        test: Number of reviews of `test`.
        validation: Number of reviews of `val`.

    Raises:
        UserError: The files are missing, or the split does not exist.
        CorruptFileError: A file is not the published one; the message names file and record.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from overt.io import write_text
        >>> with TemporaryDirectory() as root:
        ...     for part, name in PARTS.items():
        ...         row = f"1,great {part},yes,<span>great</span> <span>{part}</span>"
        ...         write_text(Path(root, FOLDER, name), f"{','.join(COLUMNS)}\\n{row}\\n")
        ...     data = YelpHat(root, reviews=None, test=1, validation=1)
        >>> data.batch([0]).text.texts, data.classes[data.batch([0]).labels]
        (('great 50',), 'good')
    """

    def __init__(
        self,
        root: Path | str,
        split: str = ALL,
        parts: Sequence[str] = tuple(PARTS),
        fuse: Fuse = mean_of_people,
        trust: AnnotationFilter = all_annotators,
        reader: Tokenizer | None = None,
        reviews: int | None = REVIEWS,
        test: int = TEST,
        validation: int = VALIDATION,
    ) -> None:
        root = Path(root)
        self.name, self.split, self.classes = "yelp_hat", parse_split_or_all(split), CLASSES
        self._folder = root / FOLDER
        for part in parts:
            if part not in PARTS:
                raise UserError(f"Unknown part {part!r}: choose from {', '.join(PARTS)}.")
        whole = [one for part in PARTS for one in read_part(self._folder / PARTS[part], part)]
        check_count(self._folder, len(whole), reviews, "reviews")
        rows = _rows(len(whole), test, validation)
        chosen = {ALL: range(len(whole)), **rows}[self.split]
        self.reviews = [whole[row] for row in chosen if whole[row].part in parts]
        self._fuse, self._trust = fuse, trust
        self.reader = reader or build_vocabulary(whole[row].text for row in rows[Split.TRAIN])
        trusted = _DIGEST_NAMES.get(trust.__name__, trust.__name__)
        self._about = f"{sorted(parts)} {fuse.__name__} {trusted} {test} {validation}"

    def __len__(self) -> int:
        return len(self.reviews)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the reviews at `indices`, with the rationales as target."""
        chosen = self._chosen(indices)
        tokens, mask, text = self._read(chosen)
        maps, there = rationale_maps(self._marked(chosen), text, mask)
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
        """Return the rationale of each person: 1 or 0 per token, one query per person.

        Reviews have one to four people: absent or filtered people see no token. `.each_row()` makes
        a sample of every person.
        """
        chosen = self._chosen(indices)
        _, mask, text = self._read(chosen)
        return rationale_attention(*rationale_maps(self._marked(chosen), text, mask), text, mask)

    def digest(self) -> str:
        """Return a hash of the four tables, the split and the settings."""
        about = f"yelp_hat {self.split} {self._about} {len(self)}"
        return digest_files(about, [self._folder / name for name in PARTS.values()])

    def _chosen(self, indices: Sequence[int]) -> list[Review]:
        return [self.reviews[place] for place in check_indices(self, indices, "reviews")]

    def _read(self, chosen: Sequence[Review]) -> PaddedTexts:
        return read_texts(self.reader, [review.text for review in chosen])

    def _marked(self, chosen: Sequence[Review]) -> RationaleSpans:
        """Return the rationales that `trust` keeps."""
        return [
            [person.marked for person in review.people if self._trust(review, person)]
            for review in chosen
        ]


def read_part(path: Path, part: str) -> list[Review]:
    """Read the reviews of a table in order of first appearance, each with all its people."""
    found: dict[str, tuple[int, list[ReviewAnnotation]]] = {}
    for number, (_, row) in enumerate(iterate_csv(path, COLUMNS), start=1):
        text, label, person = _person(path, number, row)
        known = found.setdefault(text, (label, []))
        if known[0] != label:
            raise CorruptFileError(
                f"{path}: row {number} has another label for a review than a row before."
            )
        known[1].append(person)
    return [
        Review(f"yelp_hat/{part}/{number:04d}", part, text, label, tuple(people))
        for number, (text, (label, people)) in enumerate(found.items())
    ]


def marked_ranges(text: str, html: str) -> tuple[Range, ...]:
    """Return the characters of `text` that are marked in `html`, which has the same words in spans.

    Nothing of the page is run or loaded. A page with other words raises `UserError`.
    """
    ranges, at = [], 0
    for word, active in _spans(html):
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(word, at):
            raise UserError(f"the page has {word[:20]!r} where the review has {text[at:][:20]!r}")
        if active and word:
            ranges.append((at, at + len(word)))
        at += len(word)
    if text[at:].strip():
        raise UserError(f"the page ends before {text[at:].strip()[:20]!r} of the review")
    return tuple(ranges)


def _spans(html: str) -> list[tuple[str, bool]]:
    """Return the text of each `<span>` and whether it is active; other tags are ignored.

    Browser extensions of some annotators put tags of their own around words.
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


def _person(path: Path, number: int, row: Sequence[str]) -> tuple[str, int, ReviewAnnotation]:
    if len(row) != len(COLUMNS) or row[0] not in ("0", "1") or not row[1].strip():
        raise CorruptFileError(
            f"{path}: row {number} is not {', '.join(COLUMNS)}; download it again."
        )
    try:
        marked = marked_ranges(row[1], row[3])
    except UserError as problem:
        raise CorruptFileError(f"{path}: row {number}: {problem}.") from problem
    return row[1], int(row[0]), ReviewAnnotation(SAID.get(row[2]), marked)


def _rows(count: int, test: int, validation: int) -> dict[str, list[int]]:
    """Return our own split: the test reviews first, then `val` from the rest."""
    rest, tested = hold_out_indices(count, test)
    train, val = hold_out_indices(len(rest), validation)
    return {
        Split.TRAIN: rest[train].tolist(),
        Split.VAL: rest[val].tolist(),
        Split.TEST: tested.tolist(),
        Split.TRAIN_VAL: rest.tolist(),
    }
