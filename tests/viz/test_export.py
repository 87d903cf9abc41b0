"""Export and import of maps: BertViz arguments, Captum attributions and array files."""

from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from overt import io
from overt.attention import AttentionMap, Form, Kind, Layout, Span, grid, regions, words
from overt.errors import CorruptFileError
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
from overt.viz.export import (
    from_layers,
    from_pixels,
    from_tokens,
    load_map,
    save_map,
    to_bertviz,
    to_pixels,
    to_tokens,
)

TEXTS = ("a dog", "é <b>")
SPANS = torch.tensor([[[0, 1], [2, 5]], [[0, 1], [2, 5]]])


def make_map(layers: int = 3, heads: int = 2) -> AttentionMap:
    layout = words(2, geometry=TextGeometry(TEXTS, SPANS))
    return AttentionMap.from_scores(torch.randn(2, layers, heads, 2, 2), layout, layout)


# --- BertViz


def test_to_bertviz_gives_one_tensor_per_layer_and_the_tokens() -> None:
    attention = make_map()
    made = to_bertviz(attention, row=1)
    assert made["tokens"] == ["é", "<b>"] and len(made["attention"]) == 3
    for layer, weights in enumerate(made["attention"]):
        assert weights.shape == (1, 2, 2, 2)
        torch.testing.assert_close(weights[0], attention.weights[1, layer])
    named = to_bertviz(attention, ["[CLS]", "x"], ["[CLS]", "x"])
    assert named["tokens"] == ["[CLS]", "x"]
    with pytest.raises(ValueError, match=r"3 tokens.*2 pos"):
        to_bertviz(attention, list("abc"))


def test_to_bertviz_of_cross_attention_has_two_token_lists() -> None:
    attention = AttentionMap(torch.ones(1, 1, 1, 1, 4) / 4, grid(2, 2))
    made = to_bertviz(attention)
    assert sorted(made) == ["cross_attention", "decoder_tokens", "encoder_tokens"]
    assert made["encoder_tokens"][3] == "image 1,1" and made["decoder_tokens"] == ["global"]


@pytest.mark.parametrize("view", ["head_view", "model_view"])
def test_bertviz_draws_exported_maps(view: str) -> None:
    bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed")
    draw = getattr(bertviz, view)
    assert "dog" in draw(html_action="return", **to_bertviz(make_map())).data
    cross = AttentionMap(torch.ones(1, 2, 1, 1, 4) / 4, grid(2, 2))
    assert "image 1,1" in draw(html_action="return", **to_bertviz(cross)).data


def test_from_layers_inverts_the_list_of_layers() -> None:
    attention = make_map()
    layers = list(attention.weights.unbind(dim=1))
    back = from_layers(layers, attention.keys, attention.queries)
    torch.testing.assert_close(back.weights, attention.weights)
    assert back.check().keys is attention.keys
    assert from_layers(layers).keys.spans[0].name == "positions"
    with pytest.raises(ValueError, match="same shape"):
        from_layers([torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3)])


# --- captum


def test_to_pixels_agrees_with_captum() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    where = PixelGeometry.identity(2, (60, 90)).resize((32, 48))
    cells = torch.rand(2, 6)
    found = to_pixels(AttentionMap.from_cells(cells, grid(2, 3, geometry=where)))
    expected = captum.LayerAttribution.interpolate(cells.reshape(2, 1, 2, 3), (32, 48), "bilinear")
    torch.testing.assert_close(found, expected)


def test_from_pixels_keeps_the_sum_of_captum_attributions() -> None:
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 12, 2))
    images = torch.randn(2, 3, 8, 12)
    attributions = captum.IntegratedGradients(model).attribute(images, target=1)
    attention = from_pixels(attributions.float(), grid(2, 3))
    assert attention.kind is Kind.SIGNED
    difference = model(images)[:, 1] - model(torch.zeros_like(images))[:, 1]
    torch.testing.assert_close(
        attention.values.sum(dim=-1).flatten(), difference, atol=1e-4, rtol=0
    )


def test_from_pixels_sums_the_pixels_of_each_cell() -> None:
    pixels = torch.arange(2 * 1 * 4 * 6, dtype=torch.float32).reshape(2, 1, 4, 6)
    found = from_pixels(pixels, grid(2, 3)).values[1, 0, 0, 0].reshape(2, 3)
    for r in range(2):
        for c in range(3):
            assert found[r, c] == pixels[1, 0, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].sum()
    with pytest.raises(ValueError, match="into 3 x 3 cells"):
        from_pixels(pixels, grid(3, 3))
    with pytest.raises(ValueError, match="one image grid"):
        from_pixels(pixels, words(6))


def test_to_tokens_and_from_tokens_are_inverse() -> None:
    index = torch.tensor([[0, 1], [1, -1]])
    layout = Layout((Span("text", (2,), index),), 2)
    attention = AttentionMap.from_cells(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), layout)
    torch.testing.assert_close(to_tokens(attention), torch.tensor([[0.1, 0.2], [0.4, 0.0]]))
    back = from_tokens(torch.tensor([[-1.0, 2.0]]), words(2))
    assert to_tokens(back).tolist() == [[-1.0, 2.0]]
    with pytest.raises(ValueError, match=r"3 attrib.*2 pos"):
        from_tokens(torch.zeros(1, 3), words(2))


def test_several_heads_and_unknown_canvas_raise() -> None:
    with pytest.raises(ValueError, match=r"3 l.*2 heads.*2 q"):
        to_tokens(make_map())
    with pytest.raises(ValueError, match="canvas is unknown"):
        to_pixels(AttentionMap.from_cells(torch.rand(1, 4), grid(2, 2)))


# --- files


def map_of_all_spans() -> AttentionMap:
    """Every kind of span and geometry on one axis."""
    where = PixelGeometry.identity(2, (20, 30)).resize((16, 24)).crop(2, 3, 8, 8)
    keys = (
        grid(2, 2, geometry=where)
        + words(2, geometry=TextGeometry(TEXTS, SPANS))
        + regions(1, geometry=RegionGeometry(torch.rand(2, 1, 4)))
        + Layout((Span("special", (2,), torch.tensor([[0, 2], [1, -1]])),), 3)
        + Layout((Span("second", (2,), slice(1, 4, 2)),), 4)
    )
    mask = torch.rand(2, 1, len(keys)) > 0.3
    return AttentionMap.from_scores(torch.randn(2, 2, 2, 1, len(keys)), keys, mask=mask)


def assert_same_layout(one: Layout, other: Layout) -> None:
    assert len(one) == len(other) and len(one.spans) == len(other.spans)
    for a, b in zip(one.spans, other.spans, strict=True):
        assert (a.name, a.shape) == (b.name, b.shape)
        assert torch.equal(torch.as_tensor(_to_list(a.index)), torch.as_tensor(_to_list(b.index)))
        assert type(a.geometry) is type(b.geometry)
        for name, value in vars(a.geometry).items() if a.geometry is not None else ():
            found = getattr(b.geometry, name)
            equal = torch.equal(value, found) if torch.is_tensor(value) else value == found
            assert equal, name


def _to_list(index: slice | torch.Tensor) -> Any:
    return list(range(index.stop)[index]) if isinstance(index, slice) else index


def test_saved_map_loads_unchanged(tmp_path: Path) -> None:
    attention = map_of_all_spans()
    save_map(tmp_path / "map.npz", attention)
    back = load_map(tmp_path / "map.npz")
    assert torch.equal(back.values, attention.values) and back.form is Form.LOG
    assert back.mask is not None and torch.equal(back.mask, attention.mask)
    assert_same_layout(back.keys, attention.keys)
    assert_same_layout(back.queries, attention.queries)
    with np.load(tmp_path / "map.npz") as plain:  # readable without overt
        np.testing.assert_array_equal(plain["values"], attention.values)


@hypothesis.given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from(list(Kind)),
)
def test_every_dtype_and_kind_loads_unchanged(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, kind: Kind
) -> None:
    path = tmp_path_factory.mktemp("map") / "map.npz"
    values = torch.rand(1, 2, 1, 2, 3).to(dtype)
    save_map(str(path), AttentionMap(values.requires_grad_(), words(3), words(2), kind=kind))
    back = load_map(str(path))
    assert back.kind is kind and back.values.dtype is dtype and not back.values.requires_grad
    assert torch.equal(back.values, values)


def test_saved_files_are_deterministic(tmp_path: Path) -> None:
    attention = map_of_all_spans()
    for name in ("a.npz", "b.npz"):
        save_map(tmp_path / name, attention)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@pytest.mark.parametrize(
    "about",
    [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "dtype": "save"}'],
)
def test_invalid_file_raises(tmp_path: Path, about: bytes) -> None:
    path = tmp_path / "map.npz"
    values = np.zeros((1, 1, 1, 1, 2), dtype=np.float32)
    io.write_arrays(path, {"values": values, "about": np.frombuffer(about, dtype=np.uint8)})
    with pytest.raises(CorruptFileError, match=r"map.npz.*attention"):
        load_map(path)
    io.write_arrays(path, {"values": values})
    with pytest.raises(CorruptFileError, match=r"map.npz.*attention"):
        load_map(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(CorruptFileError):
        load_map(path)


@pytest.mark.parametrize("given", [None, (), (None, None)])
def test_missing_layers_raise_with_the_eager_hint(given: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=r'fused.*set_attn_implementation\("eager"\)'):
        from_layers(given)
