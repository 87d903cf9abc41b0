"""CNN classifiers: layers by hand, masks, image sizes, attention, saving."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.attention import grid
from overt.geometry import PixelGeometry
from overt.nn.cnn import (
    AttentiveCNN,
    ConvBackbone,
    ImageFeatures,
    SmallCNN,
    cell_coordinates,
    encode_images,
)
from overt.targets.surrogate.masked_inference import MultiMaskModel
from overt.testing import check_model, toy_batch


def small() -> SmallCNN:
    torch.manual_seed(0)
    return SmallCNN(classes=3, width=0.1)


def image_batch(height: int, width: int, samples: int = 2):
    """Make a batch of images of the given size."""
    images = torch.randint(0, 256, (samples, 3, height, width), dtype=torch.uint8)
    geometry = PixelGeometry.identity(samples, (height, width))
    ids = tuple(f"image-{at}" for at in range(samples))
    return replace(toy_batch(samples), ids=ids, images=images, image_of=None, geometry=geometry)


def test_small_cnn_passes_check_model():
    check_model(small, toy_batch())


def slow_convolution(x, weight, stride):
    """Compute a 3 x 3 convolution with zero padding element by element."""
    rows, columns = (math.ceil(side / stride) for side in x.shape[1:])
    out = torch.zeros(len(weight), rows, columns, dtype=x.dtype)
    for o in range(len(weight)):
        for r in range(rows):
            for c in range(columns):
                for i in range(len(x)):
                    for dr in range(3):
                        for dc in range(3):
                            y, z = r * stride + dr - 1, c * stride + dc - 1
                            if 0 <= y < x.shape[1] and 0 <= z < x.shape[2]:
                                out[o, r, c] += weight[o, i, dr, dc] * x[i, y, z]
    return out


def test_backbone_block_is_convolution_norm_and_relu():
    net = ConvBackbone([2, 4], [2, 1]).double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.running_mean, module.running_var, module.weight, module.bias):
                nn.init.uniform_(value, 0.5, 1.5)
    net.eval()
    image = torch.rand(3, 5, 4, dtype=torch.float64)
    x = image
    for at, stride in ((0, 2), (3, 1)):
        x = slow_convolution(x, net.blocks[at].weight, stride)
        norm = net.blocks[at + 1]
        shape = (-1, 1, 1)
        x = (x - norm.running_mean.view(shape)) / (norm.running_var.view(shape) + norm.eps).sqrt()
        x = (x * norm.weight.view(shape) + norm.bias.view(shape)).clamp_min(0)
    torch.testing.assert_close(net(image[None])[0], x)
    assert net.channels == 4


def test_uint8_images_are_normalized():
    net = ConvBackbone([4], [1]).eval()
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 4, 2)
    scaled = (pixels.float() - 110) / 70
    assert scaled.min() == pytest.approx(-1.6, abs=0.05)
    assert scaled.max() == pytest.approx(2.1, abs=0.05)
    assert torch.equal(net(pixels), net(scaled))  # floats are unchanged


def test_missing_strides_raise():
    with pytest.raises(ValueError, match="shorter"):
        ConvBackbone([4, 4, 4], [1, 2])


@pytest.mark.parametrize(
    ("size", "shape"),
    [((32, 32), (8, 8)), ((1, 1), (1, 1)), ((5, 7), (2, 2)), ((33, 64), (9, 16)), ((9, 4), (3, 1))],
)
def test_any_image_size_gives_a_grid_of_a_quarter(size, shape):
    net, batch = small().eval(), image_batch(*size)
    features = net.encode(batch)
    assert features.layout.find("image").shape == shape
    assert features.values.shape[1] == shape[0] * shape[1]
    assert features.layout.find("image").geometry.canvas == size
    assert net(batch).prediction.isfinite().all()


def test_shared_image_is_encoded_once():
    net, batch = small().eval(), toy_batch(5)
    seen = []
    net.backbone.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    together = net(batch).prediction
    assert seen == [len(batch.images)] == [4]
    apart = replace(
        batch,
        images=batch.images[batch.image_of],
        geometry=batch.geometry[batch.image_of],
        image_of=None,
    )
    torch.testing.assert_close(net(apart).prediction, together)
    assert seen == [4, 5]


def test_prediction_is_linear_in_the_mean_of_masked_cells():
    net = small().double().eval()
    features = net.encode(toy_batch())
    mask = torch.rand(features.values.shape[:2], dtype=torch.float64)
    linear = net.decision[1]
    for b, row in enumerate(net.decide(features, {"image": mask}).prediction):
        mean = sum(m * cell for m, cell in zip(mask[b], features.values[b], strict=True)) / 64
        torch.testing.assert_close(row, linear.weight @ mean + linear.bias)
    nothing = net.decide(features, {"image": torch.zeros_like(mask)}).prediction
    torch.testing.assert_close(nothing, linear.bias.expand_as(nothing))
    assert net(toy_batch()).attention == ()


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.float64])
def test_masks_of_any_dtype_keep_the_dtype_of_features(kind):
    values = torch.ones(2, 4, 3, dtype=torch.bfloat16)
    masked = ImageFeatures(values, grid(2, 2)).masked({"image": torch.ones(2, 4, dtype=kind)})
    assert masked.dtype == torch.bfloat16 and torch.equal(masked, values)
    assert ImageFeatures(values, grid(2, 2)).masked({"text": torch.zeros(2, 4)}) is values


def test_half_and_double_precision_work():
    for kind in (torch.bfloat16, torch.float64):
        net = small().to(kind).eval()
        batch = toy_batch()
        masked = net.decide(net.encode(batch), {"image": torch.ones(len(batch), 64)})
        assert masked.prediction.dtype == net(batch).prediction.dtype == kind


def test_cell_coordinates_span_minus_one_to_one():
    like = torch.zeros(2, 6, 5)
    places = cell_coordinates(grid(2, 3), like)
    corners = [[-1, -1], [-1, 0], [-1, 1], [1, -1], [1, 0], [1, 1]]
    assert places.tolist() == [corners, corners]


def test_batch_without_images_raises():
    with pytest.raises(ValueError, match="images"):
        small()(replace(toy_batch(), images=None, geometry=None, image_of=None))


# --- with attention


def attentive() -> AttentiveCNN:
    torch.manual_seed(0)
    return AttentiveCNN(classes=3, channels=(4, 4, 6, 5), hidden=7)


def test_attentive_cnn_passes_check_model_and_is_saved(tmp_path):
    check_model(attentive, toy_batch())
    net = attentive().eval()
    net.save_pretrained(tmp_path / "net")
    back = AttentiveCNN.from_pretrained(tmp_path / "net")
    assert torch.equal(back(toy_batch()).prediction, net(toy_batch()).prediction)
    net.config()["channels"].append(1)
    assert back.config() == net.config()


def test_attentive_cnn_has_the_published_feature_shape():
    net, batch = AttentiveCNN(classes=10).eval(), toy_batch()
    features = net.encode(batch)
    assert features.values.shape == (4, 64, 32)
    assert features.layout.find("image").shape == (8, 8)
    assert net(batch).attention_to("image").weights.shape == (4, 1, 1, 1, 64)


def test_attentive_cnn_attention_follows_its_equation():
    """Compute softmax(w tanh(W x)) over the cells and the weighted sum cell by cell."""
    net = attentive().double().eval()
    features = net.encode(toy_batch())
    mask = torch.rand(features.values.shape[:2], dtype=torch.float64)
    found = net.decide(features, {"image": mask})
    linear = net.decision[1]
    for b in range(len(mask)):
        cells = [m * cell for m, cell in zip(mask[b], features.values[b], strict=True)]
        raised = [(net.outer.weight @ torch.tanh(net.inner.weight @ one)).exp() for one in cells]
        weights = torch.stack(raised)[:, 0] / sum(raised)
        torch.testing.assert_close(found.attention[0].weights[b].flatten(), weights)
        summary = sum(w * cell for w, cell in zip(weights, cells, strict=True))
        torch.testing.assert_close(found.prediction[b], linear.weight @ summary + linear.bias)


def test_finding_19_each_cell_has_the_channels_of_its_position():
    """A view instead of a transpose would mix values of several positions."""
    features = torch.arange(2 * 3 * 2 * 4.0).view(2, 3, 2, 4)
    batch = image_batch(2, 4)
    cells = encode_images(_Fixed(features), batch).values
    for b in range(2):
        for y in range(2):
            for x in range(4):
                assert torch.equal(cells[b, 4 * y + x], features[b, :, y, x])
    assert not torch.equal(cells, features.reshape(2, 8, 3))


class _Fixed(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.features = features

    def forward(self, images):
        return self.features


def test_pooled_features_are_the_mean_of_the_cells():
    assert ImageFeatures(torch.tensor([[[1.0, 2], [3, 6]]]), grid(1, 2)).pooled().tolist() == [
        [2, 4]
    ]


def test_decide_many_equals_one_mask_at_a_time():
    torch.manual_seed(0)
    net = AttentiveCNN(3, (4, 4, 4, 4), 4).eval()
    assert isinstance(net, MultiMaskModel)
    features = net.encode(image_batch(16, 12, samples=3))
    masks = torch.rand(5, 3, 12)
    masks[0, 1] = 0
    found = net.decide_many(features, {"image": masks})
    wanted = [net.decide(features, {"image": one}) for one in masks]
    torch.testing.assert_close(found.prediction, torch.cat([one.prediction for one in wanted]))
    maps = [one.attention_to("image") for one in wanted]
    torch.testing.assert_close(
        found.attention_to("image").weights, torch.cat([one.weights for one in maps])
    )
    assert len(found.attention_to("image").keys.find("image").geometry) == 15
    with pytest.raises(ValueError, match='"image"'):
        net.decide_many(features, {"text": masks})
