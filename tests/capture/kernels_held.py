"""The kernels of a card against the plain way: by Triton's interpreter, or on the card itself."""

import pytest
import torch

from overt.capture import launching
from overt.capture import products as module
from overt.capture.products import log_shares, tap

pytestmark = pytest.mark.skipif(
    not launching.installed() or not (launching.INTERPRETED or torch.cuda.is_available()),
    reason="no card with Triton here, nor TRITON_INTERPRET=1",
)
DEVICE = "cpu" if launching.INTERPRETED else "cuda"
NEAR = {torch.float32: 2e-5, torch.float16: 5e-3}
HALF = torch.float16
if DEVICE == "cuda":  # numpy, in which kernels are interpreted, has no such numbers
    HALF = torch.bfloat16
    NEAR[HALF] = 3e-2


def make(groups=2, layers=3, dtype=torch.float32, width=24, length=90, turned=True):
    """Queries and keys as models have them: heads beside features in memory."""
    torch.manual_seed(0)

    def one(heads):
        made = torch.randn(2, length, heads, width, device=DEVICE).to(dtype).transpose(1, 2)
        return (made if turned else made.contiguous()).requires_grad_()

    return [one(4) for _ in range(layers)], [one(groups) for _ in range(layers)]


def both(monkeypatch, queries, keys, *given):
    """Log-shares and gradients by the kernels, and by plain operations in the same format."""
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(launching, "fit", lambda *_: False)
        logs = log_shares(queries, keys, *given)
        seen = logs.detach() > -torch.inf
        torch.manual_seed(1)
        weights = torch.randn(logs.shape, device=DEVICE)
        total = (weights * logs.masked_fill(~seen, 0)).sum()
        found.append((logs.detach(), torch.autograd.grad(total, [*queries, *keys])))
    return found


ROWS = {
    "positions": torch.tensor([[0, 7, 7, 80, 3], [4, 1, 3, -1, -1]]),
    "a slice": slice(2, 21),
    "one": torch.tensor([[5], [6]]),
    "every third": slice(1, 30, 3),
}
COLUMNS = {"all": slice(None), "some": slice(3, 70), "few": slice(10, 13)}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_kernels_give_what_plain_operations_give(monkeypatch, dtype, groups, rows, columns):
    at = ROWS[rows] if isinstance(ROWS[rows], slice) else ROWS[rows].to(DEVICE)
    queries, keys = make(groups, dtype=dtype)
    assert launching.fit(queries, keys, 19)
    (logs, slopes), (wanted, theirs) = both(
        monkeypatch, queries, keys, at, COLUMNS[columns], 24**-0.5
    )
    torch.testing.assert_close(logs, wanted, rtol=0, atol=NEAR[dtype])
    for one, two in zip(slopes, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("each", [True, False], ids=["a mask a row", "one for all rows"])
def test_hidden_keys_have_no_share_and_no_gradient(monkeypatch, each):
    queries, keys = make()
    visible = torch.rand(2, 5 if each else 1, 67, device=DEVICE) > 0.4
    visible[1, -1] = False  # a row that sees nothing
    at = ROWS["positions"].to(DEVICE)
    (logs, slopes), (wanted, theirs) = both(
        monkeypatch, queries, keys, at, slice(3, 70), 0.3, visible
    )
    assert torch.equal(logs == -torch.inf, wanted == -torch.inf)
    torch.testing.assert_close(logs, wanted, rtol=0, atol=2e-5)
    for one, two in zip(slopes, theirs, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5)


def test_gradients_are_added_where_attention_has_left_its_own():
    queries, keys = make(groups=4)
    found = []
    for through in (True, False):
        parts = [tap(q, k) if through else (q, k) for q, k in zip(queries, keys, strict=True)]
        taken = [[getattr(one, "tensor", one) for one in pair] for pair in parts]
        own = sum(
            torch.nn.functional.scaled_dot_product_attention(q, k, k).square().sum()
            for q, k in taken
        )
        logs = log_shares([p[0] for p in parts], [p[1] for p in parts], slice(0, 9), slice(3, 70))
        found.append(torch.autograd.grad(own + logs.square().mean(), [*queries, *keys]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_gradients_in_another_format_or_order_are_added_too():
    queries, keys = make(dtype=HALF, layers=1)
    at = torch.arange(5, device=DEVICE).expand(2, 5)
    layers = launching.Layers(
        *([one.detach() for one in each] for each in (queries, keys)), at, slice(3, 70), 1.0, None
    )
    logs = layers.log_shares()
    slopes = torch.randn_like(logs)
    _, sums = layers.of_rows(slopes, logs)
    wholes = [
        torch.ones_like(keys[0]),
        torch.ones_like(keys[0], dtype=torch.float32),
        torch.ones(2, 2, 24, 90, dtype=HALF, device=DEVICE).transpose(2, 3),
    ]
    for whole in wholes:
        layers.add_to_keys(0, slopes[0], logs[0], sums[0], whole)
    for whole in wholes[1:]:
        torch.testing.assert_close(whole.float(), wholes[0].float(), rtol=1e-2, atol=2e-2)


def test_a_second_derivative_is_left_to_plain_operations():
    queries, keys = make(layers=1, length=12, width=16)
    logs = log_shares(queries, keys, slice(0, 3), slice(2, 9))
    first = torch.autograd.grad(logs.square().sum(), queries, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), queries)[0]
    assert second.isfinite().all() and second.abs().sum() > 0


def test_what_the_kernels_do_not_know_goes_the_plain_way():
    queries, keys = make()
    assert launching.fit(queries, keys, launching.ROWS)
    assert not launching.fit(queries, keys, launching.ROWS + 1)
    assert not launching.fit([one.double() for one in queries], keys, 3)
    assert not launching.fit([queries[0], queries[1][:, :, :9]], keys[:2], 3)
    assert not launching.fit(*make(width=launching.WIDE + 1), 3)
    assert module.log_shares(queries, keys, slice(0, 70), slice(0, 9)).shape[3] == 70


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(slice(0, 0), slice(0, 5)), (slice(0, 3), slice(4, 4)), (slice(0, 3), slice(0, 9, 2))],
    ids=["no rows", "no keys", "every second key"],
)
def test_nothing_and_gaps_go_the_plain_way(rows, columns):
    queries, keys = make(layers=2)
    logs = log_shares(queries, keys, rows, columns)
    assert logs.shape[3:] == (len(range(90)[rows]), len(range(90)[columns]))
    none = [one[:0] for one in queries], [one[:0] for one in keys]
    assert log_shares(*none, slice(0, 3), slice(0, 9)).shape[1] == 0
