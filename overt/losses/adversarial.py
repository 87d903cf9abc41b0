"""Adversarial loss on attention: a discriminator separates targets from maps of the model.

Patro, Kasturi, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021, eq. 3.
The paper does not describe its discriminator; this is the one of the published code of its
predecessor ("Explanation vs Attention", AAAI 2020), with the departures stated below.

Both networks are updated in one step of `fit`, each with its own parameters::

    def step(net, batch, progress):
        features = net.model.encode(batch)
        output, context = net.model.decide(features), features.pooled()
        attention, target = output.attention_to("image").over_heads(), source(batch.ids)
        maps = (attention, target, context)
        task = classification(output.prediction, batch.labels)
        return {
            "model": {"task": task, "map": gamma * generator_loss(net.rival, *maps)},
            "rival": {"rival": discriminator_loss(net.rival, *maps)},
        }
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.losses.attention_losses import at_least_float32, sum_rows
from overt.losses.loss import Loss

Context = Float[Tensor, "b d"]  # a description of each sample: pooled features
Values = Float[Tensor, "b k v"]  # the features of each key


class Discriminator(nn.Module):
    """Classify rows as targets or model maps: dropout, linear, ReLU, dropout, linear.

    Departures from the published code: logits instead of a sigmoid, because a saturated sigmoid has
    no gradient; each weight is multiplied by the number of visible keys, so that a uniform map is
    all ones for any length; and the context is normalised to mean 0 and variance 1, so that it does
    not dominate the map. The published code trains it by Adam with a learning rate of 2e-4 and
    betas of (0.5, 0.999).

    Args:
        keys: The largest number of keys; shorter rows are padded with zeros.
        context: The size of a vector per sample. With it the discriminator judges D(map | x), as in
            the paper. Without it (0) it judges maps alone, as in the published code: then, like MMD
            and CORAL, it only learns the distribution of maps and cannot teach the map of one
            sample.
        hidden: The width of the hidden layer; 0 means `keys`.
        dropout: The dropout rate.
        values: The size of the features of a key. With it the discriminator also gets their
            attention- weighted sum: a pooled context says what is in the image, this says what the
            map attends to.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> Discriminator(keys=4)(attention).shape
        torch.Size([2, 1, 1, 1])
    """

    def __init__(
        self, keys: int, context: int = 0, hidden: int = 0, dropout: float = 0.5, values: int = 0
    ) -> None:
        super().__init__()
        self.keys, self.context, self.values = keys, context, values
        hidden = hidden or keys
        self.layers = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(keys + context + values, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 1),
        )

    def forward(
        self,
        attention: AttentionMap,
        context: Context | None = None,
        values: Values | None = None,
    ) -> Float[Tensor, "b l h q"]:
        """Compute the logit of every row being a target.

        Args:
            attention: The maps to judge.
            context: The vector of each sample, if the discriminator uses one.
            values: The features of each key, if the discriminator uses them.

        Returns:
            One logit per row.

        Raises:
            ValueError: The sizes differ from those of the discriminator.
        """
        _, l, h, q, k = attention.values.shape
        if k > self.keys:
            raise ValueError(
                f"attention has {k} keys, the discriminator supports {self.keys}; use keys={k}"
            )
        given = 0 if context is None else context.shape[1]
        if given != self.context:
            raise ValueError(
                f"context has {given} features, the discriminator expects {self.context}; use "
                f"context={given}"
            )
        width = 0 if values is None else values.shape[-1]
        if width != self.values:
            raise ValueError(
                f"values have {width} features, the discriminator expects {self.values}; use "
                f"values={width}"
            )
        visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
        weights = torch.where(visible, at_least_float32(attention.weights), 0)
        rows = nn.functional.pad(weights * visible.sum(dim=-1, keepdim=True), (0, self.keys - k))
        if context is not None:
            normalized = nn.functional.layer_norm(at_least_float32(context), (given,))
            inputs = repeat(normalized, "b d -> b l h q d", l=l, h=h, q=q)
            rows = torch.cat([rows, inputs], dim=-1)
        if values is not None:
            each = nn.functional.layer_norm(at_least_float32(values), (width,))
            taken = torch.einsum("blhqk,bkv->blhqv", weights, each)
            rows = torch.cat([rows, taken], dim=-1)
        weight = next(self.parameters())
        return at_least_float32(self.layers(rows.to(weight.dtype))[..., 0])


def discriminator_loss(
    discriminator: Discriminator,
    attention: AttentionMap,
    target: AttentionMap,
    context: Context | None = None,
    values: Values | None = None,
) -> Loss:
    """Compute the discriminator loss `-log D(t | x) - log(1 - D(a | x))` of every row (eq. 3).

    Map, context and values are detached: only the discriminator gets gradients.

    Args:
        discriminator: The discriminator.
        attention: The attention of the model.
        target: The target maps.
        context: The vector of each sample, if the discriminator uses one.
        values: The features of each key, if the discriminator uses them.

    Returns:
        The loss, one row per supervised query.

    Example:
        >>> from overt import words
        >>> attention = AttentionMap.from_scores(torch.zeros(2, 1, 1, 1, 4), words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> discriminator = Discriminator(keys=4)
        >>> discriminator_loss(discriminator, attention, target).mean().backward()
        >>> all(p.grad is not None for p in discriminator.parameters())
        True
    """
    inputs = _detach(context), _detach(values)
    real = discriminator(target.detach(), *inputs)
    fake = discriminator(attention.detach(), *inputs)
    softplus = nn.functional.softplus
    return sum_rows(softplus(-real) + softplus(fake), attention, target)


def generator_loss(
    discriminator: Discriminator,
    attention: AttentionMap,
    target: AttentionMap,
    context: Context | None = None,
    values: Values | None = None,
) -> Loss:
    """Compute the generator loss `-log D(a | x)` of every row that has a target.

    The non-saturating form: `log(1 - D)` as printed is flat if the discriminator is certain, as at
    the start of training. The parameters of the discriminator, context and values are constants
    here: the model can only change its map.

    Args:
        discriminator: The discriminator.
        attention: The attention of the model.
        target: The target maps.
        context: The vector of each sample, if the discriminator uses one.
        values: The features of each key, if the discriminator uses them.

    Returns:
        The loss, one row per supervised query.

    Example:
        >>> from overt import words
        >>> scores = torch.zeros(2, 1, 1, 1, 4, requires_grad=True)
        >>> attention = AttentionMap.from_scores(scores, words(4))
        >>> target = AttentionMap.from_cells(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]), words(4))
        >>> discriminator = Discriminator(keys=4)
        >>> generator_loss(discriminator, attention, target).mean().backward()
        >>> scores.grad is not None, any(p.grad is not None for p in discriminator.parameters())
        (True, False)
    """
    frozen = {name: value.detach() for name, value in discriminator.named_parameters()}
    inputs = attention, _detach(context), _detach(values)
    fake = torch.func.functional_call(discriminator, frozen, inputs)
    return sum_rows(nn.functional.softplus(-fake), attention, target)


def _detach(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.detach()
