"""Read and change the attention of any PyTorch model from outside."""

from overt.capture.attention_statistics import (
    AttentionStatistics,
    TopKeys,
    entropy,
    received,
    sink_mass,
    span_shares,
    statistics,
    top_k,
)
from overt.capture.call import Call, Route
from overt.capture.coverage import UncapturedAttentionError
from overt.capture.discovery import attention_modules
from overt.capture.edits import Bias
from overt.capture.generation import GenerationResult, generate
from overt.capture.layouts.hf_layouts import layout_of, layouts_of
from overt.capture.layouts.processors import image_geometry, tile_geometries, transform_geometry
from overt.capture.layouts.text_tokens import text_geometry
from overt.capture.packed_documents import document_layout
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace

__all__ = [
    "AttentionStatistics",
    "AttentionTrace",
    "Bias",
    "Call",
    "GenerationResult",
    "Route",
    "TopKeys",
    "UncapturedAttentionError",
    "attention_modules",
    "document_layout",
    "entropy",
    "generate",
    "image_geometry",
    "layout_of",
    "layouts_of",
    "received",
    "sink_mass",
    "span_shares",
    "statistics",
    "text_geometry",
    "tile_geometries",
    "top_k",
    "transform_geometry",
    "watch",
]
