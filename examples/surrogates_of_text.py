"""Search attention targets for your own text classifier, and train towards them (SSA)."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from overt import losses, targets, wrap

torch.manual_seed(0)
tokens, labels = torch.randint(5, 50, (32, 8)), torch.randint(2, (32,))
texts = [  # or a torch Dataset of such dictionaries
    {"input_ids": tokens[n], "labels": labels[n], "ids": f"text-{n}"} for n in range(32)
]
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = wrap(BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)))  # yours

masks = targets.surrogate.KeepWords(count=20)  # all pairs of words by default
found = targets.generate_surrogates(model.eval(), texts, Path("surrogates"), masks, batch=16)
balance = losses.LossBalancer(batches=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(texts, batch_size=16):
    output = model.train()(batch)
    attention = output.attention_to("text").over_heads()
    target = targets.match_keys(found.target(batch["ids"]), attention)
    task = losses.classification(output.prediction, batch["labels"])
    loss = task + balance(task, losses.mse(attention, target))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"task {task.item():.3f}")
