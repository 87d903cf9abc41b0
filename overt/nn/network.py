"""Base classes of the networks: saving, loading, and the two stages `encode` and `decide`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn

from overt.data.batch import Batch
from overt.nn import checkpoint
from overt.nn.output import Output

Features = TypeVar("Features")
SavableT = TypeVar("SavableT", bound="SavableModule")


class SavableModule(nn.Module, ABC):
    """Module with `save_pretrained` and `from_pretrained`, built from its own `config`.

    Override `from_config` where `config` contains more than constructor arguments.
    """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the JSON values from which the same network can be built."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "SavableModule":
        """Build the network that `config` describes, with fresh weights."""
        return cls(**config)

    def save_pretrained(
        self, folder: Path | str, extra_files: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Write config.json and the weights atomically.

        Args:
            folder: target folder; an existing one is replaced.
            extra_files: further JSON files, by name.
        """
        checkpoint.save(self, folder, extra_files)

    @classmethod
    def from_pretrained(cls: type[SavableT], folder: Path | str) -> SavableT:
        """Load a network written by `save_pretrained`, in eval mode, after verifying its files."""
        return cast(SavableT, checkpoint.load(cls.from_config, folder))


class Network(SavableModule, Generic[Features]):
    """Savable `AttentionModel`."""

    @abstractmethod
    def encode(self, batch: Batch) -> Features:
        """Return the features of a batch."""

    @abstractmethod
    def decide(self, features: Features, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Return the output for features; a mask by span name may remove some of them."""

    def forward(self, batch: Batch) -> Output:
        """Return the output for a batch: `decide(encode(batch))`."""
        return self.decide(self.encode(batch))
