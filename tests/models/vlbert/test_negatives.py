"""Hard negatives: scikit-learn's neighbours, never the image itself, whatever the portion."""

import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from overt.models.vlbert.negatives import nearest_others


@pytest.mark.parametrize("portion", [3, 100])
def test_they_are_the_neighbours_of_scikit_learn(portion):
    features = torch.randn(20, 5)
    found = nearest_others(features, 4, portion)
    ball = NearestNeighbors(n_neighbors=5, algorithm="ball_tree").fit(features.numpy())
    expected = ball.kneighbors(features.numpy(), return_distance=False)[:, 1:]
    assert found.tolist() == expected.tolist()


def test_twins_are_found_and_no_image_is_its_own():
    features = torch.tensor([[0.0], [5.0], [0.0], [0.0]])
    found = nearest_others(features, 2)
    assert found.tolist() == [[2, 3], [0, 2], [0, 3], [0, 2]]
    with pytest.raises(ValueError, match="4 other images cannot be found among 4"):
        nearest_others(features, 4)
