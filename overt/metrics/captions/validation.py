"""Checks of the input of caption metrics: lists of words, never strings.

A string is a sequence of its letters. Without a check, "a dog" against "a cat" would be scored as
captions of five letters.
"""

from collections.abc import Sequence

Words = Sequence[str]


def check_captions(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> None:
    """Check that captions are lists of words, one per list of references.

    Raises:
        ValueError: A caption or a list of references is a string, there is no reference, or the
            numbers of candidates and of reference lists differ.
    """
    _check_lists(candidates, references)
    remedy = "split it into words first, with tokenize_caption(text)"
    for at, (words, others) in enumerate(zip(candidates, references, strict=True)):
        _refuse_string(words, f"candidate {at}", remedy)
        for number, other in enumerate(others):
            _refuse_string(other, f"reference {number} of candidate {at}", remedy)


def check_texts(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Check that captions are strings, one per list of references.

    Raises:
        ValueError: A caption is not a string, a list of references is one, there is no reference,
            or the numbers of candidates and of reference lists differ.
    """
    _check_lists(candidates, references)
    for at, (text, others) in enumerate(zip(candidates, references, strict=True)):
        for one in (text, *others):
            if not isinstance(one, str):
                raise ValueError(
                    f"captions must be strings, got a {type(one).__name__} for candidate {at}: "
                    'use " ".join(words)'
                )


def check_strings(texts: Sequence[str], what: str) -> None:
    """Check that `texts` is a list of strings and not one string."""
    _refuse_string(texts, what, "put it into a list")


def _check_lists(candidates: Sequence[Words], references: Sequence[Sequence[Words]]) -> None:
    _refuse_string(candidates, "candidates", "give a list with one caption for each image")
    _refuse_string(references, "references", "give a list of references for each image")
    if len(candidates) != len(references):
        raise ValueError(
            f"candidates and references must have the same length, got {len(candidates)} and "
            f"{len(references)}"
        )
    for at, others in enumerate(references):
        _refuse_string(others, f"references of candidate {at}", "give a list of references")
        if not len(others):
            raise ValueError(f"a candidate needs at least one reference, candidate {at} has none")


def _refuse_string(given: object, what: str, remedy: str) -> None:
    if isinstance(given, (str, bytes)):
        raise ValueError(
            f"{what} must be a list, got the string {given[:30]!r}, which would be scored letter "
            f"by letter: {remedy}"
        )
