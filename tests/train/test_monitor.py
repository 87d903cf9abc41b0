"""Numbers of attention while a model trains: by hand, in the log, on the page, at no other cost."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, words
from overt.capture.watching import watch
from overt.data.batch import Batch
from overt.errors import Stopped
from overt.measure import entropy
from overt.models import vgg_attention
from overt.models.output import Output
from overt.show.curves import from_log
from overt.supervise.loss import Loss
from overt.testing import toy_batch
from overt.train import AttentionMonitor, Limits, Losses, ParameterSet, Progress, fit
from overt.train.monitor import Monitored, Pulse, by_outputs, spaced, summed_up


def shown(rows: list[list[float]]) -> Tensor:
    """One sample, one head."""
    return torch.tensor(rows)[None, None]


def everything(weights: Tensor) -> Tensor:
    b, _, q, k = weights.shape
    return torch.ones(b, q, k, dtype=torch.bool)


def test_numbers_by_hand():
    weights = shown([[0.5, 0.5, 0, 0], [1, 0, 0, 0]])
    entropy, sink, collapse, sameness = summed_up(weights, everything(weights), 0.1).tolist()
    assert entropy == pytest.approx((math.log(2) / math.log(4) + 0) / 2)
    assert sink == pytest.approx(0.75)  # the first key has 1.5 of 2
    assert collapse == pytest.approx(0.5)
    mean = [0.75, 0.25]
    apart = -sum(p * math.log(p) for p in mean) - math.log(2) / 2
    assert sameness == pytest.approx(1 - apart / math.log(2))


def test_rows_that_are_alike_and_rows_that_are_not():
    alike = shown([[0.3, 0.7], [0.3, 0.7]])
    apart = shown([[1.0, 0], [0, 1]])
    assert float(summed_up(alike, everything(alike), 0.1)[3]) == pytest.approx(1)
    assert float(summed_up(apart, everything(apart), 0.1)[3]) == pytest.approx(0)


def test_keys_that_cannot_be_seen_do_not_count():
    """The first of causal rows has no choice; the second has two keys and is even over them."""
    weights = shown([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    seen = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    entropy, sink, collapse, _ = summed_up(weights, seen, 0.1).tolist()
    assert entropy == pytest.approx(1) and collapse == 0
    assert sink == pytest.approx((0.5 + 1 / 3) / 2)


def test_one_query_has_nobody_to_be_like():
    weights = shown([[0.5, 0.5]])
    found = summed_up(weights, everything(weights), 0.1)
    assert found[3].isnan() and found[0] == 1


def test_rows_are_spread_over_the_sequence():
    assert spaced(100, 3) == [0, 50, 99] and len(set(spaced(97, 16))) == 16


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"rows": 0}, {"samples": 0}, {"floor": 2.0}], ids=str
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        AttentionMonitor(**wrong)


# --- a model that trains


class Sentences:
    """Tokens, some of them padding, and a class."""

    def __len__(self):
        return 24

    def batch(self, indices):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 9, (24, 6), generator=generator)[list(indices)]
        mask = torch.arange(6) < 3 + torch.tensor(list(indices))[:, None] % 4
        return Batch(
            ids=tuple(map(str, indices)),
            tokens=tokens,
            token_mask=mask,
            labels=tokens[:, 0] % 3,
        )


class Reader(nn.Module):
    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(9, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, batch: Batch) -> Tensor:
        states = self.body(self.embed(batch.tokens), src_key_padding_mask=~batch.token_mask)
        return self.head(states[:, 0])


def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    loss = nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum")
    return {"model": {"task": Loss(loss, torch.tensor(len(batch)))}}


def train(out: Path, attention: AttentionMonitor | None, **more) -> nn.Module:
    torch.manual_seed(0)
    model = Reader()
    sets = {"model": ParameterSet(torch.optim.AdamW(model.parameters(), lr=1e-2))}
    limits = Limits(epochs=2, batch=4, log_every=3, save_every=4, **more)
    fit(model, Sentences(), step, sets, limits, out=out, seed=0, device="cpu", attention=attention)
    return model


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


LAYERS = ["body.layers.0.self_attn", "body.layers.1.self_attn"]


def test_the_log_tells_of_every_layer(tmp_path):
    train(tmp_path, AttentionMonitor(every=5))
    told = [line for line in lines(tmp_path) if "layers" in line]
    assert [line["step"] for line in told] == [1, 6, 11]
    assert all(line["split"] == "train" and line["stage"] == "train" for line in told)
    for line in told:
        assert list(line["layers"]) == ["entropy", "sink", "collapse", "sameness"]
        for numbers in line["layers"].values():
            assert list(numbers) == LAYERS and all(0 <= one <= 1 for one in numbers.values())


def test_training_is_the_same_bit_for_bit(tmp_path):
    plain = train(tmp_path / "plain", None).state_dict()
    watched = train(tmp_path / "watched", AttentionMonitor(every=2)).state_dict()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    without = [line for line in lines(tmp_path / "watched") if "layers" not in line]
    assert without == lines(tmp_path / "plain")


def test_accumulated_batches_are_looked_at_once_a_step(tmp_path):
    train(tmp_path, AttentionMonitor(every=1), accumulate=2)
    assert sum("layers" in line for line in lines(tmp_path)) == 6


def test_a_run_that_was_stopped_has_the_same_log(tmp_path):
    train(tmp_path / "whole", AttentionMonitor(every=3))
    stop_at = 5

    def stopping(model, batch, progress):
        import os
        import signal

        if progress.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(model, batch, progress)

    for part, resume in ((stopping, False), (step, True)):
        torch.manual_seed(0)
        model = Reader()
        sets = {"model": ParameterSet(torch.optim.AdamW(model.parameters(), lr=1e-2))}
        limits = Limits(epochs=2, batch=4, log_every=3, save_every=4)
        more = {"out": tmp_path / "parts", "seed": 0, "device": "cpu", "resume": resume}
        try:
            fit(model, Sentences(), part, sets, limits, attention=AttentionMonitor(every=3), **more)
        except Stopped:
            assert not resume
    whole, parts = ((tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_layers_are_summed_up_together_as_each_by_itself():
    torch.manual_seed(0)
    weights = torch.rand(4, 3, 2, 6, 9)
    seen = torch.rand(4, 3, 6, 9) < 0.7
    seen[1, 0], seen[2] = False, False  # a sample without keys, and a layer
    weights = weights * seen[:, :, None]
    each = torch.stack([summed_up(*one, 0.1) for one in zip(weights, seen, strict=True)])
    torch.testing.assert_close(summed_up(weights, seen, 0.1), each, equal_nan=True)
    assert each[2].isnan().all() and each[[0, 1, 3]].isfinite().all()


def test_numbers_are_those_of_the_whole_maps():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    batch = Sentences().batch(range(8))
    with torch.no_grad(), watch(model) as seen:
        model(batch)
    with AttentionMonitor().looking(model) as pulse:
        model(batch)
    found = pulse.read()
    for place, name in enumerate(LAYERS):
        whole = seen.map(place)
        wanted = summed_up(whole.weights[:, 0], whole.visible, 0.1).tolist()
        for number, value in zip(found, wanted, strict=True):
            assert found[number][name] == pytest.approx(value, abs=1e-5)


def test_few_rows_and_samples_are_enough():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    batch = Sentences().batch(range(8))
    with torch.no_grad(), watch(model) as seen:
        model(batch)
    with AttentionMonitor(rows=2, samples=3, layers=LAYERS[1:]).looking(model) as pulse:
        model(batch)
    whole = seen.map(1)
    wanted = summed_up(whole.weights[:3, 0][:, :, [0, 5]], whole.visible[:3][:, [0, 5]], 0.1)
    found = pulse.read()
    assert found["entropy"] == {LAYERS[1]: pytest.approx(float(wanted[0]), abs=1e-5)}
    assert pulse.numbers[0].requires_grad is False


def test_a_layer_that_is_called_twice_has_the_mean():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    one, two = Sentences().batch(range(4)), Sentences().batch(range(4, 8))
    alone = []
    for batch in (one, two):
        with AttentionMonitor().looking(model) as pulse:
            model(batch)
        alone.append(pulse.read()["entropy"][LAYERS[0]])
    with AttentionMonitor().looking(model) as pulse:
        model(one)
        model(two)
    assert pulse.read()["entropy"][LAYERS[0]] == pytest.approx(sum(alone) / 2)


def test_a_model_without_attention_is_told():
    model = nn.Linear(2, 3)
    with (
        pytest.raises(ValueError, match="Linear has no attention"),
        AttentionMonitor().looking(model),
    ):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="no attention was seen in this step"):
        Pulse().read()


def test_models_of_ours_are_seen_by_what_they_return():
    torch.manual_seed(0)
    model, batch = vgg_attention(classes=3, levels=2).eval(), toy_batch(4)
    monitor = AttentionMonitor(by=by_outputs)
    with torch.no_grad(), monitor.looking(model) as pulse:
        output = model(batch)
    found = pulse.read()
    assert list(found) == ["entropy", "sink", "collapse"]  # one query has nobody to be like
    for number, one in enumerate(output.attention):
        shares = entropy(one) / math.log(len(one.keys))
        assert found["entropy"][f"{number} image"] == pytest.approx(float(shares.mean()), abs=1e-5)
    assert not model._forward_hooks


def test_layers_of_one_map_are_told_apart():
    class Two(nn.Module):
        def forward(self, x):
            keys = words(3)
            values = torch.tensor([[[1.0, 0, 0]], [[1, 1, 1]]])[None, :, None] / torch.tensor(
                [1.0, 3]
            ).reshape(1, 2, 1, 1, 1)
            return Output(torch.zeros(1, 2), (AttentionMap(values, keys),))

    with AttentionMonitor(by=by_outputs).looking(model := Two()) as pulse:
        model(torch.zeros(1))
    assert pulse.read()["entropy"] == {"0 text layer 0": 0.0, "0 text layer 1": pytest.approx(1.0)}


def test_the_page_has_a_chart_a_number_and_a_line_a_layer(tmp_path):
    train(tmp_path, AttentionMonitor(every=5))
    charts = from_log({"run": lines(tmp_path)})
    chart = charts["attention entropy by layer"]
    assert [line.name for line in chart] == LAYERS
    assert [step for step, _ in chart[0].points] == [1, 6, 11]
    assert len({line.colour for line in chart}) == 2
    assert "task loss" in charts


# --- Hugging Face's Trainer


def test_a_trainer_logs_it_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Mine(Monitored, transformers.Trainer):
        attention = AttentionMonitor(every=2)

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": torch.arange(6) + at % 3, "labels": at % 2} for at in range(16)]
    settings = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Mine(model=model, args=settings, train_dataset=rows)
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    told = [sorted(name for name in one if name.startswith("attention/")) for one in logs]
    assert [bool(names) for names in told] == [True, False, True, False]
    layer = "bert.encoder.layer.0.attention.self"
    assert 0 < logs[0][f"attention/entropy/{layer}"] <= 1 and len(told[0]) == 2 * 4
