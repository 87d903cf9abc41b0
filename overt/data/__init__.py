"""Datasets and readers that turn files into `Batch`es; each is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# ruff: noqa: F401 -- type checkers read these imports, `__getattr__` does the same at run time
if TYPE_CHECKING:
    from overt.data.batch import Batch
    from overt.data.caltech import caltech101, caltech256
    from overt.data.captions import Captions, flickr8k, flickr30k, karpathy
    from overt.data.catalog import data_root
    from overt.data.cifar import Cifar10, Cifar100
    from overt.data.clevr import Clevr
    from overt.data.coco import coco_boxes, coco_objects
    from overt.data.collated_dataset import CollatedDataset
    from overt.data.cub import Cub
    from overt.data.custom import CustomMaps, CustomRationales, maps_in_folder
    from overt.data.daquar import Daquar
    from overt.data.dataset import Dataset
    from overt.data.easy_vqa import EasyVqa
    from overt.data.eraser import Eraser
    from overt.data.feature_cache import CachedFeatures, FeatureCache, FeatureKey
    from overt.data.flickr30k_entities import Flickr30kEntities, VgpPairs
    from overt.data.human_attention import (
        GroundTruth,
        iterate_ground_truth,
        load_ground_truth,
        pool_people,
    )
    from overt.data.image_arrays import ImageArrays
    from overt.data.images import open_image
    from overt.data.in_memory_images import (
        InMemoryImages,
        random_crop_flip,
        random_shift,
        random_shift_flip,
    )
    from overt.data.mit_indoor67 import scene67
    from overt.data.object_discovery import ObjectDiscovery
    from overt.data.object_masks import ObjectMasks
    from overt.data.osie import Osie
    from overt.data.pets import oxford_pets
    from overt.data.photo_dataset import PhotoDataset
    from overt.data.referring_expressions import (
        ReferringExpressions,
        flickr30k_phrases,
        refcoco,
        refer,
    )
    from overt.data.scenes.caption_pairs import CaptionPairScenes
    from overt.data.scenes.captions import CaptionScenes
    from overt.data.scenes.classification import DominantScenes
    from overt.data.scenes.crowded_scenes import CrowdedScenes
    from overt.data.scenes.dataset import Scenes
    from overt.data.scenes.phrase_relations import PhrasePairs
    from overt.data.scenes.referring_expressions import ReferringScenes
    from overt.data.scenes.sentences import Sentences
    from overt.data.skip_corrupt import ReadableSubset, skip_corrupt_items
    from overt.data.sort_of_clevr import SortOfClevr
    from overt.data.splits import Labels, Split
    from overt.data.stanford40 import action40
    from overt.data.stl10 import Stl10
    from overt.data.svhn import Svhn
    from overt.data.trec import Trec
    from overt.data.uiuc_sports import event8
    from overt.data.voc import voc_boxes, voc_masks
    from overt.data.vocabulary import HubTokenizer, Vocabulary
    from overt.data.vqa import vqa1, vqa2, vqacp1, vqacp2
    from overt.data.vqa_dataset import PhotoInput
    from overt.data.vqa_hat import VqaHat
    from overt.data.wordnet import WordNet
    from overt.data.yelp_hat import YelpHat

_HOMES = {
    "batch": ("Batch",),
    "caltech": ("caltech101", "caltech256"),
    "captions": ("Captions", "flickr8k", "flickr30k", "karpathy"),
    "catalog": ("data_root",),
    "cifar": ("Cifar10", "Cifar100"),
    "clevr": ("Clevr",),
    "coco": ("coco_boxes", "coco_objects"),
    "collated_dataset": ("CollatedDataset",),
    "cub": ("Cub",),
    "custom": ("CustomMaps", "CustomRationales", "maps_in_folder"),
    "daquar": ("Daquar",),
    "dataset": ("Dataset",),
    "easy_vqa": ("EasyVqa",),
    "eraser": ("Eraser",),
    "feature_cache": ("CachedFeatures", "FeatureCache", "FeatureKey"),
    "flickr30k_entities": ("Flickr30kEntities", "VgpPairs"),
    "human_attention": ("GroundTruth", "pool_people", "load_ground_truth", "iterate_ground_truth"),
    "image_arrays": ("ImageArrays",),
    "images": ("open_image",),
    "in_memory_images": ("InMemoryImages", "random_crop_flip", "random_shift", "random_shift_flip"),
    "mit_indoor67": ("scene67",),
    "object_discovery": ("ObjectDiscovery",),
    "object_masks": ("ObjectMasks",),
    "osie": ("Osie",),
    "pets": ("oxford_pets",),
    "photo_dataset": ("PhotoDataset",),
    "referring_expressions": ("ReferringExpressions", "flickr30k_phrases", "refcoco", "refer"),
    "scenes.caption_pairs": ("CaptionPairScenes",),
    "scenes.captions": ("CaptionScenes",),
    "scenes.classification": ("DominantScenes",),
    "scenes.crowded_scenes": ("CrowdedScenes",),
    "scenes.dataset": ("Scenes",),
    "scenes.phrase_relations": ("PhrasePairs",),
    "scenes.referring_expressions": ("ReferringScenes",),
    "scenes.sentences": ("Sentences",),
    "skip_corrupt": ("ReadableSubset", "skip_corrupt_items"),
    "sort_of_clevr": ("SortOfClevr",),
    "splits": ("Labels", "Split"),
    "stanford40": ("action40",),
    "stl10": ("Stl10",),
    "svhn": ("Svhn",),
    "trec": ("Trec",),
    "uiuc_sports": ("event8",),
    "voc": ("voc_boxes", "voc_masks"),
    "vocabulary": ("HubTokenizer", "Vocabulary"),
    "vqa": ("vqa1", "vqa2", "vqacp1", "vqacp2"),
    "vqa_dataset": ("PhotoInput",),
    "vqa_hat": ("VqaHat",),
    "wordnet": ("WordNet",),
    "yelp_hat": ("YelpHat",),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"overt.data.{home}"), name)
    raise AttributeError(f"module 'overt.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
