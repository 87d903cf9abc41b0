"""Tokenizer of captions: Penn Treebank style, without punctuation.

Published scores use Stanford's tokenizer, which needs Java. `tokenize_caption` follows its rules
for the kind of text that captions are; `tokenize_java` runs the original. On all 40,460 captions of
Flickr8k, on which the rules were developed, both give the same words (`tokenizer_agreement`), and
so they do for abbreviations and letters with full stops in 14 contexts. They differ on emoticons,
on "y'all", on unmatched quotes, and on fractions such as "4.5/5". After a single letter at the end
of a text the original reads on into the next text; `tokenize_caption` does not.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence

from overt.metrics.captions.java import find_jar, find_java
from overt.metrics.captions.validation import check_strings

# Tokens that the official evaluation drops. It also drops "-LRB-", but only in capitals, after
# lower-casing: so brackets stay as "-lrb-", here too.
DROPPED = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
BRACKETS = dict(zip("()[]{}", "-lrb- -rrb- -lsb- -rsb- -lcb- -rcb-".split(), strict=True))
PLAIN = str.maketrans({"’": "'", "‘": "`", "“": '"', "”": '"', "–": "--", "—": "--", "…": "..."})

# Abbreviations that keep their full stop.
ABBREVIATIONS = """
    adm al ala alex ariz assn assoc asst atty ave bancorp bhd bldg blvd bros calif capt cf cie cmdr
    co col colo comdr conn corp cos cpl ct dak dept det dr drs elec ens esq est etc ext fla ft ga
    gen gov govs hon inc ind insp intl invt jos jr kan kans ky lieut lt ltd maj md messrs mfg mich
    minn mlle mme mo mont mr mrs ms mt mtg natl neb nev okla penn ph plc pres prof profs pte pty pvt
    rd rep reps rev rt sen sens sgt sq sr st ste supt sys tel tenn treas univ va vs wis wm wyo
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri
""".split()
# Those that are words in lower case.
CAPITAL_ABBREVIATIONS = "Ark Del Ill La Mass Miss Ore Pa Tex Wash".split()
# Those that keep it before a number only.
NUMBER_ABBREVIATIONS = "art ca fig figs no nos op pp".split()
# A single letter loses its full stop if one of these begins the next sentence.
SENTENCE_STARTS = """
    A About After An As At But Earlier He Her Here However If In It Last Many More Now Once One
    Other Our She Since So Some Such That The Their Then There These They This We What When While
    Yet You
""".split()
SPLIT_WORDS = {
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
  | (?:{"|".join(ABBREVIATIONS)})\.(?!\w)  # abbreviations
  | (?-i:{"|".join([*CAPITAL_ABBREVIATIONS, *map(str.upper, CAPITAL_ABBREVIATIONS)])})\.(?!\w)
  | (?:{"|".join(NUMBER_ABBREVIATIONS)})\.(?=\s*\d)
  | ph\.d\.(?!\w)
  | [a-z](?:\.[a-z])+(?:\.(?!\w)|(?![.\w]))(?:-\w+)*  # letters with full stops: U.S., D.V.D
  | [a-z]\.(?!\w)(?!\s+(?-i:{"|".join(SENTENCE_STARTS)})\b)(?:-\w+)*
  | (?-i:[A-Z]+&[A-Z]+)
  | 'n'(?!\w) | '\d0s\b | '(?:tis|twas)\b
  | @\w+
  | (?<!\w)[+-]?\d+(?:[.,:/]\d+)+          # numbers: 1,000 5:30 3/4 2.5
  | (?<!\w)[+-]\d+\b | (?<![\w.])\.\d+
  | '(?:s|m|d|re|ve|ll)\b                   # endings by themselves
  | \w+(?:[-/._]\w+|'[a-z]\w*)*(?:\.(?=[,;:]))?  # words, joined by marks inside
  | \.{{3,}} | -{{2,}} | [!?]+ | `` | ''
  | \S
    """,
    re.VERBOSE | re.IGNORECASE,
)
CLOCK = re.compile(r"(\d+:\d+)(am|pm)\b", re.IGNORECASE)
SPACED_DOTS = re.compile(r"\.(?: \.){2,}|\.{3,}")


def tokenize_caption(text: str) -> list[str]:
    """Split a caption into lower-case words in Penn Treebank style, without punctuation.

    Args:
        text: The caption.

    Returns:
        Its words.

    Example:
        >>> tokenize_caption("A dog's t-shirt isn't red, is it?")
        ['a', 'dog', "'s", 't-shirt', 'is', "n't", 'red', 'is', 'it']
    """
    plain = SPACED_DOTS.sub(" ... ", CLOCK.sub(r"\1 \2", text.translate(PLAIN)))
    found = [part for token in TOKEN.findall(plain) for part in _parts(token.lower())]
    return [word for word in found if word not in DROPPED]


def tokenize_java(texts: Sequence[str]) -> list[list[str]]:
    """Split captions with Stanford's tokenizer, as the official evaluation does.

    Args:
        texts: The captions.

    Returns:
        The words of each caption.

    Raises:
        UserError: Java or the package pycocoevalcap, which contains the tokenizer, is missing.

    Example:
        >>> from overt.errors import UserError
        >>> try:
        ...     words = tokenize_java(["A cat."])
        ... except UserError:  # no Java
        ...     words = [["a", "cat"]]
        >>> words
        [['a', 'cat']]
    """
    check_strings(texts, "texts")
    lines = "\n".join(" ".join(text.split()) for text in texts)
    found = subprocess.run(
        [
            *(
                find_java(),
                "-Dfile.encoding=UTF-8",
                "-cp",
                str(find_jar("tokenizer", "stanford-corenlp")),
            ),
            *("edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"),
        ],
        input=lines,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout.split("\n")
    return [[word for word in line.split() if word not in DROPPED] for line in found[: len(texts)]]


def tokenizer_agreement(one: Iterable[Sequence[str]], other: Iterable[Sequence[str]]) -> float:
    """Compute the share of captions for which two tokenizers give the same words."""
    same = [list(ours) == list(theirs) for ours, theirs in zip(one, other, strict=True)]
    return sum(same) / max(1, len(same))


def _parts(token: str) -> Sequence[str]:
    if token in BRACKETS:
        return (BRACKETS[token],)
    if token in SPLIT_WORDS:
        return SPLIT_WORDS[token]
    if token == '"':
        return ("''",)
    ending = ENDING.search(token)
    if ending is not None and ending.start():
        return (token[: ending.start()], ending.group())
    return (token,)
