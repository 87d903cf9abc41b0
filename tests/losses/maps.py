"""Maps for testing losses: by hand, and random with masks, empty rows and several heads."""

from dataclasses import replace

import torch

from overt.attention import AttentionMap, Form, Kind, Layout, Span, words


def rows_of(*rows: list[float]) -> AttentionMap:
    """Make a map of one query per sample with these weights."""
    return AttentionMap.from_cells(torch.tensor(rows), words(len(rows[0])))


def random_map(b=3, l=2, h=2, q=4, k=5, seed=0, masked=True, kind=torch.float64) -> AttentionMap:
    """Make random scores and a mask that hides some keys, and all keys of one row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(b, l, h, q, k, generator=generator).to(kind)
    mask = torch.rand(b, q, k, generator=generator) < 0.7
    mask[:, :, 0] = True
    mask[0, 0] = False
    queries = Layout((Span("words", (q,), slice(0, q)),), q)
    return AttentionMap.from_scores(scores, words(k), queries, mask if masked else None)


def random_target(attention: AttentionMap, seed=1, heads=1) -> AttentionMap:
    """Make random amounts on visible keys for one or all heads; some rows are empty."""
    b, l, h, q, k = attention.values.shape
    l, h = (1, 1) if heads == 1 else (l, h)
    generator = torch.Generator().manual_seed(seed)
    amounts = torch.rand(b, l, h, q, k, generator=generator).to(attention.values.dtype)
    amounts = amounts * attention.visible[:, None, None]
    amounts = amounts * (torch.rand(b, 1, 1, q, 1, generator=generator) < 0.7)
    return replace(
        attention, values=amounts, kind=Kind.AMOUNT, form=Form.PLAIN, mask=None
    ).normalize()
