"""What watching costs a model as it is launched: no CUDA graph, no compiler.

    python benchmarks/as_launched.py [--device cuda] [--rounds N] [--out FILE]

All ways run alternately in one process; the number is the median over rounds of the ratio to the
plain run of the same round. On a CPU the clock is that of the processor. Models have random
weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from overt.capture import generate, watch

Run = Callable[[], None]


class Bench:
    """Times ways of running a model beside the plain run."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.rows: list[dict[str, Any]] = []

    def seconds(self, run: Run) -> float:
        """Return the time of one run, the work of the GPU included."""
        cuda = self.device == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        torch.cuda.synchronize() if cuda else None
        start = clock()
        run()
        torch.cuda.synchronize() if cuda else None
        return clock() - start

    def compare(self, name: str, plain: Run, ways: dict[str, Run], rounds: int = 0) -> None:
        """Add a row: the plain run in ms, and the ratio of each way to it."""
        for run in (plain, *ways.values()):
            for _ in range(2):  # the first block of a model is checked and slower
                run()
        times, ratios = [], {way: [] for way in ways}
        for _ in range(rounds or self.rounds):
            times.append(self.seconds(plain))
            for way, run in ways.items():
                ratios[way].append(self.seconds(run) / times[-1])
        row = {"model": name, "plain_ms": 1e3 * statistics.median(times)}
        row |= {"times_as_long": {way: statistics.median(some) for way, some in ratios.items()}}
        row |= {"all_ratios": ratios}
        self.rows.append(row)
        print(name, round(row["plain_ms"], 2), "ms", row["times_as_long"], flush=True)


def forward(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Run:
    """Return a watched forward pass without gradients."""

    def run() -> None:
        with torch.no_grad(), watch(model, **options):
            model(**inputs)

    return run


def plain_forward(model: nn.Module, inputs: dict[str, Any]) -> Run:
    """Return a forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(**inputs)

    return run


def train_step(model: nn.Module, inputs: dict[str, Any], watched: bool) -> Run:
    """Return a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad()
        if watched:
            with watch(model):
                output = model(**inputs)
        else:
            output = model(**inputs)
        output[0].float().square().mean().backward()
        optimizer.step()

    return run


def autocast(run: Run) -> Run:
    """Return the run under bfloat16 autocast on a GPU."""

    def inside() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            run()

    return inside


def compare_forward(bench: Bench, name: str, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Compare forward passes: plain, all layers, the last layer."""
    wrap = autocast if bench.device == "cuda" and "Llama" not in name else lambda run: run
    ways = {
        "all layers": wrap(forward(model, inputs)),
        "last layer": wrap(forward(model, inputs, layers=[-1])),
    }
    bench.compare(name, wrap(plain_forward(model, inputs)), ways)


def words(b: int, n: int, device: str) -> dict[str, Any]:
    """Return token ids."""
    return {"input_ids": torch.randint(1, 1000, (b, n), device=device)}


def measure_cpu(bench: Bench) -> None:
    """Measure small models."""
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    bert, inputs = transformers.BertModel(config).eval(), words(4, 128, "cpu")
    compare_forward(bench, "BERT 4 x 256, 4 x 128 tokens, forward", bert, inputs)
    bert.train()
    ways = {"all layers": train_step(bert, inputs, True)}
    name = "BERT 4 x 256, 4 x 128 tokens, train"
    bench.compare(name, train_step(bert, inputs, False), ways)
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768
    )
    images = {"pixel_values": torch.randn(2, 3, 224, 224)}
    compare_forward(bench, "ViT 6 x 192, 2 images", transformers.ViTModel(config).eval(), images)


def llama(width: int, layers: int, heads: int, groups: int, inner: int) -> nn.Module:
    """Return a Llama in bfloat16 on the GPU."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        vocab_size=32000,
        max_position_embeddings=16384,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def measure_gpu(bench: Bench) -> None:
    """Measure the shapes that people run."""
    small = llama(896, 24, 14, 2, 4864)
    compare_forward(bench, "Llama 0.5B, 4 x 512 tokens, forward", small, words(4, 512, "cuda"))
    prompt = words(1, 1024, "cuda")
    given: dict[str, Any] = {
        **prompt,
        "attention_mask": torch.ones_like(prompt["input_ids"]),
        "do_sample": False,
        "max_new_tokens": 32,
        "min_new_tokens": 32,
    }
    bench.compare(
        "Llama 0.5B, generate 1,024 + 32",
        lambda: small.generate(**given),
        {"overt.generate": lambda: generate(small, **given)},
        rounds=3,
    )
    with torch.device("cuda"):
        bert = transformers.BertModel(transformers.BertConfig()).train()
        vit = transformers.ViTModel(transformers.ViTConfig()).eval()
    inputs = words(64, 164, "cuda")
    ways = {"all layers": autocast(train_step(bert, inputs, True))}
    name = "BERT-base, 64 x 164 tokens, train"
    bench.compare(name, autocast(train_step(bert, inputs, False)), ways)
    compare_forward(
        bench, "BERT-base, 32 x 512 tokens, forward", bert.eval(), words(32, 512, "cuda")
    )
    images = {"pixel_values": torch.randn(16, 3, 224, 224, device="cuda")}
    compare_forward(bench, "ViT-base, 16 images", vit, images)
    del small
    large = llama(4096, 32, 32, 8, 14336)
    compare_forward(bench, "Llama 8B, 4 x 512 tokens, forward", large, words(4, 512, "cuda"))


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(given.device, given.rounds)
    measure_gpu(bench) if given.device == "cuda" else measure_cpu(bench)
    if given.out is not None:
        about = {"device": given.device, "rounds": given.rounds, "torch": torch.__version__}
        about["transformers"] = transformers.__version__
        given.out.write_text(json.dumps({**about, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
