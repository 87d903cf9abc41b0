import pytest

from overt.data.captions import read_tokens
from overt.errors import BadInput
from overt.measure.captions import java as programs
from overt.measure.captions.tokens import agreement, caption_words, java_words

# What Stanford's tokenizer makes of it, punctuation dropped: written by it, not by us.
HARD = {
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
    "": "",
    " . ": "",
}


@pytest.mark.parametrize(("text", "words"), HARD.items())
def test_words_are_those_of_stanford(text, words):
    assert caption_words(text) == words.split()


def needs_java():
    try:
        programs.java()
        programs.jar("tokenizer", "stanford-corenlp")
    except BadInput as problem:
        pytest.skip(str(problem))


def test_stanford_itself_agrees():
    needs_java()
    assert java_words(list(HARD)) == [words.split() for words in HARD.values()]


def test_captions_of_flickr8k_are_read_as_stanford_reads_them(data_root):
    needs_java()
    path = data_root / "flickr8k" / "Flickr8k.token.txt"
    if not path.exists():
        pytest.skip("the captions of Flickr8k are not under OVERT_DATA")
    found = read_tokens(path)
    texts = [text for many in found.values() for text in many][::8]
    assert agreement(map(caption_words, texts), java_words(texts)) == 1


def test_agreement_counts_whole_captions():
    assert agreement([["a"], ["b", "c"]], [["a"], ["b"]]) == 0.5
    assert agreement([], []) == 0
