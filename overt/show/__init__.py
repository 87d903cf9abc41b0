"""Pictures, marked words, one self-contained page about runs, and views of any model's maps."""

from overt.show.curves import curves
from overt.show.export import load_map, save_map, to_bertviz
from overt.show.notebook import view
from overt.show.overlay import Style, overlay, save_png, spotlight
from overt.show.page import report
from overt.show.picture import picture
from overt.show.sample import Sample, load_gallery, save_gallery
from overt.show.text import words_html, words_svg

__all__ = [
    "Sample",
    "Style",
    "curves",
    "load_gallery",
    "load_map",
    "overlay",
    "picture",
    "report",
    "save_gallery",
    "save_map",
    "save_png",
    "spotlight",
    "to_bertviz",
    "view",
    "words_html",
    "words_svg",
]
