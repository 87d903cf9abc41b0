"""Answer questions from the six cells with the largest features (HAN), in your own VQA model."""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from overt import grid
from overt.nn import HardAttention, keep_top


class VQA(nn.Module):
    """Your model: a CNN, a question encoder, and hard attention between them."""

    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
        self.words, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True)
        self.attend = HardAttention(16, question=16, joint=32, selection=partial(keep_top, count=6))
        self.answer = nn.Linear(32, 5)

    def forward(self, images, questions):
        features = self.cnn(images)
        question = self.lstm(self.words(questions))[1][0][-1]
        cells, where = features.flatten(2).mT, grid(*features.shape[-2:])
        summary, attention = self.attend(cells, question, where)
        return self.answer(summary), attention


torch.manual_seed(0)
model = VQA()
images, questions = torch.rand(16, 3, 32, 32), torch.randint(0, 20, (16, 4))
answers, optimizer = torch.randint(0, 5, (16,)), torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    model.attend.advance(step / 3)
    logits, attention = model(images, questions)
    optimizer.zero_grad()
    cross_entropy(logits, answers).backward()
    optimizer.step()
print(attention, "cells kept:", int(attention.weights[0].sum()))
