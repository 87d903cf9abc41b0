"""What our networks have in common: two steps, and a folder they are written to and read from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn

from overt.data.batch import Batch
from overt.models import pretrained
from overt.models.output import Output

Features = TypeVar("Features")
Made = TypeVar("Made", bound="Kept")


class Kept(nn.Module, ABC):
    """A network that knows how it was made, and so can be saved and read again.

    One that is made of more than plain values says in `from_config` how `config` is read.
    """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain JSON values from which the same network can be built again."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Kept":
        """The network that `config` describes, with fresh weights."""
        return cls(**config)

    def save_pretrained(
        self, folder: Path | str, beside: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Write config.json and the weights, whole or not at all, and `beside`: plain values."""
        pretrained.save(self, folder, beside)

    @classmethod
    def from_pretrained(cls: type[Made], folder: Path | str) -> Made:
        """Read a network written by `save_pretrained`, in eval mode; its files are verified."""
        return cast(Made, pretrained.load(cls.from_config, folder))


class Network(Kept, Generic[Features]):
    """A network that sees, then decides: a `Model` that can be saved."""

    @abstractmethod
    def encode(self, batch: Batch) -> Features:
        """The features of a batch."""

    @abstractmethod
    def decide(self, features: Features, mask: Mapping[str, Tensor] | None = None) -> Output:
        """The output for features, of which a mask may remove some."""

    def forward(self, batch: Batch) -> Output:
        """The output for a batch: `decide(encode(batch))`."""
        return self.decide(self.encode(batch))
