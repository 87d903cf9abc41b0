"""Section 7: attribution methods, compared with captum and pytorch-grad-cam.

Three networks with random weights: a small CNN, a ViT and a BERT, whose words are embeddings for
captum. The maps are compared first where nothing is drawn at random. Goals are for as many rows at
a time as ours; its defaults, one masked input or all steps and draws at a time, are measured too.
Memory is the peak of allocated tensors.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overt import attribution

from .clock import device_clock, time_variants
from .memory import peak_allocated
from .report import (
    Report,
    Setting,
    at_least,
    at_most,
    missing_row,
    speedup_row,
    value_row,
)

STEPS, DRAWS, QUICK_DRAWS, WINDOW, CELLS, CHUNK = 50, 512, 100, 8, 7, 32
SEPARATE = Path(sys.prefix) / "timm"  # where `make .venv/.apart` installs pytorch-grad-cam


@dataclass(frozen=True, eq=False)
class Case:
    """A network, its inputs for ours, and a module and its inputs for captum.

    Args:
        model: The network.
        inputs: Pixels, or keyword arguments of a text model.
        module: The network as a module of one tensor.
        values: That tensor: pixels or embeddings.
        parts: The part of each value, for Shapley values.
        layer: The layer of Grad-CAM, if there is one.
    """

    model: nn.Module
    inputs: Any
    module: nn.Module
    values: Tensor
    parts: Tensor
    layer: nn.Module | None = None

    @property
    def target(self) -> Tensor:
        """One class per sample."""
        return torch.arange(len(self.values), device=self.values.device) % 3

    @property
    def window(self) -> tuple[int, ...]:
        """The window of captum's occlusion: all channels of a square, or one word."""
        whole = self.values.shape
        return (whole[1], WINDOW, WINDOW) if self.values.ndim == 4 else (1, whole[2])

    @property
    def stride(self) -> tuple[int, ...]:
        """How far captum moves the window."""
        return (1, WINDOW // 2, WINDOW // 2) if self.values.ndim == 4 else (1, self.window[1])


class Logits(nn.Module):
    """A Hugging Face model as a module of one tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, values: Tensor) -> Tensor:
        """Return the logits."""
        found: Tensor = self.model(**{self.name: values}).logits
        return found


def make_cnn(setting: Setting) -> Case:
    """Make a CNN of four layers, and images of 48 x 48 pixels."""
    side, wide = setting.size(48, 16), setting.size(16, 8)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * wide, 10),
    ).eval().to(setting.device)  # fmt: skip
    images = torch.randn(4, 3, side, side, device=setting.device)
    return Case(model, images, model, images, square_parts(images), model[7])


def make_vit(setting: Setting) -> Case:
    """Make a ViT of four layers, and images of 48 x 48 pixels in 37 tokens."""
    from transformers import ViTConfig, ViTForImageClassification

    side, wide = setting.size(48, 16), setting.size(96, 16)
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=side, patch_size=8, hidden_size=wide, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=4 * wide, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config).eval().to(setting.device)
    images = torch.randn(4, 3, side, side, device=setting.device)
    blocks = [one for name, one in model.named_modules() if name.endswith("layernorm_before")]
    wrapped = Logits(model, "pixel_values")
    return Case(model, images, wrapped, images, square_parts(images), blocks[-1])


def make_bert(setting: Setting) -> Case:
    """Make a BERT of four layers, and texts of 32 words."""
    from transformers import BertConfig, BertForSequenceClassification

    wide, length = setting.size(96, 16), setting.size(32, 8)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=wide, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=4 * wide, num_labels=10,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval().to(setting.device)
    tokens = torch.randint(5, 1000, (4, length), device=setting.device)
    values = model.bert.embeddings.word_embeddings(tokens).detach()
    parts = torch.arange(length, device=setting.device)[None, :, None].expand_as(values)
    inputs = {"input_ids": tokens}
    return Case(model, inputs, Logits(model, "inputs_embeds"), values, parts[:1])


def square_parts(images: Tensor) -> Tensor:
    """Return the part of each pixel: 7 x 7 squares, as `kernel_shap` has them."""
    at = torch.arange(images.shape[-1], device=images.device) * CELLS // images.shape[-1]
    return (at[:, None] * CELLS + at)[None, None].expand_as(images[:1])


# --- pairs of variants


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two implementations that run as many rows at a time, and whether ours has to be as fast.

    Args:
        label: What is compared.
        ours: Our call.
        theirs: The call of the other library.
        name: The other library and its setting.
        goal: Whether ours has to be as fast.
    """

    label: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    name: str = "captum"
    goal: bool = True


def comparisons(case: Case, draws: int) -> list[Comparison]:
    """Return the methods of both libraries with as many rows at a time, and captum's defaults."""
    from captum import attr
    from captum._utils.models.linear_model import SkLearnRidge

    model, inputs, target = case.model, case.inputs, case.target
    module, values, b = case.module, case.values, len(case.values)
    few = max(1, CHUNK // b)
    generator = partial(torch.Generator().manual_seed, 0)
    window = WINDOW if values.ndim == 4 else 1
    integrate = partial(attribution.integrated_gradients, model, inputs, target, steps=STEPS)
    smooth = partial(attribution.smooth_grad, model, inputs, target, samples=STEPS)
    theirs = partial(attr.IntegratedGradients(module).attribute, values, target=target)
    noisy = partial(attr.NoiseTunnel(attr.Saliency(module)).attribute, values, target=target)
    noisy = partial(noisy, nt_samples=STEPS, stdevs=0.5)
    occlude = partial(attr.Occlusion(module).attribute, values, case.window, target=target)
    occlude = partial(occlude, strides=case.stride)
    drawn = {"target": target, "feature_mask": case.parts, "n_samples": draws}
    shap = partial(attr.KernelShap(module).attribute, values, **drawn)
    lime = partial(attr.Lime(module, SkLearnRidge(alpha=1.0)).attribute, values, **drawn)
    ours_of = {
        "gradient": lambda: attribution.input_gradient(model, inputs, target),
        "SmoothGrad": lambda: smooth(generator()),
        "occlusion": lambda: attribution.occlusion(model, inputs, target, window=window),
        "KernelSHAP": lambda: attribution.kernel_shap(
            model, inputs, target, generator(), samples=draws
        ),
        "LIME": lambda: attribution.lime(model, inputs, target, generator(), samples=draws),
        "DeepLift": lambda: attribution.deep_lift(model, inputs, target),
    }
    found = [
        Comparison(
            "gradient", ours_of["gradient"], lambda: attr.Saliency(module).attribute(values, target)
        ),
        Comparison(
            "integrated gradients, a step at a time", integrate,
            partial(theirs, n_steps=STEPS, internal_batch_size=b),
        ),
        Comparison(
            "integrated gradients, all steps at once", partial(integrate, chunk=STEPS * b),
            partial(theirs, n_steps=STEPS),
        ),
        Comparison(
            "integrated gradients, defaults", integrate, partial(theirs, n_steps=STEPS),
            "captum, all steps", goal=False,
        ),
        Comparison(
            "SmoothGrad, a draw at a time", ours_of["SmoothGrad"],
            partial(noisy, nt_samples_batch_size=1),
        ),
        Comparison(
            "SmoothGrad, defaults", ours_of["SmoothGrad"], noisy, "captum, all draws", goal=False
        ),
    ]  # fmt: skip
    for name, call in {"occlusion": occlude, "KernelSHAP": shap, "LIME": lime}.items():
        same = partial(call, perturbations_per_eval=few)
        found += [
            Comparison(f"{name}, {few * b} rows at a time", ours_of[name], same),
            Comparison(f"{name}, defaults", ours_of[name], call, "captum, one per pass", False),
        ]
    deep = attr.DeepLift(module)
    # captum keeps the gradient of the GELU of Transformers, ours has its slope
    deeper = Comparison(
        "DeepLift", ours_of["DeepLift"], lambda: deep.attribute(values, target=target),
        goal=isinstance(model, nn.Sequential),
    )  # fmt: skip
    return [*found, deeper]


def max_difference(case: Case, deep_lift: bool) -> float:
    """Return the largest relative difference of methods that draw nothing at random."""
    chosen = ("integrated", "occlusion", "DeepLift")[: 3 if deep_lift else 2]
    found = []
    for one in comparisons(case, QUICK_DRAWS):
        if not one.label.startswith(chosen):
            continue
        expected, axis = one.theirs().detach(), -1 if case.values.ndim == 3 else 1
        # of an occluded word every feature has the fall of the score
        whole = one.label.startswith("occlusion")
        expected = (expected.select(axis, 0) if whole else expected.sum(dim=axis)).flatten(1)
        away = (one.ours().weights.flatten(1) - expected).abs().max()
        found.append(float(away / expected.abs().max()))
    return max(found)


def time_methods(name: str, case: Case, setting: Setting, report: Report) -> None:
    """Compare each method on one network."""
    for one in comparisons(case, setting.size(DRAWS, QUICK_DRAWS)):
        variants = {"ours": one.ours, one.name: one.theirs}
        clock = device_clock(setting.device)
        rounds = setting.rounds * (10 if one.label in ("gradient", "DeepLift") else 1)
        times = time_variants(variants, rounds, clock, limit=setting.size(6, 1))
        goal = at_least(1.0) if one.goal else None
        report.add(speedup_row(f"{name}: {one.label}", times, "ours", one.name, goal))
        report.save()


def measure_memory(name: str, case: Case, setting: Setting, report: Report) -> None:
    """Compare the peak memory of integrated gradients with that of one backward pass."""
    pairs = {one.label: one for one in comparisons(case, QUICK_DRAWS)}
    ours = pairs["integrated gradients, a step at a time"].ours
    theirs = pairs["integrated gradients, defaults"].theirs

    def backward() -> None:
        leaf = case.values.clone().requires_grad_()
        score = case.module(leaf).gather(1, case.target[:, None]).sum()
        torch.autograd.grad(score, leaf)

    backward()  # warm up
    alone, own, other = (peak_allocated(run, setting.device) for run in (backward, ours, theirs))
    label, unit = f"{name}: peak memory of integrated gradients", "times one backward pass"
    report.add(
        value_row(f"{label}, {STEPS} steps", unit, own / alone, at_most(1.2)),
        value_row(f"{label}, captum, {STEPS} steps at once", unit, other / alone, None),
    )


# --- Grad-CAM


@contextmanager
def separate_packages() -> Iterator[None]:
    """Make pytorch-grad-cam importable, even with a torchvision that was built for another torch.

    Such a torchvision fails on two missing operators. It is enough to declare them, as they are not
    called. What was imported is removed again, because transformers would use it.
    """
    before = set(sys.modules)
    sys.path.append(str(SEPARATE))
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in [one for one in sys.modules if one.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield
    finally:
        sys.path.remove(str(SEPARATE))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("torchvision", "pytorch_grad_cam", "ttach", "cv2"):
                del sys.modules[name]


def time_grad_cam(cases: dict[str, Case], setting: Setting, report: Report) -> None:
    """Compare Grad-CAM of the CNN and the ViT with pytorch-grad-cam and captum."""
    from captum.attr import LayerGradCam

    with separate_packages():
        try:
            from pytorch_grad_cam import GradCAM
            from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        except (ImportError, RuntimeError):
            GradCAM = None
        for name, case in cases.items():
            if case.layer is None:
                continue
            wanted, side = case.target, round(case.values.shape[-1] / 8)
            variants: dict[str, Callable[[], Any]] = {
                "ours": partial(attribution.grad_cam, case.model, case.inputs, wanted, case.layer)
            }
            if case.model is case.module:
                cam = LayerGradCam(case.module, case.layer)
                variants["captum"] = partial(cam.attribute, case.values, wanted)
            if GradCAM is not None:
                targets = [ClassifierOutputTarget(int(one)) for one in wanted]
                cells = None if case.model is case.module else partial(to_cells, side=side)
                grad_cam = GradCAM(case.module, [case.layer], reshape_transform=cells)
                variants["pytorch-grad-cam"] = partial(grad_cam, case.values, targets)
            clock = device_clock(setting.device)
            times = time_variants(variants, 5 * setting.rounds, clock, limit=5.0)
            for other in list(variants)[1:]:
                report.add(speedup_row(f"{name}: Grad-CAM", times, "ours", other, at_least(1.0)))
            if GradCAM is None:
                report.add(missing_row(f"{name}: Grad-CAM", "pytorch-grad-cam is not installed"))
            else:
                grad_cam.activations_and_grads.release()


def to_cells(tokens: Tensor, side: int) -> Tensor:
    """Return the tokens of a ViT as cells, for pytorch-grad-cam."""
    return tokens[:, 1:].reshape(len(tokens), side, side, -1).permute(0, 3, 1, 2)


def section(setting: Setting, report: Report) -> None:
    """Check agreement, then measure time and memory of three networks."""
    torch.set_num_threads(1)
    try:
        importlib.import_module("captum")
    except ImportError:
        report.add(missing_row("attribution methods", "captum is not installed"))
        return
    cases = {"CNN": make_cnn(setting), "ViT": make_vit(setting), "BERT": make_bert(setting)}
    for name, case in cases.items():
        # captum's DeepLift has another rule for GELU and for layer norm
        difference = max_difference(case, deep_lift=name == "CNN")
        assert difference < 1e-3, f"maps of the {name} differ from captum's by {difference}"
        label = f"difference from captum, {name}"
        report.add(value_row(label, "largest difference", difference, at_most(1e-3)))
    for name, case in cases.items():
        report.part(name, partial(time_methods, name, case, setting, report))
        report.part(f"{name}, memory", partial(measure_memory, name, case, setting, report))
    report.part("Grad-CAM", partial(time_grad_cam, cases, setting, report))
