"""The layers of BERT, written so that what attends can be read and the kernels stay fused.

Devlin, Chang, Lee and Toutanova, "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805. Queries and
keys of every layer come out beside the states, as the `Seen` that `overt.watch` would give: any
block of the weights is computed when it is asked for.
"""

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt import files
from overt.capture.call import Call, Projected, Route, default_scale
from overt.capture.products import tap
from overt.errors import BadInput, Damaged


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself by the fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split into {heads} heads")
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(
        self, x: Float[Tensor, "b k d"], bias: Tensor | None, allowed: Tensor | None
    ) -> tuple[Float[Tensor, "b k d"], Projected, Tensor, Tensor]:
        """What each position gathers; the call, its values and outputs by head.

        The call holds weights before dropout.
        """
        query, key, value = (
            rearrange(part(x), "b k (h d) -> b h k d", h=self.heads)
            for part in (self.query, self.key, self.value)
        )
        taps = tap(query, key) if _tapped(query) else None
        found = nn.functional.scaled_dot_product_attention(
            query if taps is None else taps[0].tensor,
            key if taps is None else taps[1].tensor,
            value,
            attn_mask=allowed if bias is None else bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        source = Projected(query, key, default_scale(query), bias, allowed, taps=taps)
        return rearrange(found, "b h k d -> b k (h d)"), source, value, found


def _tapped(query: Tensor) -> bool:
    """Whether a loss may come for this call in a way that taps can follow."""
    inside = torch._C._functorch.maybe_current_level() is not None  # of torch.func
    learns = torch.is_grad_enabled() and query.requires_grad
    return learns and not inside and not torch.compiler.is_compiling()


class Layer(nn.Module):
    """Attention and a network of two layers, each added to its input and normed after."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout)
        self.gathered = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, epsilon)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        self.norm_after = nn.LayerNorm(width, epsilon)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b k d"], bias: Tensor | None, allowed: Tensor | None
    ) -> tuple[Float[Tensor, "b k d"], Projected, Tensor, Tensor]:
        """The states after the layer, and what was seen of its attention."""
        gathered, source, value, found = self.attention(x, bias, allowed)
        x = self.norm(x + self.drop(self.gathered(gathered)))
        thought = self.outer(nn.functional.gelu(self.inner(x)))
        return self.norm_after(x + self.drop(thought)), source, value, found


class Encoder(nn.Module):
    """A stack of layers over positions of which some are not there."""

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, dropout: float, epsilon: float
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(width, heads, inner, dropout, epsilon) for _ in range(layers)
        )

    def forward(
        self,
        x: Float[Tensor, "b k d"],
        present: Bool[Tensor, "b k"],
        kept: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Float[Tensor, "b k d"], tuple[Call, ...]]:
        """The final states, and one call a layer.

        `kept` multiplies the weights of each key before they are normalised; 0 hides a key from
        all. Positions that are not there are seen by none.
        """
        bias = allowed = None
        if kept is None:
            allowed = present[:, None, None]
        else:
            there = present & (kept > 0)
            logs = torch.where(there, torch.where(there, kept, 1).log(), -torch.inf)
            bias = logs[:, None, None].to(x.dtype)
        calls = []
        for at, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x, source, value, found = layer(x, bias, allowed)
            name = f"layers.{at}.attention"
            calls.append(
                Call(name, layer.attention, source, Route.SDPA, False, value=value, output=found)
            )
        return x, tuple(calls)


# --- pretrained layers

_NAMES = {  # of ours: Hugging Face's
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "gathered": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm_after": "output.LayerNorm",
}
_ABOUT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def read_bert(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and weights of a BERT-family encoder, as Hugging Face keeps them.

    Nothing is fetched and no code in the folder is run: weights are safetensors. Names lose the
    prefix of a model with a head on top.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} holds no Transformer: config.json is missing")
    config = files.read_json(folder / "config.json")
    missing = [name for name in _ABOUT if not isinstance(config.get(name), int)]
    if missing:
        raise BadInput(f"{folder} is no encoder of the BERT family: {missing[0]} is not given")
    told = (config.get("hidden_act"), config.get("position_embedding_type", "absolute"))
    if told != ("gelu", "absolute"):
        raise BadInput(
            f"{folder} has {told[0]} and {told[1]} positions; only gelu and absolute are known"
        )
    weights = files.read_tensors(folder / "model.safetensors")
    return config, {name.removeprefix("bert."): value for name, value in weights.items()}


def layer_weights(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The weights of the layers by our names; one that is missing is told."""
    found = {}
    for at in range(layers):
        for ours, theirs in _NAMES.items():
            for kind in ("weight", "bias"):
                name = f"encoder.layer.{at}.{theirs}.{kind}"
                if name not in weights:
                    raise Damaged(f"the weights of the encoder have no {name}")
                found[f"layers.{at}.{ours}.{kind}"] = weights[name]
    return found
