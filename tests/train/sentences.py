"""Toy sentences, some with a target word, and a Trainer with a loss on the attention to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from overt.attention import AttentionMap, Layout, Span, words
from overt.capture.trace import AttentionTrace
from overt.losses import Loss, cross_entropy
from overt.train.integrations import AttentionLossMixin
from tests.nn import tiny

WORDS = 5
LAYOUT = Layout((Span("class", (1,), slice(0, 1)), Span("text", (WORDS,), slice(1, 6))), 6)
WEIGHT = 0.7


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight sentences of unequal length; three of them have a target word."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(at)
        target = torch.zeros(WORDS)
        if at in (1, 2, 6):
            target[at % 3] = 1
        mask = torch.ones(6, dtype=torch.long)
        mask[6 - at % 3 :] = 0
        return {
            "input_ids": torch.randint(1, 12, (6,), generator=generator),
            "attention_mask": mask,
            "labels": torch.tensor(at % 3),
            "target": target,
        }


def full_batch() -> dict[str, Tensor]:
    items = [Sentences()[at] for at in range(8)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def target_word_loss(trace: AttentionTrace, inputs: Mapping[str, Any]) -> Loss:
    """Loss on the attention of the last layer from the class token to the target word."""
    target = AttentionMap.from_cells(inputs["target"], words(WORDS)).normalize()
    log_attention = AttentionTrace([trace.calls[-1]], trace.layout).log_block("class", "text")
    return WEIGHT * cross_entropy(log_attention, target)


class Supervised(AttentionLossMixin, Trainer):
    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        return inputs["target"].any(dim=-1).sum()


def training_arguments(out: Path, batch: int, **more: Any) -> TrainingArguments:
    accumulate = more.pop("accumulate", 8 // batch)
    return TrainingArguments(
        str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
        max_steps=2, optim="sgd", learning_rate=0.02, lr_scheduler_type="constant",
        max_grad_norm=0.0, remove_unused_columns=False, logging_steps=1, report_to=[],
        save_strategy=more.pop("save_strategy", "no"), use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip


def bert(implementation: str = "sdpa") -> BertForSequenceClassification:
    """A tiny BERT without dropout."""
    model = tiny.bert(implementation)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
