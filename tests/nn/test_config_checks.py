"""Third-party configs: no remote code, and no allocations beyond the size of the weights."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import io
from overt.errors import CorruptFileError, UserError
from overt.nn import SmallCNN, checkpoint
from overt.nn.config_checks import (
    SPARE_ELEMENTS,
    check_config,
    check_processor,
    limit_allocations,
    tensor_sizes,
)

CONFIG_PATH = Path("m/config.json")


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "kernels-community/x"},
        {"_attn_implementation": "somebody/kernel:run"},
        {"attn_implementation": {"": "kernels-community/x"}},
        {"attn_implementation": {"vision_config": {"": ["a/b"]}}},
        {"text_config": {"_attn_implementation_internal": {"": "a/b"}}},
        {"layers": [{"attn_implementation": {"x": "sdpa", "y": "a@b"}}]},
        {"experts_implementation": "kernels-community/moe"},
    ],
    ids=json.dumps,
)
def test_kernels_of_a_repository_raise_at_any_depth(config: Any) -> None:
    with pytest.raises(UserError, match=r"m/config\.json: \w+_implementation"):
        check_config(CONFIG_PATH, config)


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "sdpa", "_attn_implementation": None},
        {"attn_implementation": {"": "eager", "vision_config": "flash_attention_2"}},
        {"name_or_path": "somebody/model", "num_hidden_layers": 96, "depths": [2, 2, 18, 2]},
        {"layer_types": ["full_attention"] * 3, "num_labels": 21_843},
        ["a", 1, None],
        "text",
    ],
    ids=json.dumps,
)
def test_ordinary_configs_pass(config: Any) -> None:
    check_config(CONFIG_PATH, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 20_000}, "hidden_layers.*20000.*10000"),
        ({"text_config": {"n_layer": 1e300}}, r"n_layer is 1e\+300"),
        ({"depths": [2, 10**9]}, r"depths is 1e\+09"),
        ({"num_labels": 10**9}, r"num_labels.*1e\+09.*1000000"),
        ({"num_layers": float("nan")}, "num_layers is nan"),
        ({"attention_types": [[["global"], 10**9]]}, r"attention_types.*1e\+09"),
    ],
)
def test_too_large_counts_raise_corrupt_file_error(config: Any, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        check_config(CONFIG_PATH, config)


def test_too_large_tensor_raises_before_allocation() -> None:
    """10 million rows of 10,000 numbers are 400 GB: allocating them would fail."""
    message = r"^m: .* more than \d+ parameters"
    with pytest.raises(CorruptFileError, match=message), limit_allocations("m", [100, 100]):
        nn.Embedding(10**7, 10**4)
    with limit_allocations("m", [SPARE_ELEMENTS]):
        assert nn.Linear(1000, 1000).weight.numel() == 10**6
    nn.Linear(100, 100)  # the limit no longer applies


@pytest.mark.parametrize(
    "grow",
    [
        lambda x: x[:, None] - x[None, :],  # relative positions of a window of 10 ** 6 cells
        lambda x: torch.outer(x, x),
        lambda x: torch.einsum("i,j->ij", x, x),
        lambda x: x[:, None] @ x[None, :],
        lambda x: x.repeat(10**6),
        lambda x: torch.where(x[:, None] > 0, x[None, :], x[:, None]),
        lambda x: torch.zeros_like(x.expand(10**6, -1)),
        lambda x: x.new_zeros(10**6, 10**6),
    ],
)
def test_result_far_larger_than_its_inputs_raises_before_allocation(grow: Any) -> None:
    with (
        pytest.raises(CorruptFileError, match=r"^m: .*\d parameters"),
        limit_allocations("m", [100]),
    ):
        grow(torch.ones(10**6))


def test_ordinary_sums_and_copies_pass_the_limit() -> None:
    with limit_allocations("m", [10**4]):
        one = nn.Linear(100, 100)
        with torch.no_grad():
            one.weight.copy_(torch.ones(100, 100))
        table = torch.arange(100)[:, None] - torch.arange(100)[None, :]
        assert (one.weight @ one.weight)[0, 0] == 100
    assert table.shape == (100, 100)


def test_backbone_on_the_hub_raises() -> None:
    with pytest.raises(UserError, match=r"backbone.*'somebody/model'"):
        check_config(CONFIG_PATH, {"vision_config": {"backbone": "somebody/model"}})
    check_config(CONFIG_PATH, {"backbone": "resnet50", "use_timm_backbone": True})


@pytest.mark.long
def test_many_small_tensors_count_towards_the_limit() -> None:
    message = r"4104 tensors.* 2\."
    with pytest.raises(CorruptFileError, match=message), limit_allocations("m", [4, 4]):
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(20_000)))
    with (
        pytest.raises(CorruptFileError, match=r"\d+ parameters"),
        limit_allocations("m", [4, 4]),
    ):
        [torch.zeros(2**20) for _ in range(100)]


def test_limit_does_not_apply_to_other_threads() -> None:
    made = []

    def build() -> None:
        made.extend(nn.Linear(2, 2) for _ in range(4200))

    with limit_allocations("m", [1]):
        other = threading.Thread(target=build)
        other.start()
        other.join()
    assert len(made) == 4200


def test_other_errors_are_not_replaced() -> None:
    with limit_allocations("m", [1]), pytest.raises(RuntimeError, match="negative"):
        torch.empty(-1)


def test_tensor_sizes_are_read_from_the_headers(tmp_path: Path) -> None:
    io.write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(2, 3), "y": torch.zeros(())})
    io.write_tensors(tmp_path / "b.safetensors", {"z": torch.zeros(5)})
    assert sorted(tensor_sizes(tmp_path)) == [1, 5, 6]
    (tmp_path / "b.safetensors").write_bytes(b"junk")
    with pytest.raises(CorruptFileError, match=r"b\.safetensors"):
        tensor_sizes(tmp_path)


def test_loading_allocates_no_more_than_the_saved_weights(tmp_path: Path) -> None:
    SmallCNN(classes=3, width=0.1).save_pretrained(tmp_path / "m")
    config = io.read_json(tmp_path / "m" / "config.json")
    weights = io.read_tensors(tmp_path / "m" / "model.safetensors")
    with io.atomic_folder(tmp_path / "big") as new:
        io.write_json(new / "config.json", {**config, "classes": 10**9})
        io.write_tensors(new / "model.safetensors", weights)
    with pytest.raises(CorruptFileError, match=r"kind.*config\.json"):
        SmallCNN.from_pretrained(tmp_path / "big")
    assert checkpoint.load(lambda config: SmallCNN(**config), tmp_path / "m").training is False


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"height": 10**6, "width": 10**6}},
        {"size": {"shortest_edge": 10**5}},
        {"size": {"longest_edge": 10**6}},
        {"crop_size": 10**6},
        {"image_processor": {"size": [224, 10**7]}},
        {"pretrained_cfg": {"input_size": [3, 10**6, 10**6]}},
        {"size": {"shortest_edge": 3136, "longest_edge": 10**12}, "merge_size": 2},
        {"size": {"height": 1e300}},
        {"size": {"height": 16384, "width": 16384}},
        {"crop_size": {"height": 8192, "width": 4096}},
        {"size": 8192},
        {"size": {"shortest_edge": 5000}},
        {"size": {"shortest_edge": 2000}},
        {"size": {"shortest_edge": 2000, "longest_edge": None}},
        {"size": {"longest_edge": 16384}},
        {"min_pixels": 2**31, "max_pixels": 2**32},
        {"size": {"shortest_edge": 2**31, "longest_edge": 2**26}, "merge_size": 2},
        {"image_grid_pinpoints": [[336, 672], [10**5, 10**5]]},
        {"image_grid_pinpoints": [[16000, 16000]]},
        {"size_divisor": 10**5},
        {"ensure_multiple_of": 10**5},
        {"crop_to_patches": True, "max_patches": 10**6},
        {"min_patches": 10**5},
        {"max_image_tiles": 10**4},
        {"num_crops": 10**5},
        {"max_patches": 10**9},
    ],
    ids=json.dumps,
)
def test_processor_with_huge_images_raises_corrupt_file_error(config: Any) -> None:
    with pytest.raises(CorruptFileError, match=r"m/config.*most \d+"):
        check_processor(CONFIG_PATH, config)


def test_tiny_crop_pct_raises_corrupt_file_error() -> None:
    with pytest.raises(CorruptFileError, match=r"crop_pct.*0\.001.*0\.1"):
        check_processor(
            CONFIG_PATH, {"pretrained_cfg": {"crop_pct": 0.001, "input_size": [3, 224, 224]}}
        )


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"height": 224, "width": 224}, "crop_size": {"height": 224, "width": 224}},
        {"size": 224, "image_mean": [0.5, 0.5, 0.5], "resample": 3},
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "merge_size": 2},
        {"size": {"shortest_edge": 1024}},
        {"size": {"shortest_edge": 2000, "longest_edge": 4000}},
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
        {"size": {"height": 2560, "width": 1920}, "do_pad": True, "pad_size": None},
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14},
        {"image_grid_pinpoints": [[336, 672], [2304, 2304]], "size": {"shortest_edge": 336}},
        {"pretrained_cfg": {"crop_pct": 0.65, "input_size": [3, 1024, 1024]}, "num_classes": 10},
        {"min_patches": 1, "max_patches": 12, "crop_to_patches": True},
        {"max_patches": 4096, "patch_size": {"height": 16, "width": 16}},
        {"size_divisor": 32, "ensure_multiple_of": 14, "max_image_tiles": 4},
        [],
    ],
    ids=json.dumps,
)
def test_ordinary_processors_pass(config: Any) -> None:
    check_processor(CONFIG_PATH, config)
