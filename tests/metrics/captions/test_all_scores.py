"""`caption_scores`: all caption metrics of a set of texts."""

import pytest
import torch

from overt.metrics.captions import bleu, caption_scores, cider_d, meteor, rouge_l
from tests.metrics.captions.examples import random_captions

CANDIDATES, REFERENCES = random_captions(20)
TEXTS = [" ".join(words).capitalize() + " ." for words in CANDIDATES]
OTHERS = [[" ".join(words) + " ." for words in texts] for texts in REFERENCES]


def test_table_contains_the_value_of_each_metric():
    table = caption_scores(TEXTS, OTHERS).table()
    assert table["BLEU-4"] == float(bleu(CANDIDATES, REFERENCES).corpus()[3])
    assert table["METEOR (words and stems)"] == meteor(CANDIDATES, REFERENCES).corpus()
    assert table["ROUGE-L"] == float(rouge_l(CANDIDATES, REFERENCES).mean())
    assert table["CIDEr-D"] == float(cider_d(CANDIDATES, REFERENCES).mean())
    assert len(table) == 7


def test_scores_of_selected_rows_equal_scores_of_these_captions():
    scores, rows = caption_scores(TEXTS, OTHERS), torch.tensor([1, 1, 5])
    drawn = scores.select(rows)
    assert len(scores) == 20 and len(drawn) == 3
    assert drawn.table()["CIDEr-D"] == float(scores.cider_d[rows].mean())
    again = bleu([CANDIDATES[at] for at in rows], [REFERENCES[at] for at in rows])
    assert drawn.table()["BLEU-2"] == float(again.corpus()[1])


def test_a_custom_tokenizer_is_used():
    assert caption_scores(["A b"], [["a b"]], str.split).table()["BLEU-1"] == pytest.approx(0.5)


def test_missing_texts_or_references_raise():
    for ours, theirs in ((["a"], []), ([], [])):
        with pytest.raises(ValueError, match="0"):
            caption_scores(ours, theirs)
