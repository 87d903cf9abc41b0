"""Reference of the Triton kernels: the same steps in PyTorch operations, in any precision."""

import torch
from torch import Tensor


def list_kept(kept: Tensor) -> tuple[Tensor, ...]:
    """Return kept cells per sample, their cumulative sum, their flat indices and the inverse."""
    many = kept.sum(dim=1)
    at = kept.flatten().nonzero()[:, 0]
    place = torch.full((kept.numel(),), -1)
    place[at] = torch.arange(len(at))
    return many, many.cumsum(0), at, place


class AttentionLaunch:
    """`triton_launch._AttentionLaunch` without kernels, over kept rows only."""

    def __init__(
        self,
        cells: Tensor,
        weight: Tensor,
        listed: tuple[Tensor, ...],
        heads: int,
        scale: float,
    ) -> None:
        self.cells, self.weight, self.listed = cells, weight, listed
        self.heads, self.scale = heads, scale
        total = int(listed[1][-1])
        self.at = listed[2][:total].long()
        self.counts = listed[0].tolist()
        self.rows = cells.flatten(0, 1)[self.at].to(weight.dtype)

    def queries_and_keys(self) -> Tensor:
        return self.rows @ self.weight.mT

    def _samples(self, both: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Queries, keys, scores and cells of each sample."""
        found = []
        for x, one in zip(self.rows.split(self.counts), both.split(self.counts), strict=True):
            query, key = one.unflatten(1, (2, self.heads, -1)).permute(1, 2, 0, 3)
            found.append((query, key, query @ key.mT * self.scale, x))
        return found

    def levels(self, both: Tensor) -> tuple[Tensor, Tensor]:
        scores = [one[2] for one in self._samples(both)]
        return (
            torch.cat([one.logsumexp(dim=-1).mT for one in scores]),
            torch.cat([one.softmax(dim=-1).sum(dim=1).mT for one in scores]),
        )

    def mixes(self, share: Tensor) -> Tensor:
        pairs = zip(share.split(self.counts), self.rows.split(self.counts), strict=True)
        return torch.stack([own.mT.to(x.dtype) @ x for own, x in pairs])

    def of_both(self, above: Tensor, both: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        made = []
        for (query, key, scores, x), mixed in zip(self._samples(both), above, strict=True):
            looks = scores.softmax(dim=-1)
            gets = mixed @ x.mT  # heads and cells
            mean = (looks * gets[:, None]).sum(dim=-1, keepdim=True)
            of_score = looks * (gets[:, None] - mean) * self.scale
            sides = torch.stack([of_score @ key, of_score.mT @ query])
            made.append(sides.permute(2, 0, 1, 3).flatten(1))
        found = torch.cat(made)
        return found, found.mT.contiguous()

    def of_cells(self, of_both: Tensor, share: Tensor, above: Tensor) -> Tensor:
        owners = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        rows = of_both @ self.weight + (share[..., None] * above[owners]).sum(dim=1)
        found = torch.zeros_like(self.cells).flatten(0, 1)
        found[self.at] = rows.to(found.dtype)
        return found.unflatten(0, self.cells.shape[:2])

    def of_weight(self, turned: Tensor) -> Tensor:
        return turned @ self.rows
