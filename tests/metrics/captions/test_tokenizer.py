"""Caption tokenizer: agreement with Stanford's PTBTokenizer."""

import pytest

from overt.data.captions import read_tokens
from overt.errors import UserError
from overt.metrics.captions import java as programs
from overt.metrics.captions.tokenizer import (
    ABBREVIATIONS,
    CAPITAL_ABBREVIATIONS,
    NUMBER_ABBREVIATIONS,
    SENTENCE_STARTS,
    tokenize_caption,
    tokenize_java,
    tokenizer_agreement,
)

# Output of Stanford's tokenizer itself, without punctuation.
STANFORD_TOKENS = {
    "He can't won't didn't it's the dogs' bowls": "he ca n't wo n't did n't it 's the dogs bowls",
    '"Quoted" text, with (brackets); semi: colon!': "quoted text with -lrb- brackets -rrb- "
    "semi colon",
    "A t-shirt costs $5.00 and 10% off at 5:30pm": "a t-shirt costs $ 5.00 and 10 % off at 5:30 pm",
    "and/or AT&T cannot gonna Mr. Smith St. Louis": "and/or at&t can not gon na mr. smith "
    "st. louis",
    "It's #1 @home a*b x_y 3/4 full-length '90s": "it 's # 1 @home a * b x_y 3/4 full-length '90s",
    "the man 's hat .A woman runs": "the man 's hat a woman runs",
    "hello—world “smart” don’t café naïve": "hello world smart do n't café naïve",
    "A dog,running fast.  two  spaces ???": "a dog running fast two spaces ???",
    "+5 -3 2.5 .5 1.2.3 3x4 8-year-old a&b": "+5 -3 2.5 .5 1.2.3 3x4 8-year-old a & b",
    'a U. Miami shirt, the letter " P. "': "a u. miami shirt the letter p.",
    "on 5th Ave. and Elm Blvd., Rd. Ft. Worth": "on 5th ave. and elm blvd. rd. ft. worth",
    "a D.V.D and the U.S.A flag, U.S.-based": "a d.v.d and the u.s.a flag u.s.-based",
    "team B. plays at 5 p.m. J.K.Rowling": "team b. plays at 5 p.m. j.k.rowling",
    "He sits on side B. The dog runs to J. Smith.": "he sits on side b the dog runs to j. smith",
    # not before a text such as "He sits": the program reads on, and the letter would lose its stop
    "a shirt with an a.": "a shirt with an a.",
    "Number No. 5, and no. Fig. 2 and a fig.": "number no. 5 and no fig. 2 and a fig",
    "in Wash. they wash. A dog., and Me. too": "in wash. they wash a dog. and me too",
    "": "",
    " . ": "",
}


@pytest.mark.parametrize(("text", "words"), STANFORD_TOKENS.items())
def test_tokens_equal_those_of_stanford(text, words):
    assert tokenize_caption(text) == words.split()


def skip_without_java():
    try:
        programs.find_java()
        programs.find_jar("tokenizer", "stanford-corenlp")
    except UserError as problem:
        pytest.skip(str(problem))


def test_stanford_program_gives_the_stored_tokens():
    skip_without_java()
    assert tokenize_java(list(STANFORD_TOKENS)) == [
        words.split() for words in STANFORD_TOKENS.values()
    ]


# Contexts in which a full stop belongs to the word or does not.
CONTEXTS = """on {0}. in town|on {0}.|on {0}. Smith ran|on {0}., in|on {0}. .|on {0}./x|on {0}.'s
on {0}. 5 dogs|on {0}, in|on {0}.in town|({0}.) in|on {0}..|on {0}. The dog|x {0}.; x {0}.: x"""


@pytest.mark.long
@pytest.mark.parametrize("case", [str, str.lower, str.upper])
def test_full_stops_are_kept_as_by_stanford(case):
    """Abbreviations, letters, and words that look like abbreviations, in all contexts."""
    skip_without_java()
    words = [*ABBREVIATIONS, *CAPITAL_ABBREVIATIONS, *NUMBER_ABBREVIATIONS]
    words += (
        "dog man hwy apt sun sat lb oz min hr sec vol ed yd tbsp et org b u.s u.s.a d.v.d".split()
    )
    words += "a.m p.m ph.d e.g i.e t.v Me Pt Pl Vic No".split()
    # in capitals, not abbreviations for Stanford's tokenizer
    words = [word for word in words if case is not str.upper or word not in CAPITALS_DIFFER]
    contexts = CONTEXTS.replace("\n", "|").split("|")
    texts = [context.format(case(word)) for word in words for context in contexts]
    found = zip(texts, map(tokenize_caption, texts), tokenize_java(texts), strict=True)
    assert [(text, ours, java) for text, ours, java in found if ours != java] == []


CAPITALS_DIFFER = {"mfg", "mtg", "pte", "pty"}


@pytest.mark.long
def test_a_sentence_after_a_letter_starts_as_by_stanford():
    skip_without_java()
    others = "On Two Men Dog Smith With And His For To Young People".split()
    texts = [f"on side B. {word} ran" for word in [*SENTENCE_STARTS, *others]]
    assert list(map(tokenize_caption, texts)) == tokenize_java(texts)


def test_flickr8k_captions_are_tokenized_as_by_stanford(data_root):
    skip_without_java()
    path = data_root / "flickr8k" / "Flickr8k.token.txt"
    if not path.exists():
        pytest.skip("the captions of Flickr8k are not under OVERT_DATA")
    found = read_tokens(path)
    texts = [text for many in found.values() for text in many][::8]
    assert tokenizer_agreement(map(tokenize_caption, texts), tokenize_java(texts)) == 1


def test_agreement_counts_identical_captions():
    assert tokenizer_agreement([["a"], ["b", "c"]], [["a"], ["b"]]) == 0.5
    assert tokenizer_agreement([], []) == 0
