"""Contract checks for models and attention modules, and toy models with known outputs.

from overt.testing import check_model, toy_batch

def test_my_model():
    check_model(lambda: MyModel(answers=3), toy_batch())
"""

from overt.testing.attention import ContractReport, check_attention_module, examine_attention_module
from overt.testing.attention_inputs import AttentionInputs, InputSizes, default_call, weights_to_map
from overt.testing.decoders import check_decoder
from overt.testing.metric_trust import MetricTrust, rank_truthful_maps
from overt.testing.models import CHECKS, check_model
from overt.testing.planted_rules import PlantedRule, RuleModel, planted_rules, planted_samples
from overt.testing.toys import Copier, CopierState, PlantedCell, PlantedWord, toy_batch

__all__ = [
    "CHECKS",
    "AttentionInputs",
    "ContractReport",
    "Copier",
    "CopierState",
    "InputSizes",
    "MetricTrust",
    "PlantedCell",
    "PlantedRule",
    "PlantedWord",
    "RuleModel",
    "check_attention_module",
    "check_decoder",
    "check_model",
    "default_call",
    "examine_attention_module",
    "planted_rules",
    "planted_samples",
    "rank_truthful_maps",
    "toy_batch",
    "weights_to_map",
]
