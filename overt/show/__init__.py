"""Pictures, marked words, one self-contained page about runs, and views of any model's maps."""

from overt.show.arcs import arcs
from overt.show.beside import changed, word_by_word
from overt.show.contours import contours, hard_mask
from overt.show.curves import curves
from overt.show.export import (
    from_layers,
    from_pixels,
    from_tokens,
    load_map,
    save_map,
    to_bertviz,
    to_pixels,
    to_tokens,
)
from overt.show.figure import save_figure
from overt.show.heads import head_maps, head_numbers
from overt.show.headview import head_view
from overt.show.notebook import view
from overt.show.overlay import Style, overlay, save_png, spotlight
from overt.show.page import report
from overt.show.picture import picture
from overt.show.pointing import word_regions
from overt.show.preferring import Pair, pairs_of, preference_page, read_judgements
from overt.show.ranked import most_and_least, ranked
from overt.show.sample import Sample, load_gallery, save_gallery
from overt.show.text import words_html, words_svg

__all__ = [
    "Pair",
    "Sample",
    "Style",
    "arcs",
    "changed",
    "contours",
    "curves",
    "from_layers",
    "from_pixels",
    "from_tokens",
    "hard_mask",
    "head_maps",
    "head_numbers",
    "head_view",
    "load_gallery",
    "load_map",
    "most_and_least",
    "overlay",
    "pairs_of",
    "picture",
    "preference_page",
    "ranked",
    "read_judgements",
    "report",
    "save_figure",
    "save_gallery",
    "save_map",
    "save_png",
    "spotlight",
    "to_bertviz",
    "to_pixels",
    "to_tokens",
    "view",
    "word_by_word",
    "word_regions",
    "words_html",
    "words_svg",
]
