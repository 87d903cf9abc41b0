"""For authors: contracts that can be checked, and toys whose answers are known by hand.

from overt.testing import check_model, toy_batch

def test_my_model_keeps_the_contract():
    check_model(lambda: MyModel(answers=3), toy_batch())
"""

from overt.testing.attention import (
    Report,
    check_attention_module,
    examine_attention_module,
)
from overt.testing.decoders import check_decoder
from overt.testing.given import Given, Sizes, as_map, plainly
from overt.testing.models import CHECKS, check_model
from overt.testing.toys import Copied, Copier, PlantedCell, PlantedWord, toy_batch

__all__ = [
    "CHECKS",
    "Copied",
    "Copier",
    "Given",
    "PlantedCell",
    "PlantedWord",
    "Report",
    "Sizes",
    "as_map",
    "check_attention_module",
    "check_decoder",
    "check_model",
    "examine_attention_module",
    "plainly",
    "toy_batch",
]
