"""Captioners as recipes make them, aligned or not, and kept on disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt import supervise
from overt.data.batch import Batch
from overt.models.captioning.captioner import CachedRegions, Captioner
from overt.recipes.a2.networks import AlignedCaptioner, Net, load, network, places, shuffled
from overt.recipes.a2.recipe import Align, Fuse, Masks, Model, Preset
from overt.supervise.perturb import CAPTIONER, MASKS, crossings

SMALL = Model(width=0.03, layers=2)
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


def made(align: Align, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return network(SMALL, align, 9, CachedRegions(6)).eval()


def aligned(align: Align) -> AlignedCaptioner:
    found = made(align)
    assert isinstance(found, AlignedCaptioner)
    return found


def test_without_a_fusion_it_is_the_plain_captioner():
    assert isinstance(made(Align(Fuse.NONE)), Captioner)
    assert network(Model(), Align(Fuse.NONE), 9, CachedRegions(6)).sizes.width == 512  # type: ignore[union-attr]


def test_the_places_are_those_that_a_run_finds():
    plain = made(Align(Fuse.NONE))
    assert isinstance(plain, Captioner)
    assert crossings(plain, lambda: plain(batch())) == places(plain.sizes)


@pytest.mark.parametrize("fuse", [one for one in Fuse if one is not Fuse.NONE])
@pytest.mark.parametrize("masks", list(Masks))
def test_every_kind_of_mask_goes_with_every_fusion(fuse: Fuse, masks: Masks) -> None:
    model = aligned(Align(fuse, masks=masks))
    sets = model.parameter_sets()
    assert (MASKS in sets) is (masks in (Masks.LEARNED, Masks.SHUFFLED))
    owned = [id(one) for many in sets.values() for one in many]
    assert len(set(owned)) == len(owned) == len(list(model.parameters()))
    assert model(batch()).logits.isfinite().all()
    assert CAPTIONER in sets


@torch.no_grad()
def test_constant_masks_change_nothing_and_random_ones_do():
    plain, one = made(Align(Fuse.NONE)), aligned(Align(masks=Masks.CONSTANT))
    one.captioner.load_state_dict(plain.state_dict())
    torch.testing.assert_close(one(batch()).logits, plain(batch()).logits, atol=1e-5, rtol=0)
    other = aligned(Align(masks=Masks.RANDOM))
    other.captioner.load_state_dict(plain.state_dict())
    assert (other(batch()).logits - plain(batch()).logits).abs().max() > 1e-4


def test_free_masks_learn_from_captions_and_learned_ones_do_not():
    for masks, reached in ((Masks.FREE, True), (Masks.LEARNED, False), (Masks.SHUFFLED, False)):
        model = aligned(Align(masks=masks))
        with model.aligned():
            logits = model.captioner.write(model.encode(batch()), TOKENS[:, :-1]).logits
        loss = supervise.next_words(logits, TOKENS[:, 1:], TOKENS[:, 1:] > 0).total
        found = torch.autograd.grad(loss, model.mask_parameters(), allow_unused=True)
        assert any(one is not None and bool(one.any()) for one in found) is reached


def test_shuffled_masks_have_the_same_numbers_and_no_gradient():
    torch.manual_seed(0)
    mask = torch.rand(2, 3, 4, 30, requires_grad=True)
    found = shuffled(mask)
    assert not found.requires_grad and not torch.equal(found, mask)
    torch.testing.assert_close(found.sort(dim=-1).values, mask.detach().sort(dim=-1).values)


@pytest.mark.parametrize("preset", list(Preset))
@torch.no_grad()
def test_a_saved_captioner_tells_the_same(tmp_path: Path, preset: Preset) -> None:
    model = made(Align(preset=preset, penalty=0.2))
    assert isinstance(model, AlignedCaptioner)
    model.save_pretrained(tmp_path / "model")
    again = load(tmp_path / "model")
    assert isinstance(again, AlignedCaptioner) and again.align == model.align
    torch.testing.assert_close(again(batch()).logits, model(batch()).logits)


@torch.no_grad()
def test_a_plain_captioner_is_loaded_as_such(tmp_path: Path) -> None:
    model = made(Align(Fuse.NONE))
    assert isinstance(model, Captioner)
    model.save_pretrained(tmp_path / "model")
    assert isinstance(load(tmp_path / "model"), Captioner)


def test_presets_choose_what_the_paper_leaves_open():
    printed, ours = aligned(Align(preset=Preset.PAPER)), aligned(Align())
    assert printed.finish is not ours.finish and printed.average is not ours.average
    assert aligned(replace(Align(), preset=Preset.LU2021)).through is supervise.perturb.attached
