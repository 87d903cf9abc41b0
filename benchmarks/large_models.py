"""Time and memory of large models as they are launched: plain, watched and eager.

    python benchmarks/large_models.py --device cuda --out results/speed/large-models.json
    python benchmarks/large_models.py --quick        # tiny models on a CPU: tests the script

One call measures the whole table, in about `--minutes` at most: forward passes, training,
generation (greedy, 4 beams, static caches, reduced rows), and prefills of 2,048 to 131,072 tokens
with maps, rows and statistics, by kernels and by plain operations. All ways of
running a model alternate in one process, and a ratio compares a run with the plain run of the same
round. There is no CUDA graph and no compiler. Memory is the peak above that at the start of a run:
weights do not count. Weights are random.

Where rows or statistics of a fast way differ from plain operations, the warning is part of the row.
The file is written after every row. A way that does not fit into memory, or would not finish in the
remaining time, is listed with the reason, and not tried with longer sequences.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from sections.clock import describe_error, free_memory
from sections.memory import peak_allocated
from sections.report import commit, machine
from torch import nn

from overt import capture
from overt.attention import AttentionMap
from overt.capture import Call, generate, generation, watch
from overt.capture.kernels import statistics_launch

Run = Callable[[], object]
GIB = 2**30
VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model; `groups` is its number of key and value heads."""

    name: str
    width: int
    layers: int
    heads: int
    groups: int
    inner: int


@dataclass(frozen=True)
class Plan:
    """Sizes of all rows: samples x tokens, prompt + new tokens, and lengths of prefills."""

    small: Shape
    large: Shape
    largest: Shape
    bert: dict[str, int]
    batch: tuple[int, int]
    train: tuple[int, int]
    encode: tuple[int, int]
    new: int
    prompts: tuple[int, int]
    lengths: tuple[int, ...]


FULL = Plan(
    Shape("0.5B", 896, 24, 14, 2, 4864),
    Shape("8B", 4096, 32, 32, 8, 14336),
    Shape("30B", 5120, 64, 40, 8, 25600),
    {},
    batch=(4, 512),
    train=(64, 164),
    encode=(32, 512),
    new=64,
    prompts=(1024, 8192),
    lengths=(2048, 8192, 32768, 131072),
)
QUICK = Plan(
    Shape("0.5B", 32, 2, 4, 2, 48),
    Shape("8B", 32, 2, 4, 2, 48),
    Shape("30B", 32, 2, 4, 2, 48),
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    batch=(2, 8),
    train=(2, 8),
    encode=(2, 8),
    new=3,
    prompts=(6, 9),
    lengths=(16,),
)


@dataclass(frozen=True)
class Way:
    """One way of running a model, under "sdpa" or "eager" attention."""

    name: str
    run: Run
    attention: str = "sdpa"


@dataclass
class Bench:
    """Measure ways of running models, and write each row to a file."""

    device: str
    seconds: float  # for all rows
    rounds: int
    out: Path | None
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    former: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Return the seconds that remain."""
        return self.seconds - (time.monotonic() - self.started)

    def compare(
        self, model: nn.Module, name: str, work: str, size: int, ways: Sequence[Way]
    ) -> None:
        """Add a row; `size` predicts how long the ways take, from a row of the same name.

        The first run of each way is a warm-up, and its memory is measured. Then all ways take
        turns, as often as a twentieth of the time allows. Ways that take longer are run once.
        """
        row: dict[str, Any] = {"model": name, "work": work, "ways": {}}
        warm: dict[str, float] = {}
        for way in ways:
            reason = self.reason_to_skip(name, way.name, size)
            found: dict[str, Any] = {"reason": reason} if reason else self.warm_up(model, way)
            row["ways"][way.name] = found
            if "reason" in found:
                self.missing.setdefault((name, way.name), f"{found['reason']} ({work})")
            else:
                warm[way.name] = found["seconds"][0]
        times: dict[str, list[float]] = {way: [] for way in warm}
        limit, spent = min(self.left, self.seconds / 20), 0.0
        for _ in range(self.rounds):
            if spent + sum(warm.values()) > limit:
                break
            for way in ways:
                if way.name in times:
                    times[way.name].append(self.time(model, way))
            spent = sum(map(sum, times.values()))
        for way_name, several in times.items():
            found = row["ways"][way_name]
            # without a round, the warm-up is the measurement: of the plain run, too
            found["seconds"] = several or found["seconds"]
            self.former[name, way_name] = size, statistics.median(found["seconds"])
            if "plain" in times:
                plain = times["plain"] or row["ways"]["plain"]["seconds"]
                ratios = [a / b for a, b in zip(found["seconds"], plain, strict=True)]
                found["times_as_long"] = statistics.median(ratios)
        row["rounds"] = len(next(iter(times.values()), []))
        self.rows.append(row)
        self.write()

    def reason_to_skip(self, model: str, way: str, size: int) -> str:
        """Return why a way is not run, or an empty text."""
        if (model, way) in self.missing:
            return self.missing[model, way]
        shorter, seconds = self.former.get((model, way), (size, 0.0))
        # attention grows with the square of the length
        expected = seconds * (size / shorter) ** 2
        if self.left <= 0:
            return "not measured: no time left"
        if expected > self.left / 2:
            return f"not measured: about {expected:.0f} s, {self.left:.0f} s were left"
        return ""

    def warm_up(self, model: nn.Module, way: Way) -> dict[str, Any]:
        """Run a way for the first time: its seconds and memory, or the reason why it failed."""
        free_memory()
        start, reason = time.monotonic(), ""
        try:
            with_attention(model, way.attention)
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                gib = self.peak_gib(way.run)
        except (RuntimeError, ValueError) as error:
            reason = describe_error(error)
        # outside of the handler, where the error holds the tensors of the run
        free_memory()
        if reason:
            return {"reason": reason}
        found: dict[str, Any] = {"seconds": [time.monotonic() - start], "gib": gib}
        # of rows or statistics that differ from plain operations, which then replace the fast way
        texts = [str(one.message) for one in given if "differ" in str(one.message)]
        return found | ({"warnings": texts} if texts else {})

    def peak_gib(self, run: Run) -> float | None:
        """Run once; return the peak memory of a GPU above that at the start, in GiB."""
        if self.device == "cuda":
            return peak_allocated(run, self.device) / GIB
        run()
        return None

    def time(self, model: nn.Module, way: Way) -> float:
        """Return the seconds of one run, with the work of the GPU."""
        with_attention(model, way.attention)
        cuda = self.device == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        torch.cuda.synchronize() if cuda else None
        start = clock()
        way.run()
        torch.cuda.synchronize() if cuda else None
        return clock() - start

    def write(self) -> None:
        """Write all rows, and print the last one."""
        row = self.rows[-1]
        print(row["model"], row["work"], flush=True)
        for name, found in row["ways"].items():
            print(f"  {name}: {describe(found)}", flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n")


def describe(found: dict[str, Any]) -> str:
    """Describe a measured way in one line."""
    if "reason" in found:
        return str(found["reason"])
    ratio = f", {found['times_as_long']:.2f} times plain" if "times_as_long" in found else ""
    memory = "" if found["gib"] is None else f", {found['gib']:.3g} GiB"
    warned = "".join(f"\n    {text}" for text in found.get("warnings", ()))
    return f"{statistics.median(found['seconds']):.4g} s{ratio}{memory}{warned}"


def with_attention(model: nn.Module, name: str) -> None:
    """Select the attention implementation of a model, outside of the measured time."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)


# --- models


def llama(shape: Shape, positions: int, device: str) -> nn.Module:
    """Return a Llama with random weights, in bfloat16 on a GPU."""
    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        intermediate_size=shape.inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def token_ids(b: int, n: int, device: str) -> torch.Tensor:
    """Return random token ids, none of them special."""
    return torch.randint(3, 1000, (b, n), device=device)


# --- ways


@torch.no_grad()
def run_forward(model: nn.Module, inputs: dict[str, Any]) -> object:
    """Run a forward pass."""
    return model(**inputs)


@torch.no_grad()
def run_watched(model: nn.Module, inputs: dict[str, Any], **options: Any) -> object:
    """Run a watched forward pass; what was captured is kept until it ends."""
    with watch(model, **options) as trace:
        model(**inputs)
    return trace


def forward_ways(model: nn.Module, inputs: dict[str, Any]) -> list[Way]:
    """Return a forward pass in all ways."""
    return [
        Way("plain", partial(run_forward, model, inputs)),
        Way("watched", partial(run_watched, model, inputs)),
        Way("watched, last layer", partial(run_watched, model, inputs, layers=[-1])),
        Way("eager", partial(run_forward, model, {**inputs, "output_attentions": True}), "eager"),
    ]


def prefill_ways(model: nn.Module, length: int, device: str) -> list[Way]:
    """Return a prefill in all ways: maps, rows and statistics while the model runs."""
    inputs = {"input_ids": token_ids(1, length, device), "use_cache": False, "logits_to_keep": 1}
    watched = partial(run_watched, model, inputs)
    return [
        *forward_ways(model, inputs),
        Way("last row of all layers", partial(watched, each=last_row)),
        Way("received, last layer", partial(watched, each=capture.received, layers=[-1])),
        Way("received, all layers", partial(watched, each=capture.received)),
        Way("all statistics, all layers", partial(watched, each=all_statistics)),
        Way("all statistics, last layer", partial(watched, each=all_statistics, layers=[-1])),
        Way(
            "all statistics, last layer, without kernels",
            partial(run_without_kernels, model, inputs),
        ),
    ]


def run_without_kernels(model: nn.Module, inputs: dict[str, Any]) -> object:
    """Compute the statistics of the last layer by plain operations on blocks of rows."""
    with patch.object(statistics_launch, "supports", lambda *_: False):
        return run_watched(model, inputs, each=all_statistics, layers=[-1])


def last_row(call: Call) -> torch.Tensor:
    """Return the attention of the last query."""
    return call.weights(slice(-1, None))


def all_statistics(call: Call) -> capture.AttentionStatistics:
    """Return column sums, entropies, the largest keys and the share of the first token."""
    return capture.statistics(call, received=True, entropy=True, top_k=8, spans={"sink": (0,)})


def generation_ways(model: nn.Module, prompt: int, new: int, device: str) -> list[Way]:
    """Return greedy generation in all ways."""
    ids = token_ids(1, prompt, device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    inputs |= {"pad_token_id": 0, "return_dict_in_generate": True}
    write = partial(model.generate, **inputs)
    return [
        Way("plain", write),
        Way("capture.generate", partial(generate, model, **inputs)),
        Way("eager", partial(write, output_attentions=True), "eager"),
        Way("capture.generate, mean over layers and heads",
            partial(generate, model, reduce=mean_row, **inputs)),
        Way("plain, static cache, not compiled",
            partial(write, cache_implementation="static", disable_compile=True)),
        Way("capture.generate, static cache",
            partial(generate, model, cache_implementation="static", **inputs)),
        Way("capture.generate, by the function mode", partial(generate_by_mode, model, inputs)),
    ]  # fmt: skip


def beam_ways(model: nn.Module, prompt: int, new: int, device: str) -> list[Way]:
    """Return beam search in all ways."""
    ids = token_ids(1, prompt, device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"num_beams": 4, "do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    inputs |= {"pad_token_id": 0, "return_dict_in_generate": True}
    write = partial(model.generate, **inputs)
    return [
        Way("plain", write),
        Way("capture.generate", partial(generate, model, **inputs)),
        Way("eager", partial(write, output_attentions=True), "eager"),
    ]


def mean_row(row: AttentionMap) -> AttentionMap:
    """Return the mean over layers and heads, which is stored at each token."""
    return row.over_heads().over_layers()


def generate_by_mode(model: nn.Module, inputs: dict[str, Any]) -> object:
    """Generate with every call captured by the function mode, as in the first passes."""
    with patch.object(generation._TokenRows, "record_decoding", lambda *_, **__: None):
        return generate(model, **inputs)


def training_ways(model: nn.Module, inputs: dict[str, Any]) -> list[Way]:
    """Return a training step in all ways."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(forward: Callable[[], Any]) -> object:
        optimizer.zero_grad()
        forward()[0].float().square().mean().backward()
        return optimizer.step()

    def watched() -> Any:
        with watch(model):
            return model(**inputs)

    eager = partial(model, **inputs, output_attentions=True)
    return [
        Way("plain", partial(step, partial(model, **inputs))),
        Way("watched", partial(step, watched)),
        Way("eager", partial(step, eager), "eager"),
    ]


def under_autocast(way: Way, device: str) -> Way:
    """Return a way in bfloat16 on a GPU."""

    def run() -> object:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            return way.run()

    return Way(way.name, run, way.attention)


# --- the table


def measure_all(bench: Bench, plan: Plan) -> None:
    """Measure all rows, the most important first."""
    device, positions = bench.device, plan.lengths[-1] + plan.new
    for shape, prompts, lengths in (
        (plan.small, plan.prompts[:1], plan.lengths),
        (plan.large, plan.prompts, plan.lengths),
    ):
        model = llama(shape, positions, device)
        b, n = plan.batch
        inputs = {"input_ids": token_ids(b, n, device)}
        ways = forward_ways(model, inputs)
        bench.compare(model, f"{shape.name} forward", f"forward {b} x {n}", n, ways)
        for prompt in prompts:
            ways, work = generation_ways(model, prompt, plan.new, device), f"{prompt} + {plan.new}"
            # most of the time are the new tokens, as many for each prompt
            bench.compare(model, f"{shape.name} generate", f"generate {work}", plan.new, ways)
        ways = beam_ways(model, prompts[0], plan.new, device)
        work = f"4 beams {prompts[0]} + {plan.new}"
        bench.compare(model, f"{shape.name} beams", work, plan.new, ways)
        measure_prefills(bench, model, shape, lengths)
        del model, inputs, ways
        free_memory()
    measure_bert(bench, plan)
    if bench.left > 0:
        model = llama(plan.largest, positions, device)
        measure_prefills(bench, model, plan.largest, plan.lengths)


def measure_prefills(bench: Bench, model: nn.Module, shape: Shape, lengths: Sequence[int]) -> None:
    """Measure prefills of one sample, from short to long."""
    for length in lengths:
        ways = prefill_ways(model, length, bench.device)
        bench.compare(model, f"{shape.name} prefill", f"prefill {length}", length, ways)


def measure_bert(bench: Bench, plan: Plan) -> None:
    """Measure a training step and a forward pass of BERT."""
    device = bench.device
    with torch.device(device):
        bert = transformers.BertModel(transformers.BertConfig(**plan.bert)).train()
    b, n = plan.train
    ways = training_ways(bert, {"input_ids": token_ids(b, n, device)})
    ways = [under_autocast(way, device) for way in ways]
    bench.compare(bert, "BERT-base train", f"train {b} x {n}", n, ways)
    bert.eval().zero_grad(set_to_none=True)
    b, n = plan.encode
    ways = forward_ways(bert, {"input_ids": token_ids(b, n, device)})
    ways = [under_autocast(way, device) for way in ways]
    bench.compare(bert, "BERT-base forward", f"forward {b} x {n}", n, ways)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, default=8, help="for all rows")
    parser.add_argument("--rounds", type=int, default=5, help="at most, per row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    if given.device == "cpu" and not given.quick:
        parser.error("the models are too large for a CPU: use --device cuda, or --quick")
    torch.manual_seed(0)
    about = {
        "command": "python benchmarks/large_models.py --device cuda",
        "quick": given.quick,
        "minutes": given.minutes,
        "rounds": given.rounds,
        "machine": machine(given.device),
        "transformers": transformers.__version__,
        "commit": commit(),
    }
    bench = Bench(given.device, 60 * given.minutes, given.rounds, given.out, about)
    measure_all(bench, QUICK if given.quick else FULL)


if __name__ == "__main__":
    main()
