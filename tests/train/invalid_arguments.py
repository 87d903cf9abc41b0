"""Call `fit` with arguments of wrong types and print each error message as JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overt.errors import UserError
from overt.losses.loss import Loss
from overt.train import FitConfig, fit
from tests.train import toys

ONE, EIGHT = torch.ones(()), torch.tensor(8)
COUNT: Any = 8


def invalid_results() -> dict[str, Any]:
    """Return invalid results of a step; this process has no shape checks."""
    return {
        "a tensor": ONE,
        "no losses": None,
        "a loss without a name": {"model": Loss(ONE, EIGHT)},
        "a loss without a count": {"model": {"task": ONE}},
        "a count that is not a tensor": {"model": {"task": Loss(ONE, COUNT)}},
        "one loss per row": {"model": {"task": Loss(torch.ones(3), EIGHT)}},
    }


class Pairs(toys.Numbers):
    """A dataset whose batches are pairs of features and classes, as in PyTorch."""

    def batch(self, indices: Sequence[int]) -> Any:
        return self.features, self.labels


def error_message(out: Path, **given: Any) -> str:
    """Return the message of the error that `fit` raises with the given arguments."""
    net, sets = toys.make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    arguments = {
        "data": toys.Numbers(),
        "step": toys.step,
        "sets": sets,
        "config": toys.LIMITS,
        **given,
    }
    if given.get("sets") == "an optimizer":
        arguments["sets"] = optimizer
    if given.get("sets") == "in a mapping":
        arguments["sets"] = {"model": optimizer}
    try:
        if "epochs" in arguments:
            FitConfig(arguments["epochs"], batch=8)
        fit(net, **arguments, out=out, seed=0, device="cpu")
    except UserError as error:
        return str(error)
    return "nothing"


def main(out: Path) -> None:
    """Print all messages as JSON."""
    messages = {
        name: error_message(out, step=lambda *_, it=it: it)
        for name, it in invalid_results().items()
    }
    messages["half an epoch"] = error_message(out, epochs=1.5)
    messages["a list"] = error_message(out, data=[1, 2])
    messages["a batch that is a tuple"] = error_message(out, data=Pairs())
    messages["an optimizer"] = error_message(out, sets="an optimizer")
    messages["a set that is an optimizer"] = error_message(out, sets="in a mapping")
    messages["no set"] = error_message(out, sets={})
    messages["a monitor that is a function"] = error_message(out, monitor=lambda model: {})
    print(json.dumps(messages))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
