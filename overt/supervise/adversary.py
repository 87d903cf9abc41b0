"""A loss on attention that is learned: a discriminator tells targets from maps of the model.

Patro, Kasturi, Jain and Namboodiri, "Self Supervision for Attention Networks", WACV 2021, eq. 3.
The paper does not describe its discriminator; ours is that of the code published for its forerunner
("Explanation vs Attention", AAAI 2020), with departures that are stated where they are made.

Both players move in one step of `fit`, each on its own set of parameters::

    def step(net, batch, progress):
        features = net.model.encode(batch)
        output, seen = net.model.decide(features), features.pooled()
        attention, target = output.looking_at("image").over_heads(), source(batch.ids)
        task = classification(output.prediction, batch.labels)
        return {
            "model": {"task": task, "map": gamma * deceive(net.rival, attention, target, seen)},
            "rival": {"rival": tell_apart(net.rival, attention, target, seen)},
        }
"""

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.supervise.loss import Loss
from overt.supervise.losses import precise, summed

Context = Float[Tensor, "b d"]  # what a sample is, besides its map: pooled features
Values = Float[Tensor, "b k v"]  # what stands at each key


class Discriminator(nn.Module):
    """Is a row a target? One logit a row: dropout, linear, ReLU, dropout, linear.

    `keys` is the largest number of keys a map can have: shorter texts are filled up with zeros.
    With `context`, the size of a vector a sample, it judges the map given the sample, D(map | x) as
    the paper writes it. Without (0) it judges maps alone, as the published code does: then, like
    MMD and CORAL, it only learns how maps are spread, and cannot teach the map of one sample.
    With `values`, the size of what stands at a key, it is also given what each row takes from them,
    their weighted sum. A pooled context says what there is and not where; this says what the map
    looks at.

    Departures from that code: logits in the place of a sigmoid, because a sigmoid that is sure has
    no gradient left; each weight is multiplied by the number of keys its row may see, so that an
    even map is all ones, whatever its length; and a context is brought to mean 0 and variance 1,
    so that it does not drown the map. It was trained by Adam with a rate of 2e-4 and betas of
    (0.5, 0.999).
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
        """The logit of every row being a target."""
        _, l, h, q, k = attention.values.shape
        if k > self.keys:
            raise ValueError(
                f"a map of {k} keys for a discriminator of {self.keys}; make it for {k} or more"
            )
        given = 0 if context is None else context.shape[1]
        if given != self.context:
            raise ValueError(
                f"a discriminator made for a context of {self.context} numbers a sample was given "
                f"{given}; make it with context={given}"
            )
        stand = 0 if values is None else values.shape[-1]
        if stand != self.values:
            raise ValueError(
                f"a discriminator made for values of {self.values} numbers a key was given "
                f"{stand}; make it with values={stand}"
            )
        visible = rearrange(attention.visible, "b q k -> b 1 1 q k")
        weights = torch.where(visible, precise(attention.weights), 0)
        rows = nn.functional.pad(weights * visible.sum(dim=-1, keepdim=True), (0, self.keys - k))
        if context is not None:
            even = nn.functional.layer_norm(precise(context), (given,))
            beside = repeat(even, "b d -> b l h q d", l=l, h=h, q=q)
            rows = torch.cat([rows, beside], dim=-1)
        if values is not None:
            each = nn.functional.layer_norm(precise(values), (stand,))
            taken = torch.einsum("blhqk,bkv->blhqv", weights, each)
            rows = torch.cat([rows, taken], dim=-1)
        weight = next(self.parameters())
        return precise(self.layers(rows.to(weight.dtype))[..., 0])


def tell_apart(
    discriminator: Discriminator,
    attention: AttentionMap,
    target: AttentionMap,
    context: Context | None = None,
    values: Values | None = None,
) -> Loss:
    """What the discriminator pays: `-log D(t | x) - log(1 - D(a | x))` of every row (eq. 3).

    The map, the context and the values are taken as they are, without their history: nothing that
    made them gets a gradient.
    """
    beside = _still(context), _still(values)
    real = discriminator(target.detach(), *beside)
    fake = discriminator(attention.detach(), *beside)
    softplus = nn.functional.softplus
    return summed(softplus(-real) + softplus(fake), attention, target)


def deceive(
    discriminator: Discriminator,
    attention: AttentionMap,
    target: AttentionMap,
    context: Context | None = None,
    values: Values | None = None,
) -> Loss:
    """What the model pays: `-log D(a | x)` of every row that has a target.

    The non-saturating form: `log(1 - D)` as printed is flat where the discriminator is sure, which
    is how training begins. The weights of the discriminator are constants here, and so are context
    and values: the model can only change its map, not what it is judged against.
    """
    frozen = {name: value.detach() for name, value in discriminator.named_parameters()}
    beside = attention, _still(context), _still(values)
    fake = torch.func.functional_call(discriminator, frozen, beside)
    return summed(nn.functional.softplus(-fake), attention, target)


def _still(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.detach()
