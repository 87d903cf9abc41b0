"""Hard negatives: equal to scikit-learn's neighbours without the image, for any chunk size."""

import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from overt.nn.vlbert.hard_negatives import nearest_images


@pytest.mark.parametrize("portion", [3, 100])
def test_nearest_images_equal_those_of_scikit_learn(portion):
    features = torch.randn(20, 5)
    found = nearest_images(features, 4, portion)
    ball = NearestNeighbors(n_neighbors=5, algorithm="ball_tree").fit(features.numpy())
    expected = ball.kneighbors(features.numpy(), return_distance=False)[:, 1:]
    assert found.tolist() == expected.tolist()


def test_duplicates_are_neighbours_and_the_image_itself_is_not():
    features = torch.tensor([[0.0], [5.0], [0.0], [0.0]])
    found = nearest_images(features, 2)
    assert found.tolist() == [[2, 3], [0, 2], [0, 3], [0, 2]]
    with pytest.raises(ValueError, match="4 images"):
        nearest_images(features, 4)
