"""Supervise the heads of BERT with rationales, in Hugging Face Trainer."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from overt import AttentionMap, losses, words
from overt.train import AttentionLossMixin, add_attention_loss, label_loss

COUNT = 6  # tokens of a text
torch.manual_seed(0)
tokens = torch.randint(5, 20, (8, COUNT))
marked = torch.zeros(8, COUNT).scatter_(1, torch.randint(1, COUNT, (8, 1)), 1.0)  # the rationales
texts = [
    {"input_ids": tokens[n], "labels": tokens[n, 0] % 2, "target": marked[n]} for n in range(8)
]
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))  # yours


def attention_loss(trace, batch):
    """From the first token to the marked words, in every head of the last layer."""
    target = AttentionMap.from_cells(batch["target"], words(COUNT)).normalize()
    first = torch.zeros(len(batch["target"]), 1, dtype=torch.long)
    return losses.cross_entropy(trace.layer(-1).log_block(first, "text"), target)


class AttentionTrainer(AttentionLossMixin, Trainer):
    """Trainer that divides the attention loss by the number of texts with a rationale."""

    def rows(self, inputs):
        return inputs["target"].any(dim=-1).sum()


arguments = TrainingArguments(
    "run", max_steps=3, remove_unused_columns=False, logging_steps=1, report_to=[], use_cpu=True
)
with add_attention_loss(model, attention_loss, layout=words(COUNT), only=["target"]):
    trainer = AttentionTrainer(model, arguments, train_dataset=texts, compute_loss_func=label_loss)
    trainer.train()
print([log["attention_loss"] for log in trainer.state.log_history if "attention_loss" in log])
