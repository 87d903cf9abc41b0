"""For authors: contracts that can be checked, and toys whose answers are known by hand.

from overt.testing import check_model, toy_batch

def test_my_model_keeps_the_contract():
    check_model(lambda: MyModel(answers=3), toy_batch())
"""

from overt.testing.decoders import check_decoder
from overt.testing.models import CHECKS, check_model
from overt.testing.toys import Copied, Copier, PlantedCell, PlantedWord, toy_batch

__all__ = [
    "CHECKS",
    "Copied",
    "Copier",
    "PlantedCell",
    "PlantedWord",
    "check_decoder",
    "check_model",
    "toy_batch",
]
