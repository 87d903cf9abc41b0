"""The measured owner of every element is the token that a slow loop finds by changing it alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from overt.capture.layouts.token_owners import (
    NONE,
    SHARED,
    measure_owners,
    token_elements,
)

IDS = torch.tensor([[1, 9, 9, 9, 9, 2], [9, 9, 9, 9, 1, 2]])
IMAGE = 9


class Reader(nn.Module):
    """Embeds ids and the patches of an image, shuffled, between them; one layer follows."""

    def __init__(self, way="patches"):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(model_type="reader")
        self.way = way
        self.embed = nn.Embedding(10, 8)
        self.project = nn.Linear(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.latent = nn.Parameter(torch.randn(4, 8))

    def features(self, pixels):
        if self.way == "convolution":  # three pixels wide: the cells overlap
            pixels = functional.avg_pool2d(pixels, 3, 1, 1)
        patches = functional.unfold(pixels, 2, stride=2).transpose(1, 2)
        found = torch.tanh(self.project(patches))
        if self.way == "codes":
            return found.detach().round()
        if self.way == "latent":  # as many queries as patches, which attend to all of them
            query = self.latent.expand(len(found), 1, 4, 8).contiguous()
            keys = found[:, None]
            return functional.scaled_dot_product_attention(query, keys, keys)[:, 0]
        return found[:, [2, 0, 3, 1]]

    def forward(self, input_ids, pixel_values):
        words = self.embed(input_ids)
        found = self.features(pixel_values).flatten(0, 1)
        words = words.masked_scatter((input_ids == IMAGE)[..., None], found)
        return self.layers[0](words)


def inputs():
    torch.manual_seed(1)
    return {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 5, 4)}


def slow_owners(model, given):
    """Change every element by itself and see which token differs."""

    def read(pixels):
        words = model.embed(IDS)
        found = model.features(pixels).flatten(0, 1)
        return words.masked_scatter((IDS == IMAGE)[..., None], found).flatten(0, 1)

    owner = torch.full(given.shape, NONE)
    before = read(given)
    for place in torch.cartesian_prod(*map(torch.arange, given.shape)):
        changed = given.clone()
        changed[tuple(place)] += 1
        moved = (read(changed) != before).any(dim=-1).nonzero()[:, 0]
        if len(moved):
            owner[tuple(place)] = int(moved[0]) if len(moved) == 1 else SHARED
    return owner


@pytest.mark.parametrize("way", ["patches", "convolution"])
def test_owners_agree_with_a_loop_over_all_elements(way):
    model, given = Reader(way), inputs()
    with torch.no_grad():
        wanted = slow_owners(model, given["pixel_values"])
    found = measure_owners(model, given, "pixel_values")
    assert torch.equal(found.owner, wanted)
    assert (found.length, found.beside) == (6, "")
    assert (wanted[:, :, 4] == NONE).all() == (way == "patches")  # a row of pixels in no patch
    if way == "convolution":
        assert found.shared.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
        assert len(found.reach) == 8
    else:
        assert len(found.shared) == len(found.reach) == 0
        assert found.owner[1, 0, :4:2, :4:2].tolist() == [[7, 9], [6, 8]]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_of_the_caller_may_be_off(context):
    model, wanted = Reader(), measure_owners(Reader(), inputs(), "pixel_values")
    with context():
        found = measure_owners(model, inputs(), "pixel_values")
    assert torch.equal(found.owner, wanted.owner)


def test_another_look_at_the_same_form_of_inputs_measures_nothing():
    model, given = Reader(), inputs()
    ran = []
    model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    first = measure_owners(model, given, "pixel_values")
    count = len(ran)
    other = {**given, "pixel_values": given["pixel_values"] + 1}
    assert measure_owners(model, other, "pixel_values") is first
    assert len(ran) == count > 0
    # Other ids, sizes or empty images are measured again.
    again = {**given, "input_ids": IDS.flip(0)}
    assert measure_owners(model, again, "pixel_values") is not first
    wide = {**given, "pixel_values": given["pixel_values"][:, :, :4]}
    assert measure_owners(model, wide, "pixel_values").owner.shape == (2, 3, 4, 4)
    empty = {
        **given,
        "pixel_values": given["pixel_values"] * torch.tensor([0.0, 1]).view(2, 1, 1, 1),
    }
    before = len(ran)
    measure_owners(model, empty, "pixel_values")
    assert len(ran) > before


def test_another_setting_is_measured_again():
    class Turned(Reader):
        def forward(self, input_ids, pixel_values, turned=False):
            return super().forward(input_ids, pixel_values.flip(-1) if turned else pixel_values)

    model, wanted = Turned(), measure_owners(Turned(), {**inputs(), "turned": True}, "pixel_values")
    plain = measure_owners(model, inputs(), "pixel_values")
    found = measure_owners(model, {**inputs(), "turned": True}, "pixel_values")
    assert torch.equal(found.owner, wanted.owner) and not torch.equal(found.owner, plain.owner)
    again = measure_owners(model, {**inputs(), "turned": False}, "pixel_values")
    assert torch.equal(again.owner, plain.owner)


def test_half_precision_gives_the_same_owners():
    wanted = measure_owners(Reader(), inputs(), "pixel_values")
    given = inputs()
    given["pixel_values"] = given["pixel_values"].bfloat16()
    found = measure_owners(Reader().bfloat16(), given, "pixel_values")
    assert torch.equal(found.owner, wanted.owner)


def test_latent_queries_that_are_as_many_as_patches_are_not_taken_for_them():
    with pytest.raises(ValueError, match=r"resampled, mixed"):
        measure_owners(Reader("latent"), inputs(), "pixel_values")


def test_queries_of_a_resampler_are_known_by_what_they_share():
    given = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 4, 6)}  # six patches, four queries
    found = measure_owners(Reader("latent"), given, "pixel_values")
    assert found.resampled
    assert found.shared.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert (found.owner == SHARED).all()


def test_discrete_codes_have_no_owner():
    with pytest.raises(ValueError, match="discrete codes"):
        measure_owners(Reader("codes"), inputs(), "pixel_values")


def test_an_input_that_no_token_depends_on():
    class Deaf(Reader):
        def forward(self, input_ids, pixel_values):
            return self.layers[0](self.embed(input_ids))

    with pytest.raises(ValueError, match="no token depends"):
        measure_owners(Deaf(), inputs(), "pixel_values")


def test_elements_of_each_token():
    found = token_elements(torch.tensor([3, -1, 5, 3, 4]), torch.tensor([3, 5, 7]))
    assert [each.tolist() for each in found] == [[0, 3], [2], []]
