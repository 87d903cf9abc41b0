"""What a loss on some rows of attention costs: watched, against eager weights and no loss at all.

A BERT of 12 layers, forward and backward, 12 supervised rows of 64 text tokens onto all others, all
heads and layers. The variants take turns in one process; times are medians, memory is the peak of
one step. `python benchmarks/capture_cost.py --device cuda --out FILE`
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import BertConfig, BertModel

from overt import Layout, Span, watch

ROWS, TEXT = 12, 64


def variants(n: int, b: int, width: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """One step of each kind, as a function that gives the loss."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=4 * width,
        vocab_size=1000,
        max_position_embeddings=n,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config, add_pooling_layer=False).to(device).train()
    tokens = torch.randint(0, 1000, (b, n), device=device)
    rows = torch.stack([torch.randperm(TEXT)[:ROWS] for _ in range(b)]).to(device)
    spans = (Span("text", (TEXT,), slice(0, TEXT)), Span("image", (n - TEXT,), slice(TEXT, n)))
    layout = Layout(spans, n)
    target = torch.zeros(b, 1, 1, ROWS, n - TEXT, device=device)
    target[..., :4] = 0.25

    def task(hidden: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        return hidden.float().square().mean()

    def plain() -> Tensor:
        return task(model(tokens)[0])

    def watched() -> Tensor:
        with watch(model, layout=layout) as seen:
            loss = task(model(tokens)[0])
        block = seen.log_block("text", "image", rows=rows)
        return loss - (target * block.log_weights).sum(dim=-1).mean()

    def eager() -> Tensor:
        model.set_attn_implementation("eager")
        out = model(tokens, output_attentions=True)
        model.set_attn_implementation("sdpa")
        at = rows[:, None, :, None].expand(b, 12, ROWS, n)
        logs = []
        for weights in out.attentions:
            part = weights.gather(2, at)[..., TEXT:].float()
            logs.append((part / part.sum(dim=-1, keepdim=True)).clamp_min(1e-12).log())
        return task(out[0]) - (target * torch.stack(logs, dim=1)).sum(dim=-1).mean()

    return {"plain": plain, "watched": watched, "eager": eager}


def measure(n: int, b: int, width: int, device: str, turns: int) -> dict[str, float]:
    """Ratios to the plain step at one size."""
    steps = variants(n, b, width, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for turn in range(turns + 2):  # the first two warm up
        for name, loss in steps.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                value = loss()
            value.backward()
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated()
            if turn > 1:
                times[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    found = {"n": n, "b": b, "plain_ms": 1e3 * middle["plain"]}
    for name in ("watched", "eager"):
        found[f"{name}_time"] = middle[name] / middle["plain"]
        if peaks["plain"]:
            found[f"{name}_peak"] = peaks[name] / peaks["plain"]
    return found


def main() -> None:
    """Measure at three lengths and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--sizes", default="164x64,512x32,1024x16", help="length x batch, ...")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    sizes = [tuple(int(part) for part in size.split("x")) for size in given.sizes.split(",")]
    rows = [measure(n, b, given.width, given.device, given.turns) for n, b in sizes]
    for row in rows:
        print({name: round(value, 3) for name, value in row.items()}, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    with open(given.out, "w") as file:
        json.dump({"settings": vars(given), "versions": versions, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
