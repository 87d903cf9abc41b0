"""Removal of inputs: fills and imputation compared with scipy, and by hand."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.ndimage
import scipy.sparse
import torch
from scipy.sparse.linalg import spsolve

from overt.metrics import removal
from overt.metrics.removal import (
    blur_fill,
    feature_removal,
    linear_imputation,
    mean_fill,
    pixel_removal,
    token_removal,
    zero_fill,
)


def all_pixels(picture: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(picture), *picture.shape[-2:], dtype=torch.bool)


def recording_classifier(seen: list[torch.Tensor]):
    """Return a classifier that records its inputs."""

    def classify(shown: torch.Tensor) -> torch.Tensor:
        seen.append(shown)
        return torch.zeros(len(shown), 2)

    return classify


def published_imputation(image: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Solve the equations of ROAD pixel by pixel with scipy, without noise."""
    height, width = known.shape
    holes = [(y, x) for y in range(height) for x in range(width) if not known[y, x]]
    place = {at: number for number, at in enumerate(holes)}
    matrix = scipy.sparse.lil_matrix((len(holes), len(holes)))
    right = np.zeros((len(holes), len(image)))
    for number, (y, x) in enumerate(holes):
        total = 1.0
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                if not dy and not dx:
                    continue
                weight = 1 / 12 if dy and dx else 1 / 6
                at = (y + dy, x + dx)
                if not (0 <= at[0] < height and 0 <= at[1] < width):
                    total -= weight  # neighbours weigh more at an edge
                elif known[at]:
                    right[number] -= weight * image[:, at[0], at[1]]
                else:
                    matrix[number, place[at]] = weight
        matrix[number, number] = -total
    solved = spsolve(matrix.tocsc(), right).reshape(len(holes), -1)
    filled = image.copy()
    for number, (y, x) in enumerate(holes):
        filled[:, y, x] = solved[number]
    return filled


SOLVERS = ["directly", "in steps"]


@pytest.mark.parametrize("solver", SOLVERS)
def test_imputation_solves_the_published_equations(solver, generator, monkeypatch):
    monkeypatch.setattr(removal, "_SMALL", 0 if solver == "directly" else 10_000)
    picture = torch.rand(4, 3, 9, 11, generator=generator)
    removed = (
        torch.rand(4, 9, 11, generator=generator)
        > torch.tensor([0.9, 0.5, 0.2, 0.02])[:, None, None]
    )
    found = linear_imputation(picture, removed, all_pixels(picture), generator, 0.0, tolerance=1e-9)
    for b in range(4):
        expected = published_imputation(picture[b].double().numpy(), ~removed[b].numpy())
        np.testing.assert_allclose(found[b].numpy(), expected, atol=1e-6)
    usual = linear_imputation(picture, removed, all_pixels(picture), generator, noise=0.0)
    torch.testing.assert_close(usual, found, atol=1e-3, rtol=0)


def test_imputation_adds_seeded_noise_to_removed_pixels(generator):
    picture = torch.rand(2, 3, 16, 16, generator=generator)
    removed = torch.rand(2, 16, 16, generator=generator) > 0.5
    one, two = (
        linear_imputation(
            picture, removed, all_pixels(picture), torch.Generator().manual_seed(1), noise=0.1
        )
        for _ in range(2)
    )
    assert torch.equal(one, two)
    kept = ~removed[:, None].expand_as(picture)
    assert torch.equal(one[kept], picture[kept])
    smooth = linear_imputation(picture, removed, all_pixels(picture), generator, noise=0.0)
    assert float((one - smooth)[~kept].std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_removing_everything_imputes_the_mean(solver, generator, monkeypatch):
    monkeypatch.setattr(removal, "_SMALL", 0 if solver == "directly" else 10_000)
    picture = torch.rand(2, 3, 4, 4, generator=generator)
    removed = all_pixels(picture)
    found = linear_imputation(picture, removed, removed, generator, noise=0.0)
    torch.testing.assert_close(found, mean_fill(picture, removed, removed))
    single = linear_imputation(
        picture[..., :1, :1], removed[:, :1, :1], removed[:, :1, :1], generator, 0.0
    )
    torch.testing.assert_close(single, picture[..., :1, :1])


def test_blur_agrees_with_scipy(generator):
    picture = torch.rand(2, 3, 12, 12, generator=generator)
    found = blur_fill(picture, all_pixels(picture), all_pixels(picture), spread=0.1)
    ones = np.ones((12, 12))

    def blur(image: np.ndarray) -> np.ndarray:
        return scipy.ndimage.gaussian_filter(image, 1.2, mode="constant", truncate=20)

    for b in range(2):
        for c in range(3):
            expected = blur(picture[b, c].double().numpy()) / blur(ones)
            np.testing.assert_allclose(found[b, c].numpy(), expected, atol=1e-5)
    with pytest.raises(ValueError, match="spread"):
        blur_fill(picture, all_pixels(picture), all_pixels(picture), spread=0.0)


def test_mean_fill_uses_visible_values(generator):
    picture = torch.rand(2, 3, 1, 6, generator=generator)
    seen = torch.tensor([[[True] * 6], [[True, True, False, False, False, False]]])
    found = mean_fill(picture, seen, seen)
    torch.testing.assert_close(found[1, :, 0, 4], picture[1, :, 0, :2].mean(dim=-1))
    assert (zero_fill(picture, seen, seen) == 0).all()


FILLS = [
    zero_fill,
    mean_fill,
    blur_fill,
    partial(linear_imputation, generator=torch.Generator().manual_seed(0), noise=0.0),
]


@pytest.mark.parametrize("fill", FILLS, ids=["zero", "mean", "blurred", "imputed"])
def test_padding_does_not_change_the_fill(fill, generator):
    """Values of padding words do not change the fill."""
    values = torch.randn(2, 6, 4, generator=generator)
    present = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    other = torch.where(present[..., None], values, 100.0)
    keep = torch.tensor([[1.0, 0, 1, 0, 0, 1], [0.0, 1, 0, 0, 1, 0]])
    kept = []
    for one in (values, other):
        seen = []
        decide = feature_removal(
            lambda mixed, to=seen: to.append(mixed) or mixed[:, 0], one, (6,), fill, present
        )
        decide(keep)
        kept.append(torch.where(present[..., None], seen[0], 0))
    torch.testing.assert_close(kept[0], kept[1])


@pytest.mark.parametrize("fill", FILLS, ids=["zero", "mean", "blurred", "imputed"])
def test_kept_cells_are_unchanged(fill, generator):
    images = torch.rand(2, 3, 8, 12, generator=generator)
    keep = torch.tensor([[1.0, 0, 0, 1, 1, 0], [1.0] * 6])
    seen = []
    pixel_removal(recording_classifier(seen), images, (2, 3), fill)(keep)
    blocks = keep.reshape(2, 1, 2, 3).repeat_interleave(4, 2).repeat_interleave(4, 3).bool()
    kept = blocks.expand_as(images)
    assert torch.equal(seen[0][kept], images[kept])
    assert torch.equal(seen[0][1], images[1])
    assert not (seen[0] == images)[~kept].all()


def test_features_keep_their_order_on_the_grid(generator):
    values = torch.randn(1, 6, 2, generator=generator)
    for cells in ((2, 3), (6,)):
        seen = []
        decide = feature_removal(
            lambda mixed, to=seen: to.append(mixed) or mixed[:, 0], values, cells, zero_fill
        )
        decide(torch.tensor([[1.0, 1, 0, 1, 1, 0]]))
        assert torch.equal(seen[0][0, [2, 5]], torch.zeros(2, 2))
        assert torch.equal(seen[0][0, [0, 1, 3, 4]], values[0, [0, 1, 3, 4]])


def test_removal_is_differentiable_by_the_mask(generator):
    images = torch.rand(1, 3, 4, 4, generator=generator)
    decide = pixel_removal(lambda shown: shown.flatten(1)[:, :2], images, (2, 2), mean_fill)
    keep = torch.ones(1, 4, requires_grad=True)
    decide(keep).sum().backward()
    expected = (images - images.mean(dim=(2, 3), keepdim=True)).flatten(1)[0, :2].sum()
    torch.testing.assert_close(keep.grad[0, 0], expected)


def test_removed_tokens_are_replaced_by_the_blank_token():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 0]])
    seen = []
    decide = token_removal(recording_classifier(seen), tokens, blank=3)
    decide(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]))
    assert seen[0].tolist() == [[5, 3, 7], [3, 9, 0]]


def test_a_model_may_return_an_output_with_logits():
    images = torch.rand(2, 1, 2, 4)
    plain = pixel_removal(lambda shown: shown.flatten(1), images, (1, 2))
    named = pixel_removal(lambda shown: SimpleNamespace(logits=shown.flatten(1)), images, (1, 2))
    keep = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert torch.equal(named(keep), plain(keep))
    pair = pixel_removal(lambda shown: (shown.flatten(1), None), images, (1, 2))
    with pytest.raises(TypeError, match="logits.*got tuple"):
        pair(keep)
