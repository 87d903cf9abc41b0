"""Read, measure and change the attention of any PyTorch model from outside."""

from overt.capture.call import Call, Route
from overt.capture.coverage import Unseen
from overt.capture.derived.activations import class_activation, grad_cam, rise
from overt.capture.derived.flows import flow
from overt.capture.derived.gradients import gradient_attention, relevance, slopes
from overt.capture.derived.maps import raw
from overt.capture.derived.rolling import rollout
from overt.capture.derived.sinks import Sink, find_sinks, without_sinks
from overt.capture.derived.values import summed_value_norms, value_norms, value_zeroing
from overt.capture.edits import Bias
from overt.capture.generation import Generated, generate
from overt.capture.places import attention_modules
from overt.capture.positions.layouts import layout_of, layouts_of
from overt.capture.positions.processors import image_geometry, tile_geometries, transform_geometry
from overt.capture.positions.tokens import text_geometry
from overt.capture.seen import Seen
from overt.capture.watching import watch

__all__ = [
    "Bias",
    "Call",
    "Generated",
    "Route",
    "Seen",
    "Sink",
    "Unseen",
    "attention_modules",
    "class_activation",
    "find_sinks",
    "flow",
    "generate",
    "grad_cam",
    "gradient_attention",
    "image_geometry",
    "layout_of",
    "layouts_of",
    "raw",
    "relevance",
    "rise",
    "rollout",
    "slopes",
    "summed_value_norms",
    "text_geometry",
    "tile_geometries",
    "transform_geometry",
    "value_norms",
    "value_zeroing",
    "watch",
    "without_sinks",
]
