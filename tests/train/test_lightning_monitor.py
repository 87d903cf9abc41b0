"""The Lightning callback, with the real Trainer."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from overt.train import AttentionMonitor, lightning_monitor

try:
    import lightning.pytorch as lightning
except ImportError as problem:
    lightning = None
    reason = f"lightning cannot be imported: {problem}"
else:
    reason = ""

pytestmark = [pytest.mark.long, pytest.mark.skipif(lightning is None, reason=reason)]
STATISTICS = ("entropy", "sink", "collapse", "sameness")


def make_module(fail_at=None):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def training_step(self, batch, index):
            if index == fail_at:
                raise ZeroDivisionError
            return self.encoder(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(module, folder, callback, **options):
    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[callback] if callback else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )
    data = torch.randn(12, 5, 8, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(data, batch_size=2))
    return trainer


def test_statistics_of_due_steps_are_logged_and_training_is_unchanged(tmp_path):
    watched, plain = make_module(), make_module()
    trainer = fit(watched, tmp_path, lightning_monitor(AttentionMonitor(every=3)))
    fit(plain, tmp_path, None)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(watched.state_dict()[name], value, rtol=0, atol=0)
    with open(Path(trainer.logger.log_dir, "metrics.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "3"]
    for row in rows:
        assert all(row[f"attention/{name}/encoder.self_attn"] for name in STATISTICS)
        assert 0 < float(row["attention/entropy/encoder.self_attn"]) <= 1
    assert not any(module._forward_pre_hooks for module in watched.modules())


def test_only_the_first_of_the_accumulated_batches_is_watched(tmp_path, monkeypatch):
    steps = []
    callback = lightning_monitor(AttentionMonitor(every=1))
    observe = AttentionMonitor.observe
    monkeypatch.setattr(
        AttentionMonitor, "observe", lambda self, model: steps.append(model) or observe(self, model)
    )
    module = make_module()
    callback.model = module.encoder
    fit(module, tmp_path, callback, accumulate_grad_batches=3)
    assert steps == [module.encoder] * 2


def test_a_failed_step_leaves_the_model_as_it_was(tmp_path):
    module = make_module(fail_at=0)
    with pytest.raises(ZeroDivisionError):
        fit(module, tmp_path, lightning_monitor())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in module.modules())


def test_without_lightning_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match="install lightning"):
        lightning_monitor()
