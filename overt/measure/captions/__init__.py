"""How good is a caption? Measures of words against references; none needs Java unless it says so.

Words come from `caption_words`, so that numbers can stand beside published ones.
"""

from overt.measure.captions.beside import Beside
from overt.measure.captions.bleu import Bleu, bleu
from overt.measure.captions.building import (
    Corpus,
    corpus,
    frequencies,
    load_frequencies,
    pieces_of_captions,
    words_of_captions,
    write_frequencies,
    write_vocabulary,
)
from overt.measure.captions.cider import (
    Consensus,
    Frequencies,
    cider,
    cider_d,
    document_frequencies,
)
from overt.measure.captions.meteor import Meteor, meteor, meteor_java
from overt.measure.captions.rouge import rouge_l
from overt.measure.captions.scores import CaptionScores, caption_scores
from overt.measure.captions.spice import spice
from overt.measure.captions.tokens import caption_words, java_words

__all__ = [
    "Beside",
    "Bleu",
    "CaptionScores",
    "Consensus",
    "Corpus",
    "Frequencies",
    "Meteor",
    "bleu",
    "caption_scores",
    "caption_words",
    "cider",
    "cider_d",
    "corpus",
    "document_frequencies",
    "frequencies",
    "java_words",
    "load_frequencies",
    "meteor",
    "meteor_java",
    "pieces_of_captions",
    "rouge_l",
    "spice",
    "words_of_captions",
    "write_frequencies",
    "write_vocabulary",
]
