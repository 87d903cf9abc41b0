"""Maps derived from a model: rollout, flow, gradients, CAMs, integrated gradients, SHAP, LIME.

Methods of inputs are called as `method(model, inputs, target, ...)`, those of a layer as
`method(model, images, target, layer, ...)`, and those of attention with a trace of `overt.watch`.
All return an `AttentionMap`.
"""

from overt.attribution.activation import activation_attention
from overt.attribution.additive_models import kernel_shap, lime
from overt.attribution.attention_flow import flow
from overt.attribution.attention_rollout import rollout
from overt.attribution.attribution_map import AttributionMap
from overt.attribution.cam import (
    class_activation,
    grad_cam,
    grad_cam_plus_plus,
    hires_cam,
    layer_cam,
    score_cam,
)
from overt.attribution.deep_lift import deep_lift
from overt.attribution.differential import differential
from overt.attribution.gradients import attention_gradients, gradient_attention, relevance
from overt.attribution.input_gradients import (
    input_gradient,
    input_x_gradient,
    smooth_grad,
    var_grad,
)
from overt.attribution.occlusion import occlusion
from overt.attribution.path_gradients import expected_gradients, integrated_gradients
from overt.attribution.raw_attention import layer_attention
from overt.attribution.rise import rise
from overt.attribution.sinks import Sink, find_sinks, remove_sinks
from overt.attribution.target_scores import Contrast
from overt.attribution.value_weighted import summed_value_norms, value_norms, value_zeroing

__all__ = [
    "AttributionMap",
    "Contrast",
    "Sink",
    "activation_attention",
    "attention_gradients",
    "class_activation",
    "deep_lift",
    "differential",
    "expected_gradients",
    "find_sinks",
    "flow",
    "grad_cam",
    "grad_cam_plus_plus",
    "gradient_attention",
    "hires_cam",
    "input_gradient",
    "input_x_gradient",
    "integrated_gradients",
    "kernel_shap",
    "layer_attention",
    "layer_cam",
    "lime",
    "occlusion",
    "relevance",
    "remove_sinks",
    "rise",
    "rollout",
    "score_cam",
    "smooth_grad",
    "summed_value_norms",
    "value_norms",
    "value_zeroing",
    "var_grad",
]
