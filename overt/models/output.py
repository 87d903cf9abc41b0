"""What every model of ours returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from overt.attention import AttentionMap


@dataclass(frozen=True, eq=False)
class Output:
    """A prediction, the attention behind it, and named extras.

    `attention` holds one map a kind of key, told apart by their layouts: cells of the image, words
    of the question. `extras` are auxiliary losses and counts, such as a penalty or cells kept.
    """

    prediction: Float[Tensor, "b c"]
    attention: tuple[AttentionMap, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def looking_at(self, name: str) -> AttentionMap:
        """The map over the span called `name`; an unknown name is answered with those there are."""
        for one in self.attention:
            if any(span.name == name for span in one.keys.spans):
                return one
        names = [span.name for one in self.attention for span in one.keys.spans]
        raise ValueError(f"no attention over {name!r}; this model attends to {names or 'nothing'}")
