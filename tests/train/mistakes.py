"""Mistakes that a type checker would find, made without one: what is said to each, as JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overt.errors import BadInput
from overt.supervise.loss import Loss
from overt.train import Limits, fit
from tests.train import toys

ONE, EIGHT = torch.ones(()), torch.tensor(8)
COUNT: Any = 8


def returned() -> dict[str, Any]:
    """What a step must not return; made only where shapes are not checked."""
    return {
        "a tensor": ONE,
        "no losses": None,
        "a loss without a name": {"model": Loss(ONE, EIGHT)},
        "a loss without a count": {"model": {"task": ONE}},
        "a count that is no tensor": {"model": {"task": Loss(ONE, COUNT)}},
        "a loss a row": {"model": {"task": Loss(torch.ones(3), EIGHT)}},
    }


class Pairs(toys.Numbers):
    """Features and classes, as a data set of torch would give them."""

    def batch(self, indices: Sequence[int]) -> Any:
        return self.features, self.labels


def said(out: Path, **given: Any) -> str:
    """The sentence with which `fit` refuses what is given in the place of what it should be."""
    net, sets = toys.make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    asked = {
        "data": toys.Numbers(),
        "step": toys.step,
        "sets": sets,
        "limits": toys.LIMITS,
        **given,
    }
    if given.get("sets") == "an optimizer":
        asked["sets"] = optimizer
    if given.get("sets") == "in a mapping":
        asked["sets"] = {"model": optimizer}
    try:
        if "epochs" in asked:
            Limits(asked["epochs"], batch=8)
        fit(net, **asked, out=out, seed=0, device="cpu")
    except BadInput as refusal:
        return str(refusal)
    return "nothing"


def main(out: Path) -> None:
    """Make them all."""
    told = {name: said(out, step=lambda *_, it=it: it) for name, it in returned().items()}
    told["half an epoch"] = said(out, epochs=1.5)
    told["a list"] = said(out, data=[1, 2])
    told["a batch that is none"] = said(out, data=Pairs())
    told["an optimizer"] = said(out, sets="an optimizer")
    told["a set that is an optimizer"] = said(out, sets="in a mapping")
    told["no set"] = said(out, sets={})
    told["a monitor that is a function"] = said(out, monitor=lambda model: {})
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
