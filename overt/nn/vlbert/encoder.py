"""BERT encoder that returns its attention calls while kernels stay fused.

Devlin, Chang, Lee and Toutanova, "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805. Queries and
keys of every layer are returned with the states, as in an `AttentionTrace` of `overt.watch`: any
block of the weights is computed on demand.
"""

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt import io
from overt.capture.block_scores import tap_gradients
from overt.capture.call import Call, QKCall, Route, default_scale
from overt.errors import CorruptFileError, UserError


class BertSelfAttention(nn.Module):
    """Multi-head self-attention with the fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not divisible by heads={heads}")
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(
        self, x: Float[Tensor, "b k d"], bias: Tensor | None, allowed: Tensor | None
    ) -> tuple[Float[Tensor, "b k d"], QKCall, Tensor, Tensor]:
        """Return the output, the call (weights before dropout), and values and outputs by head."""
        query, key, value = (
            rearrange(part(x), "b k (h d) -> b h k d", h=self.heads)
            for part in (self.query, self.key, self.value)
        )
        # a loss on a few rows adds its gradient when backward reaches this layer (GradTap)
        taps = tap_gradients(query, key) if _needs_taps(query) else None
        found = nn.functional.scaled_dot_product_attention(
            query if taps is None else taps[0].tensor,
            key if taps is None else taps[1].tensor,
            value,
            # the kernel takes one mask: the bias already has -inf where a key is not allowed
            attn_mask=allowed if bias is None else bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        source = QKCall(query, key, default_scale(query), bias, allowed, taps=taps)
        return rearrange(found, "b h k d -> b k (h d)"), source, value, found


def _needs_taps(query: Tensor) -> bool:
    """Return whether a loss on this call may need gradients that taps can carry."""
    inside = torch._C._functorch.maybe_current_level() is not None  # inside torch.func
    learns = torch.is_grad_enabled() and query.requires_grad
    return learns and not inside and not torch.compiler.is_compiling()


class BertLayer(nn.Module):
    """Self-attention and a feed-forward network, post-norm."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.attention = BertSelfAttention(width, heads, dropout)
        self.gathered = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, epsilon)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        self.norm_after = nn.LayerNorm(width, epsilon)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b k d"], bias: Tensor | None, allowed: Tensor | None
    ) -> tuple[Float[Tensor, "b k d"], QKCall, Tensor, Tensor]:
        """Return the states after the layer, and its attention call."""
        gathered, source, value, found = self.attention(x, bias, allowed)
        x = self.norm(x + self.drop(self.gathered(gathered)))
        # exact GELU, as in BERT: the tanh approximation would change pretrained models
        feed_forward = self.outer(nn.functional.gelu(self.inner(x)))
        return self.norm_after(x + self.drop(feed_forward)), source, value, found


class BertEncoder(nn.Module):
    """Stack of BERT layers."""

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, dropout: float, epsilon: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            BertLayer(width, heads, inner, dropout, epsilon) for _ in range(layers)
        )

    def forward(
        self,
        x: Float[Tensor, "b k d"],
        present: Bool[Tensor, "b k"],
        kept: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Float[Tensor, "b k d"], tuple[Call, ...]]:
        """Return the final states and one call per layer.

        `kept` multiplies the weights of each key before normalisation; 0 hides a key. Absent
        positions are masked.
        """
        bias = allowed = None
        if kept is None:
            allowed = present[:, None, None]
        else:
            there = present & (kept > 0)
            # the inner `where` keeps log(0) out of the graph: its gradient would be NaN
            logs = torch.where(there, torch.where(there, kept, 1).log(), -torch.inf)
            bias = logs[:, None, None].to(x.dtype)
        calls = []
        for at, layer in enumerate(self.layers):
            assert isinstance(layer, BertLayer)
            x, source, value, found = layer(x, bias, allowed)
            name = f"layers.{at}.attention"
            calls.append(
                Call(name, layer.attention, source, Route.SDPA, False, value=value, output=found)
            )
        return x, tuple(calls)


# --- pretrained layers

_HF_NAMES = {  # our name: name in Hugging Face
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "gathered": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm_after": "output.LayerNorm",
}
_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def read_bert(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and weights of a BERT-like encoder in Hugging Face format.

    Nothing is downloaded and no code in the folder is run: weights are safetensors. The prefix of a
    model with a head is removed from the names.

    Raises:
        UserError: the folder is not a BERT-like encoder.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a Hugging Face model folder: config.json is missing")
    config = io.read_json(folder / "config.json")
    missing = [name for name in _REQUIRED_KEYS if not isinstance(config.get(name), int)]
    if missing:
        raise UserError(f"{folder} is not a BERT-like encoder: config has no {missing[0]}")
    # other activations or positions would load without an error and compute something else
    act, position = config.get("hidden_act"), config.get("position_embedding_type", "absolute")
    if (act, position) != ("gelu", "absolute"):
        raise UserError(
            f"{folder} has hidden_act={act} and {position} positions: expected gelu and absolute"
        )
    weights = io.read_tensors(folder / "model.safetensors")
    return config, {name.removeprefix("bert."): value for name, value in weights.items()}


def layer_weights(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the weights of the layers by our names.

    Raises:
        CorruptFileError: a weight is missing.
    """
    found = {}
    for at in range(layers):
        for ours, theirs in _HF_NAMES.items():
            for kind in ("weight", "bias"):
                name = f"encoder.layer.{at}.{theirs}.{kind}"
                if name not in weights:
                    raise CorruptFileError(f"the weights of the encoder lack {name}")
                found[f"layers.{at}.{ours}.{kind}"] = weights[name]
    return found
