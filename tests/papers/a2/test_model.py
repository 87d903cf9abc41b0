"""Captioners built from a config, with and without alignment, saved and loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt import losses
from overt.data.batch import Batch
from overt.nn.captioning.captioner import CachedRegionEncoder, Captioner
from overt.nn.mask_perturbation import CAPTIONER, MASKS, find_cross_attention
from overt.nn.mask_perturbation.aligner import fuse_enhanced_normalized, keep_mask_gradient
from overt.papers.a2.config import A2Align, A2Fusion, A2MaskSource, A2Model, A2Preset
from overt.papers.a2.model import (
    AlignedCaptioner,
    CaptionerNet,
    build_captioner,
    cross_attention_places,
    load_captioner,
    shuffle_regions,
)

SMALL = A2Model(width=0.03, layers=2)
TOKENS = torch.tensor([[3, 5, 6, 4], [3, 7, 4, 0]])


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        ids=("a", "b"),
        features=torch.randn(2, 5, 6, generator=generator),
        region_mask=torch.arange(5) < torch.tensor([[5], [3]]),
        tokens=TOKENS,
        token_mask=TOKENS > 0,
    )


def build_model(align: A2Align, seed: int = 0) -> CaptionerNet:
    torch.manual_seed(seed)
    return build_captioner(SMALL, align, 9, CachedRegionEncoder(6)).eval()


def build_aligned(align: A2Align) -> AlignedCaptioner:
    found = build_model(align)
    assert isinstance(found, AlignedCaptioner)
    return found


def test_without_fusion_the_model_is_a_plain_captioner():
    assert isinstance(build_model(A2Align(A2Fusion.NONE)), Captioner)
    assert (
        build_captioner(A2Model(), A2Align(A2Fusion.NONE), 9, CachedRegionEncoder(6)).sizes.width
        == 512
    )  # type: ignore[union-attr]


def test_cross_attention_places_equal_those_found_by_a_forward_pass():
    plain = build_model(A2Align(A2Fusion.NONE))
    assert isinstance(plain, Captioner)
    assert find_cross_attention(plain, lambda: plain(batch())) == cross_attention_places(
        plain.sizes
    )


@pytest.mark.parametrize("fuse", [one for one in A2Fusion if one is not A2Fusion.NONE])
@pytest.mark.parametrize("masks", list(A2MaskSource))
def test_each_mask_source_works_with_each_fusion(fuse: A2Fusion, masks: A2MaskSource) -> None:
    model = build_aligned(A2Align(fuse, masks=masks))
    sets = model.parameter_sets()
    assert (MASKS in sets) is (masks in (A2MaskSource.LEARNED, A2MaskSource.SHUFFLED))
    owned = [id(one) for many in sets.values() for one in many]
    assert len(set(owned)) == len(owned) == len(list(model.parameters()))
    assert model(batch()).logits.isfinite().all()
    assert CAPTIONER in sets


@torch.no_grad()
def test_constant_masks_keep_the_logits_and_random_masks_change_them():
    plain, one = (
        build_model(A2Align(A2Fusion.NONE)),
        build_aligned(A2Align(masks=A2MaskSource.CONSTANT)),
    )
    one.captioner.load_state_dict(plain.state_dict())
    torch.testing.assert_close(one(batch()).logits, plain(batch()).logits, atol=1e-5, rtol=0)
    other = build_aligned(A2Align(masks=A2MaskSource.RANDOM))
    other.captioner.load_state_dict(plain.state_dict())
    assert (other(batch()).logits - plain(batch()).logits).abs().max() > 1e-4


def test_only_free_masks_get_gradients_from_the_caption_loss():
    for masks, reached in (
        (A2MaskSource.FREE, True),
        (A2MaskSource.LEARNED, False),
        (A2MaskSource.SHUFFLED, False),
    ):
        model = build_aligned(A2Align(masks=masks))
        with model.aligned():
            logits = model.captioner.decode_captions(model.encode(batch()), TOKENS[:, :-1]).logits
        loss = losses.next_token_cross_entropy(logits, TOKENS[:, 1:], TOKENS[:, 1:] > 0).total
        found = torch.autograd.grad(loss, model.mask_parameters(), allow_unused=True)
        assert any(one is not None and bool(one.any()) for one in found) is reached


def test_shuffled_masks_have_the_same_values_and_no_gradient():
    torch.manual_seed(0)
    mask = torch.rand(2, 3, 4, 30, requires_grad=True)
    found = shuffle_regions(mask)
    assert not found.requires_grad and not torch.equal(found, mask)
    torch.testing.assert_close(found.sort(dim=-1).values, mask.detach().sort(dim=-1).values)


@pytest.mark.parametrize("preset", list(A2Preset))
@torch.no_grad()
def test_a_saved_captioner_gives_the_same_logits(tmp_path: Path, preset: A2Preset) -> None:
    model = build_model(A2Align(preset=preset, penalty=0.2))
    assert isinstance(model, AlignedCaptioner)
    model.save_pretrained(tmp_path / "model")
    again = load_captioner(tmp_path / "model")
    assert isinstance(again, AlignedCaptioner) and again.align == model.align
    torch.testing.assert_close(again(batch()).logits, model(batch()).logits)


@torch.no_grad()
def test_a_plain_captioner_is_loaded_as_a_captioner(tmp_path: Path) -> None:
    model = build_model(A2Align(A2Fusion.NONE))
    assert isinstance(model, Captioner)
    model.save_pretrained(tmp_path / "model")
    assert isinstance(load_captioner(tmp_path / "model"), Captioner)


def test_presets_select_finish_average_and_mask_gradient():
    printed, ours = build_aligned(A2Align(preset=A2Preset.PAPER)), build_aligned(A2Align())
    assert printed.finish is not ours.finish and printed.average is not ours.average
    assert build_aligned(replace(A2Align(), preset=A2Preset.LU2021)).through is keep_mask_gradient


def test_a_preset_normalizes_enhanced_weights_before_the_fusion():
    ours, found = build_aligned(A2Align()), build_aligned(A2Align(preset=A2Preset.ENHANCED_FIRST))
    assert found.finish is fuse_enhanced_normalized
    assert {**found.choices, "finish": ""} == {**ours.choices, "finish": ""}
