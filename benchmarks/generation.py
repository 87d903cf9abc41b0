"""What the attention of generated tokens costs a small Llama on a CPU.

    python benchmarks/generation.py [--rounds N] [--out FILE]

Greedy generation of 64 tokens after a prompt of 128: plain, with `capture.generate`, with every
call captured by the function mode (as the first two passes still are), and eager with
`output_attentions=True`. All ways run alternately in one process; the number is the median over
rounds of the ratio to the plain run of the same round, in processor time. Weights are random.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from as_launched import Bench
from sections.report import commit, machine

from overt.capture import generate, generation

SIZES = {"width": 256, "layers": 8, "heads": 8, "prompt": 128, "new": 64}
QUICK = {"width": 32, "layers": 2, "heads": 4, "prompt": 6, "new": 4}


def llama(sizes: dict[str, int], groups: int, attention: str) -> Any:
    """Return a Llama with random weights, the same for each attention implementation."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=groups,
        intermediate_size=4 * sizes["width"],
        vocab_size=1000,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).eval()


def measure(bench: Bench, sizes: dict[str, int], groups: int) -> None:
    """Add the row of one number of key heads."""
    model, eager = (llama(sizes, groups, name) for name in ("sdpa", "eager"))
    ids = torch.randint(3, 1000, (1, sizes["prompt"]))
    given: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": sizes["new"],
        "min_new_tokens": sizes["new"],
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }

    def by_the_mode() -> None:
        with patch.object(generation._TokenRows, "record_decoding", lambda *_, **__: None):
            generate(model, **given)

    bench.compare(
        f"Llama {sizes['layers']} x {sizes['width']}, {groups} key heads, "
        f"generate {sizes['prompt']} + {sizes['new']}",
        lambda: model.generate(**given),
        {
            "capture.generate": lambda: generate(model, **given),
            "every call by the function mode": by_the_mode,
            "plain, static cache": lambda: model.generate(**given, cache_implementation="static"),
            "capture.generate, static cache": lambda: generate(
                model, **given, cache_implementation="static"
            ),
            "eager": lambda: eager.generate(**given, output_attentions=True),
        },
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    bench = Bench("cpu", given.rounds)
    sizes = QUICK if given.quick else SIZES
    for groups in (sizes["heads"], 2):
        measure(bench, sizes, groups)
    if given.out is not None:
        about = {
            "command": "python benchmarks/generation.py",
            "rounds": given.rounds,
            "quick": given.quick,
            "machine": machine("cpu"),
            "transformers": transformers.__version__,
            "commit": commit(),
        }
        given.out.write_text(json.dumps({**about, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
