"""Add learned attention (LTPA) to your own CNN, with a learning rate of its own."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import overt

torch.manual_seed(0)
down = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
cnn = nn.Sequential(*down, nn.AdaptiveAvgPool2d(1), nn.Flatten())  # yours
images, labels = torch.rand(48, 3, 32, 32), torch.randint(0, 3, (48,))

net = overt.nn.attach(cnn, classes=3, levels=("1", "3"), size=(32, 32))  # outputs of the two ReLUs
old = {id(parameter) for parameter in net.backbone.parameters()}
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in net.parameters() if id(p) in old], "lr": 1e-4},
        {"params": [p for p in net.parameters() if id(p) not in old], "lr": 1e-3},
    ]
)
for rows in torch.randperm(48).split(16):
    loss = cross_entropy(net(images[rows]).prediction, labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

coarse = net.eval()(images[:1]).attention[-1]  # one map per level
print(coarse)
coarse.save("map.png", (255 * images[0]).byte().permute(1, 2, 0).numpy())
net.save_pretrained("net")
again = overt.nn.AttachedAttention.from_pretrained("net", backbone=cnn).eval()
assert torch.equal(again(images).prediction, net(images).prediction)
