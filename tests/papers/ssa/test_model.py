"""Text classifiers of Self Supervision for Attention Networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overt import nn
from overt.errors import UserError
from overt.papers.ssa.config import (
    SsaPretrained,
    SsaTextModel,
    SsaTextNetwork,
)
from overt.papers.ssa.model import encoder_factory, text_classifier
from tests.experiments import foreign

RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


def test_the_structured_classifier_has_the_sizes_of_the_paper() -> None:
    full = SsaTextModel(SsaTextNetwork.STRUCTURED, hops=30)
    net = text_classifier(full, 50, 6)
    assert isinstance(net, nn.StructuredClassifier)
    config = net.config()
    assert (config["state"], config["hidden"], config["hops"], config["joint"]) == (
        256,
        350,
        30,
        2000,
    )


@pytest.mark.long
def test_a_pretrained_encoder_is_fine_tuned(run: RunFixture, tmp_path: Path) -> None:
    folder = foreign.bert(tmp_path / "bert")
    out, results = run("ssa-minilm", f"model.folder={folder}", "model.width=0.5")
    assert results["steps"] == 4 and "gamma_text" in results["ours"]
    net = nn.TextTransformer.from_pretrained(out / "model")
    assert len(net.model.base_model.encoder.layer) == 1  # half of two
    with pytest.raises(UserError, match=r"config.*missing"):
        encoder_factory(SsaPretrained(str(tmp_path / "none")))(2)
