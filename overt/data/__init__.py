"""Files on disk become a `Batch`: one data set a file, nothing imported until it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overt.data.actions import action40
    from overt.data.asked import Look
    from overt.data.batch import Batch
    from overt.data.caltech import caltech101, caltech256
    from overt.data.captions import Captions, flickr8k, flickr30k, karpathy
    from overt.data.cifar import Cifar10, Cifar100
    from overt.data.clevr import Clevr
    from overt.data.coco import coco_boxes, coco_objects
    from overt.data.cub import Cub
    from overt.data.daquar import Daquar
    from overt.data.discovery import ObjectDiscovery
    from overt.data.easyvqa import EasyVqa
    from overt.data.entities import Flickr30kEntities, VgpPairs
    from overt.data.eraser import Eraser
    from overt.data.features import Cached, FeatureCache, Key
    from overt.data.hat import VqaHat
    from overt.data.human import Truth, pooled, truth_of, truths
    from overt.data.images import open_image
    from overt.data.objects import Outlined
    from overt.data.osie import Osie
    from overt.data.own import OwnMaps, OwnMarks, pictures_in
    from overt.data.pets import oxford_pets
    from overt.data.photos import PhotoSet
    from overt.data.phrases import Expressions, flickr30k_phrases, refcoco, refer
    from overt.data.pictures import Pictures
    from overt.data.resident import Resident, crop_and_flip, shift, vary
    from overt.data.rooms import scene67
    from overt.data.scenes.captions import CaptionScenes
    from overt.data.scenes.classify import DominantScenes
    from overt.data.scenes.pairs import CaptionPairScenes
    from overt.data.scenes.referring import ReferringScenes
    from overt.data.scenes.relations import PhrasePairs
    from overt.data.scenes.sentences import Sentences
    from overt.data.scenes.store import Scenes
    from overt.data.sets import root_of
    from overt.data.skipping import Readable, readable
    from overt.data.sortclevr import SortOfClevr
    from overt.data.source import Source
    from overt.data.splits import Labels, Split
    from overt.data.sports import event8
    from overt.data.stl10 import Stl10
    from overt.data.svhn import Svhn
    from overt.data.trec import Trec
    from overt.data.voc import voc_boxes, voc_masks
    from overt.data.vocabulary import HubTokenizer, Vocabulary
    from overt.data.vqa import vqa1, vqa2, vqacp1, vqacp2
    from overt.data.wordnet import WordNet
    from overt.data.yelp import YelpHat

__all__ = [
    "Batch",
    "Cached",
    "CaptionPairScenes",
    "CaptionScenes",
    "Captions",
    "Cifar10",
    "Cifar100",
    "Clevr",
    "Cub",
    "Daquar",
    "DominantScenes",
    "EasyVqa",
    "Eraser",
    "Expressions",
    "FeatureCache",
    "Flickr30kEntities",
    "HubTokenizer",
    "Key",
    "Labels",
    "Look",
    "ObjectDiscovery",
    "Osie",
    "Outlined",
    "OwnMaps",
    "OwnMarks",
    "PhotoSet",
    "PhrasePairs",
    "Pictures",
    "Readable",
    "ReferringScenes",
    "Resident",
    "Scenes",
    "Sentences",
    "SortOfClevr",
    "Source",
    "Split",
    "Stl10",
    "Svhn",
    "Trec",
    "Truth",
    "VgpPairs",
    "Vocabulary",
    "VqaHat",
    "WordNet",
    "YelpHat",
    "action40",
    "caltech101",
    "caltech256",
    "coco_boxes",
    "coco_objects",
    "crop_and_flip",
    "event8",
    "flickr8k",
    "flickr30k",
    "flickr30k_phrases",
    "karpathy",
    "open_image",
    "oxford_pets",
    "pictures_in",
    "pooled",
    "readable",
    "refcoco",
    "refer",
    "root_of",
    "scene67",
    "shift",
    "truth_of",
    "truths",
    "vary",
    "voc_boxes",
    "voc_masks",
    "vqa1",
    "vqa2",
    "vqacp1",
    "vqacp2",
]

_HOMES = {
    "actions": ("action40",),
    "asked": ("Look",),
    "batch": ("Batch",),
    "caltech": ("caltech101", "caltech256"),
    "captions": ("Captions", "flickr8k", "flickr30k", "karpathy"),
    "cifar": ("Cifar10", "Cifar100"),
    "clevr": ("Clevr",),
    "coco": ("coco_boxes", "coco_objects"),
    "cub": ("Cub",),
    "daquar": ("Daquar",),
    "discovery": ("ObjectDiscovery",),
    "easyvqa": ("EasyVqa",),
    "entities": ("Flickr30kEntities", "VgpPairs"),
    "eraser": ("Eraser",),
    "features": ("Cached", "FeatureCache", "Key"),
    "hat": ("VqaHat",),
    "human": ("Truth", "pooled", "truth_of", "truths"),
    "images": ("open_image",),
    "objects": ("Outlined",),
    "osie": ("Osie",),
    "own": ("OwnMaps", "OwnMarks", "pictures_in"),
    "pets": ("oxford_pets",),
    "photos": ("PhotoSet",),
    "phrases": ("Expressions", "flickr30k_phrases", "refcoco", "refer"),
    "pictures": ("Pictures",),
    "skipping": ("Readable", "readable"),
    "resident": ("Resident", "crop_and_flip", "shift", "vary"),
    "rooms": ("scene67",),
    "scenes.captions": ("CaptionScenes",),
    "scenes.classify": ("DominantScenes",),
    "scenes.pairs": ("CaptionPairScenes",),
    "scenes.referring": ("ReferringScenes",),
    "scenes.relations": ("PhrasePairs",),
    "scenes.sentences": ("Sentences",),
    "scenes.store": ("Scenes",),
    "sets": ("root_of",),
    "sortclevr": ("SortOfClevr",),
    "source": ("Source",),
    "splits": ("Labels", "Split"),
    "sports": ("event8",),
    "stl10": ("Stl10",),
    "svhn": ("Svhn",),
    "trec": ("Trec",),
    "vocabulary": ("HubTokenizer", "Vocabulary"),
    "voc": ("voc_boxes", "voc_masks"),
    "vqa": ("vqa1", "vqa2", "vqacp1", "vqacp2"),
    "wordnet": ("WordNet",),
    "yelp": ("YelpHat",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"overt.data.{home}"), name)
    raise AttributeError(f"module 'overt.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
