"""Pictures, marked words, and one self-contained page about runs."""

from overt.show.curves import curves
from overt.show.overlay import Style, overlay, save_png
from overt.show.page import report
from overt.show.picture import picture
from overt.show.sample import Sample, load_gallery, save_gallery
from overt.show.text import words_html, words_svg

__all__ = [
    "Sample",
    "Style",
    "curves",
    "load_gallery",
    "overlay",
    "picture",
    "report",
    "save_gallery",
    "save_png",
    "words_html",
    "words_svg",
]
