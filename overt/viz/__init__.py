"""Visualization: heat maps on photos and text, head views, and self-contained HTML pages."""

from overt.viz.attention_arcs import arc_diagram
from overt.viz.best_worst import plot_best_worst, select_best_worst
from overt.viz.contours import contours, hard_mask
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
from overt.viz.figure import save_figure
from overt.viz.gallery_sample import GallerySample, load_gallery, save_gallery
from overt.viz.head_browser import head_view
from overt.viz.head_grid import head_maps, head_scores
from overt.viz.map_diff import compare_maps, word_maps
from overt.viz.notebook import view
from overt.viz.photo_overlay import OverlayStyle, overlay, save_png, spotlight
from overt.viz.picture_file import save_picture
from overt.viz.preferences import CaptionPair, caption_pairs, read_judgements, write_preference_page
from overt.viz.region_arrows import word_regions
from overt.viz.report_page import write_report
from overt.viz.sample_sheet import save_sample_sheet
from overt.viz.text_heatmap import text_heatmap_html, text_heatmap_svg
from overt.viz.training_curves import plot_curves

__all__ = [
    "CaptionPair",
    "GallerySample",
    "OverlayStyle",
    "arc_diagram",
    "caption_pairs",
    "compare_maps",
    "contours",
    "from_layers",
    "from_pixels",
    "from_tokens",
    "hard_mask",
    "head_maps",
    "head_scores",
    "head_view",
    "load_gallery",
    "load_map",
    "overlay",
    "plot_best_worst",
    "plot_curves",
    "read_judgements",
    "save_figure",
    "save_gallery",
    "save_map",
    "save_picture",
    "save_png",
    "save_sample_sheet",
    "select_best_worst",
    "spotlight",
    "text_heatmap_html",
    "text_heatmap_svg",
    "to_bertviz",
    "to_pixels",
    "to_tokens",
    "view",
    "word_maps",
    "word_regions",
    "write_preference_page",
    "write_report",
]
