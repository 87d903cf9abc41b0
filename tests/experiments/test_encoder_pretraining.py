"""The image encoder is pretrained on the attributes of cells, the decoder is not touched."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from overt.data.scenes.cell_attributes import CellAttributes
from overt.data.scenes.dataset import Scenes
from overt.experiments import runner
from overt.experiments.encoder_pretraining import AttributeClassifier, attribute_losses
from overt.experiments.vision_language_recipes import EncoderPretraining
from overt.io import read_tensors
from overt.nn.vqa.vision_language import VisionLanguageSizes, VisionLanguageVQA
from overt.papers.catalog import build
from tests.experiments.test_vision_language import tiny

SCENES = Scenes("val", seed=0, count=3, size=32, questions=2, cells=(4, 4))


def small() -> VisionLanguageVQA:
    torch.manual_seed(0)
    sizes = VisionLanguageSizes(
        SCENES.vocabulary.words, SCENES.answers, side=32, width=16, vision_layers=1, layers=2,
        heads=2,
    )  # fmt: skip
    return VisionLanguageVQA(sizes)


def test_the_features_are_the_image_tokens_of_the_decoder() -> None:
    model = small().eval()
    batch = SCENES.batch([0, 1])
    assert batch.images is not None
    prompts = model.encode(batch)
    seen = []
    text = model.vlm.model.language_model
    hook = text.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        model.vlm(**prompts.as_kwargs())
        found = model.image_features(model.normalize_pixels(batch.images))
    hook.remove()
    torch.testing.assert_close(found.repeat_interleave(2, dim=0), seen[0][:, 1:17])


def test_the_loss_is_the_sum_over_attributes_and_reaches_the_encoder_only() -> None:
    model = small()
    net = AttributeClassifier(model)
    batch = CellAttributes(SCENES).batch([0, 1])
    scores = net(batch["images"])
    assert [tuple(one.shape) for one in scores] == [(2, 16, n) for n in (7, 9, 4, 3)]
    loss = attribute_losses(scores, batch["attributes"])
    labels = F.one_hot(batch["attributes"][..., 2], 4)
    size = -(scores[2].log_softmax(-1) * labels).sum(-1)
    others = attribute_losses((scores[0], scores[1]), batch["attributes"][..., :2]).total
    others = others + attribute_losses(scores[3:], batch["attributes"][..., 3:]).total
    assert float(loss.count) == 32
    torch.testing.assert_close(loss.total, others + size.sum())
    loss.total.backward()
    reached = {name for name, one in model.named_parameters() if one.grad is not None}
    assert reached and all("vision_tower" in at or "projector" in at for at in reached)
    trained = {at for at, _ in net.named_parameters()}
    assert not any("language" in at for at in trained)


@pytest.mark.long
@pytest.mark.parametrize("epochs", [0, 1])
def test_the_first_stage_trains_the_encoder_of_the_model(epochs: int, tmp_path: Path) -> None:
    recipe = tiny(pretrain=EncoderPretraining(epochs, batch=8))
    recipe = replace(recipe, train=replace(recipe.train, steps=1, rate=0.0))
    found = runner.run(recipe, tmp_path / "run", build, seed=0, device="cpu", show_progress=False)
    assert found["steps"] == 1 + epochs
    assert (tmp_path / "run/checkpoints/encoder").is_dir() == bool(epochs)
    saved = read_tensors(tmp_path / "run/model/model.safetensors")
    assert any("vision_tower" in name for name in saved)
    assert not any("classify" in name for name in saved)
