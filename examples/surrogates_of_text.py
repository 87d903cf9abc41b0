"""Search attention targets for your own text classifier, and train towards them (SSA)."""

import torch
from torch import nn

from overt import losses, targets, words, wrap


class Classifier(nn.Module):
    """Your model: attention over the words of a sentence."""

    def __init__(self):
        super().__init__()
        self.embed, self.score, self.head = nn.Embedding(50, 16), nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, tokens):
        values = self.embed(tokens)
        weights = self.score(values).softmax(dim=1)  # one per word
        return self.head((weights * values).sum(dim=1))


torch.manual_seed(0)
tokens, labels = torch.randint(50, (32, 8)), torch.randint(2, (32,))
texts = [{"tokens": tokens[n], "labels": labels[n], "ids": f"text-{n}"} for n in range(32)]

# layers=[""] is the forward of the model itself; a model of Hugging Face needs only wrap(model)
call = lambda net, batch: net(batch["tokens"])  # noqa: E731
model = wrap(Classifier(), call=call, layout=words(8), layers=[""])
masks = targets.surrogate.RemoveWords()  # all pairs of words
found = targets.generate_surrogates(model.eval(), texts, "surrogates", masks)
balance = losses.LossBalancer(batches=1)
optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
for batch in torch.utils.data.DataLoader(texts, batch_size=16, shuffle=True):
    output = model(batch)
    task = losses.classification(output.prediction, batch["labels"])
    attention = losses.kl(output.attention_to("text"), found.target(batch["ids"]))
    loss = task + balance(task, attention)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"task {task.item():.3f}, attention {attention.item():.3f}")
