"""Caption metrics: BLEU, METEOR, ROUGE-L, CIDEr, CIDEr-D and SPICE.

Only `spice`, `meteor_java` and `tokenize_java` need Java. Tokenize with `tokenize_caption` for
scores that are comparable with published ones.
"""

from overt.metrics.captions.all_scores import CaptionScores, caption_scores
from overt.metrics.captions.bleu import Bleu, bleu
from overt.metrics.captions.caption_corpus import (
    CaptionCorpus,
    build_subwords,
    build_vocabulary,
    caption_frequencies,
    load_frequencies,
    read_corpus,
    write_frequencies,
    write_vocabulary,
)
from overt.metrics.captions.cider import (
    CiderDScorer,
    DocumentFrequencies,
    cider,
    cider_d,
    document_frequencies,
)
from overt.metrics.captions.cider_gpu import CiderDScorerGPU
from overt.metrics.captions.meteor import Meteor, meteor, meteor_java
from overt.metrics.captions.rouge import rouge_l
from overt.metrics.captions.spice import spice
from overt.metrics.captions.tokenizer import tokenize_caption, tokenize_java

__all__ = [
    "Bleu",
    "CaptionCorpus",
    "CaptionScores",
    "CiderDScorer",
    "CiderDScorerGPU",
    "DocumentFrequencies",
    "Meteor",
    "bleu",
    "build_subwords",
    "build_vocabulary",
    "caption_frequencies",
    "caption_scores",
    "cider",
    "cider_d",
    "document_frequencies",
    "load_frequencies",
    "meteor",
    "meteor_java",
    "read_corpus",
    "rouge_l",
    "spice",
    "tokenize_caption",
    "tokenize_java",
    "write_frequencies",
    "write_vocabulary",
]
