"""Captions as lists of words, the way captions are compared: Penn Treebank style, no punctuation.

Published numbers rest on Stanford's tokenizer, which needs Java. `caption_words` follows its rules
for the kind of text that captions are; `java_words` is that tokenizer itself. On all of the 40,460
captions of Flickr8k, on which the rules were written, the two give the same words (`agreement`
counts); they still part on smileys, on "y'all", and on quotes that do not match.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence

from overt.measure.captions.java import jar, java

# Tokens that official evaluation drops; it drops "-LRB-" too, but only in capitals, which the
# lower-casing before has taken away: so brackets stay, as "-lrb-", and we keep to that.
DROPPED = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
BRACKETS = dict(zip("()[]{}", "-lrb- -rrb- -lsb- -rsb- -lcb- -rcb-".split(), strict=True))
PLAIN = str.maketrans({"’": "'", "‘": "`", "“": '"', "”": '"', "–": "--", "—": "--", "…": "..."})

# Abbreviations whose full stop is theirs.
SHORT = "mr mrs ms dr prof st jr sr vs etc inc ltd co corp gen sgt capt lt col rev no".split()
PARTED = {
    "cannot": ("can", "not"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "wanna": ("wan", "na"),
    "gimme": ("gim", "me"),
    "lemme": ("lem", "me"),
    "'tis": ("'t", "is"),
    "'twas": ("'t", "was"),
}
ENDING = re.compile(r"(?<=\w)(n't|'(?:s|m|d|re|ve|ll))$")
TOKEN = re.compile(
    rf"""
    (?:https?://|www\.)[^\s"<>]+            # addresses
  | [\w.+-]+@\w+(?:\.\w+)+
  | <[a-z/][^\s<>]*>                        # tags
  | (?:{"|".join(SHORT)})\.(?=\s|$|\w|,)    # abbreviations, and letters with full stops
  | (?:[a-z]\.){{2,}} | \b(?-i:[A-Z])\.
  | (?-i:[A-Z]+&[A-Z]+)
  | 'n'(?!\w) | '\d0s\b | '(?:tis|twas)\b
  | @\w+
  | (?<!\w)[+-]?\d+(?:[.,:/]\d+)+          # numbers: 1,000 5:30 3/4 2.5
  | (?<!\w)[+-]\d+\b | (?<![\w.])\.\d+
  | '(?:s|m|d|re|ve|ll)\b                   # endings that stand alone
  | \w+(?:[-/._]\w+|'[a-z]\w*)*            # words, joined by marks inside
  | \.{{3,}} | -{{2,}} | [!?]+ | `` | ''
  | \S
    """,
    re.VERBOSE | re.IGNORECASE,
)
CLOCK = re.compile(r"(\d+:\d+)(am|pm)\b", re.IGNORECASE)
SPACED_DOTS = re.compile(r"\.(?: \.){2,}|\.{3,}")


def caption_words(text: str) -> list[str]:
    """The words of a caption, lower-case, in the style of the Penn Treebank, punctuation dropped.

    >>> caption_words("A dog's t-shirt isn't red, is it?")
    ['a', 'dog', "'s", 't-shirt', 'is', "n't", 'red', 'is', 'it']
    """
    plain = SPACED_DOTS.sub(" ... ", CLOCK.sub(r"\1 \2", text.translate(PLAIN)))
    found = [part for token in TOKEN.findall(plain) for part in _parts(token.lower())]
    return [word for word in found if word not in DROPPED]


def java_words(texts: Sequence[str]) -> list[list[str]]:
    """The words of many captions by Stanford's own tokenizer, as official evaluation calls it.

    Needs Java and the package pycocoevalcap, which brings the tokenizer along; without them it
    says so.
    """
    lines = "\n".join(" ".join(text.split()) for text in texts)
    found = subprocess.run(
        [
            *(java(), "-Dfile.encoding=UTF-8", "-cp", str(jar("tokenizer", "stanford-corenlp"))),
            *("edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"),
        ],
        input=lines,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout.split("\n")
    return [[word for word in line.split() if word not in DROPPED] for line in found[: len(texts)]]


def agreement(one: Iterable[Sequence[str]], other: Iterable[Sequence[str]]) -> float:
    """The share of captions for which two tokenizers give the very same words."""
    same = [list(ours) == list(theirs) for ours, theirs in zip(one, other, strict=True)]
    return sum(same) / max(1, len(same))


def _parts(token: str) -> Sequence[str]:
    if token in BRACKETS:
        return (BRACKETS[token],)
    if token in PARTED:
        return PARTED[token]
    if token == '"':
        return ("''",)
    ending = ENDING.search(token)
    if ending is not None and ending.start():
        return (token[: ending.start()], ending.group())
    return (token,)
