"""Attention statistics during training: values, log lines, charts, and unchanged training."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, words
from overt.capture.session import watch
from overt.data.batch import Batch
from overt.errors import RunInterrupted
from overt.losses.loss import Loss
from overt.metrics import entropy
from overt.nn.output import Output
from overt.papers.ltpa.vgg import vgg_attention
from overt.testing import toy_batch
from overt.train import AttentionMonitor, FitConfig, Losses, ParameterSet, Progress, fit
from overt.train.monitor import (
    AttentionMonitorMixin,
    AttentionStats,
    attention_statistics,
    capture_from_outputs,
    evenly_spaced,
)
from overt.viz.training_curves import curves_from_log


def as_weights(rows: list[list[float]]) -> Tensor:
    """One sample, one head."""
    return torch.tensor(rows)[None, None]


def all_visible(weights: Tensor) -> Tensor:
    b, _, q, k = weights.shape
    return torch.ones(b, q, k, dtype=torch.bool)


def test_statistics_match_values_computed_by_hand():
    weights = as_weights([[0.5, 0.5, 0, 0], [1, 0, 0, 0]])
    entropy, sink, collapse, sameness = attention_statistics(
        weights, all_visible(weights), 0.1
    ).tolist()
    assert entropy == pytest.approx((math.log(2) / math.log(4) + 0) / 2)
    assert sink == pytest.approx(0.75)  # the first key has 1.5 of the weight of 2 rows
    assert collapse == pytest.approx(0.5)
    mean = [0.75, 0.25]
    distinct = -sum(p * math.log(p) for p in mean) - math.log(2) / 2
    assert sameness == pytest.approx(1 - distinct / math.log(2))


def test_sameness_is_one_for_equal_rows_and_zero_for_disjoint_rows():
    equal = as_weights([[0.3, 0.7], [0.3, 0.7]])
    distinct = as_weights([[1.0, 0], [0, 1]])
    assert float(attention_statistics(equal, all_visible(equal), 0.1)[3]) == pytest.approx(1)
    assert float(attention_statistics(distinct, all_visible(distinct), 0.1)[3]) == pytest.approx(0)


def test_masked_keys_do_not_count():
    """The first causal row has one key; the second has two keys with equal weights."""
    weights = as_weights([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]])
    visible = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    entropy, sink, collapse, _ = attention_statistics(weights, visible, 0.1).tolist()
    assert entropy == pytest.approx(1) and collapse == 0
    assert sink == pytest.approx((0.5 + 1 / 3) / 2)


def test_sameness_of_one_query_is_nan():
    weights = as_weights([[0.5, 0.5]])
    found = attention_statistics(weights, all_visible(weights), 0.1)
    assert found[3].isnan() and found[0] == 1


def test_rows_are_spread_over_the_sequence():
    assert evenly_spaced(100, 3) == [0, 50, 99] and len(set(evenly_spaced(97, 16))) == 16


@pytest.mark.parametrize(
    "settings", [{"every": 0}, {"rows": 0}, {"samples": 0}, {"floor": 2.0}], ids=str
)
def test_invalid_settings_raise(settings):
    with pytest.raises(ValueError, match="at least 1"):
        AttentionMonitor(**settings)


# --- a model that trains


class Sentences:
    """Tokens with padding, and a class."""

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
    limits = FitConfig(epochs=2, batch=4, log_every=3, save_every=4, **more)
    fit(model, Sentences(), step, sets, limits, out=out, seed=0, device="cpu", attention=attention)
    return model


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


LAYERS = ["body.layers.0.self_attn", "body.layers.1.self_attn"]


def test_the_log_has_statistics_of_every_layer(tmp_path):
    train(tmp_path, AttentionMonitor(every=5))
    statistics_lines = [line for line in lines(tmp_path) if "layers" in line]
    assert [line["step"] for line in statistics_lines] == [1, 6, 11]
    assert all(line["split"] == "train" and line["stage"] == "train" for line in statistics_lines)
    for line in statistics_lines:
        assert list(line["layers"]) == ["entropy", "sink", "collapse", "sameness"]
        for numbers in line["layers"].values():
            assert list(numbers) == LAYERS and all(0 <= one <= 1 for one in numbers.values())


def test_monitoring_does_not_change_training(tmp_path):
    plain = train(tmp_path / "plain", None).state_dict()
    watched = train(tmp_path / "watched", AttentionMonitor(every=2)).state_dict()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    without = [line for line in lines(tmp_path / "watched") if "layers" not in line]
    assert without == lines(tmp_path / "plain")


def test_accumulated_batches_are_logged_once_per_step(tmp_path):
    train(tmp_path, AttentionMonitor(every=1), accumulate=2)
    assert sum("layers" in line for line in lines(tmp_path)) == 6


def test_a_resumed_run_has_the_same_log(tmp_path):
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
        limits = FitConfig(epochs=2, batch=4, log_every=3, save_every=4)
        more = {"out": tmp_path / "parts", "seed": 0, "device": "cpu", "resume": resume}
        try:
            fit(model, Sentences(), part, sets, limits, attention=AttentionMonitor(every=3), **more)
        except RunInterrupted:
            assert not resume
    whole, parts = ((tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_statistics_of_stacked_layers_equal_those_of_each_layer():
    torch.manual_seed(0)
    weights = torch.rand(4, 3, 2, 6, 9)
    visible = torch.rand(4, 3, 6, 9) < 0.7
    visible[1, 0], visible[2] = False, False  # a sample without keys, and a layer
    weights = weights * visible[:, :, None]
    separate = torch.stack(
        [attention_statistics(*one, 0.1) for one in zip(weights, visible, strict=True)]
    )
    torch.testing.assert_close(
        attention_statistics(weights, visible, 0.1), separate, equal_nan=True
    )
    assert separate[2].isnan().all() and separate[[0, 1, 3]].isfinite().all()


def test_monitored_statistics_equal_those_of_full_maps():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    batch = Sentences().batch(range(8))
    with torch.no_grad(), watch(model) as trace:
        model(batch)
    with AttentionMonitor().observe(model) as stats:
        model(batch)
    found = stats.compute()
    for index, name in enumerate(LAYERS):
        full_map = trace.map(index)
        expected = attention_statistics(full_map.weights[:, 0], full_map.visible, 0.1).tolist()
        for number, value in zip(found, expected, strict=True):
            assert found[number][name] == pytest.approx(value, abs=1e-5)


def test_rows_samples_and_layers_can_be_limited():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    batch = Sentences().batch(range(8))
    with torch.no_grad(), watch(model) as trace:
        model(batch)
    with AttentionMonitor(rows=2, samples=3, layers=LAYERS[1:]).observe(model) as stats:
        model(batch)
    full_map = trace.map(1)
    expected = attention_statistics(
        full_map.weights[:3, 0][:, :, [0, 5]], full_map.visible[:3][:, [0, 5]], 0.1
    )
    found = stats.compute()
    assert found["entropy"] == {LAYERS[1]: pytest.approx(float(expected[0]), abs=1e-5)}
    assert stats.numbers[0].requires_grad is False


def test_a_layer_called_twice_gives_the_mean():
    torch.manual_seed(0)
    model = Reader(dropout=0.0).eval()
    one, two = Sentences().batch(range(4)), Sentences().batch(range(4, 8))
    separate = []
    for batch in (one, two):
        with AttentionMonitor().observe(model) as stats:
            model(batch)
        separate.append(stats.compute()["entropy"][LAYERS[0]])
    with AttentionMonitor().observe(model) as stats:
        model(one)
        model(two)
    assert stats.compute()["entropy"][LAYERS[0]] == pytest.approx(sum(separate) / 2)


def test_a_model_without_attention_raises():
    model = nn.Linear(2, 3)
    with (
        pytest.raises(ValueError, match=r"Linear.*attention"),
        AttentionMonitor().observe(model),
    ):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="no attention"):
        AttentionStats().compute()


def test_capture_from_outputs_reads_the_maps_that_a_model_returns():
    torch.manual_seed(0)
    model, batch = vgg_attention(classes=3, levels=2).eval(), toy_batch(4)
    monitor = AttentionMonitor(capture=capture_from_outputs)
    with torch.no_grad(), monitor.observe(model) as stats:
        output = model(batch)
    found = stats.compute()
    assert list(found) == ["entropy", "sink", "collapse"]  # sameness needs two queries
    for number, one in enumerate(output.attention):
        shares = entropy(one) / math.log(len(one.keys))
        assert found["entropy"][f"{number} image"] == pytest.approx(float(shares.mean()), abs=1e-5)
    assert not model._forward_hooks


def test_layers_of_one_map_are_listed_separately():
    class Two(nn.Module):
        def forward(self, x):
            keys = words(3)
            values = torch.tensor([[[1.0, 0, 0]], [[1, 1, 1]]])[None, :, None] / torch.tensor(
                [1.0, 3]
            ).reshape(1, 2, 1, 1, 1)
            return Output(torch.zeros(1, 2), (AttentionMap(values, keys),))

    with AttentionMonitor(capture=capture_from_outputs).observe(model := Two()) as stats:
        model(torch.zeros(1))
    assert stats.compute()["entropy"] == {
        "0 text layer 0": 0.0,
        "0 text layer 1": pytest.approx(1.0),
    }


def test_curves_have_one_chart_per_statistic_and_one_line_per_layer(tmp_path):
    train(tmp_path, AttentionMonitor(every=5))
    charts = curves_from_log({"run": lines(tmp_path)})
    chart = charts["attention entropy by layer"]
    assert [line.name for line in chart] == LAYERS
    assert [step for step, _ in chart[0].points] == [1, 6, 11]
    assert len({line.colour for line in chart}) == 2
    assert "task loss" in charts


# --- Hugging Face's Trainer


def test_trainer_logs_the_statistics(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class MonitoredTrainer(AttentionMonitorMixin, transformers.Trainer):
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
    trainer = MonitoredTrainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    statistics_lines = [
        sorted(name for name in one if name.startswith("attention/")) for one in logs
    ]
    assert [bool(names) for names in statistics_lines] == [True, False, True, False]
    layer = "bert.encoder.layer.0.attention.self"
    assert 0 < logs[0][f"attention/entropy/{layer}"] <= 1 and len(statistics_lines[0]) == 2 * 4
