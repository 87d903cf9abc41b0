"""Reference metrics of one sample in plain Python, from their definitions, without `overt`.

A row has a list of weights and a list of which keys are visible. A NaN or infinite weight makes
the whole row invisible. `None` is an undefined value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

TIE = 1e-6
ANY = -999.0  # a value that depends on how ties are broken
Number = float | None


@dataclass(frozen=True)
class Row:
    """Weights of one sample, its visible keys and, for a ground truth, the covered share."""

    weights: list[float]
    seen: list[bool]
    coverage: list[float] | None = None
    amount: bool = True

    @property
    def visible(self) -> list[bool]:
        fine = all(math.isfinite(w) for w, s in zip(self.weights, self.seen, strict=True) if s)
        return [s and fine for s in self.seen]

    @property
    def shown(self) -> list[float]:
        """Weights of the visible keys."""
        return [w for w, s in zip(self.weights, self.visible, strict=True) if s]

    def covered(self) -> list[float]:
        """Share of each key inside the region; 0 for invisible keys."""
        shown = zip(self.weights, self.visible, strict=True)
        values = [max(0.0, w) if s else 0.0 for w, s in shown]
        if self.coverage is not None:
            pairs = zip(self.coverage, self.visible, strict=True)
            return [min(1.0, max(0.0, c)) if s else 0.0 for c, s in pairs]
        largest = max(values)
        if self.amount:
            largest = max(largest, 1.0)
        return [v / largest if largest > 0 else 0.0 for v in values]


def both(ours: Row, truth: Row) -> tuple[list[float], list[float], list[float]]:
    """Weights, truth and covered share of the keys visible in both rows."""
    there = [a and b for a, b in zip(ours.visible, truth.visible, strict=True)]
    columns = zip(ours.weights, truth.weights, truth.covered(), there, strict=True)
    kept = [(a, t, c) for a, t, c, s in columns if s]
    return [a for a, _, _ in kept], [t for _, t, _ in kept], [c for _, _, c in kept]


def shares(weights: Sequence[float]) -> list[float] | None:
    positive = sum(w for w in weights if w > 0)
    if any(w < -1e-6 * positive for w in weights) or sum(weights) == 0:
        return None
    return [w / sum(weights) for w in weights]


# --- location


def pointing_game(ours: Row, truth: Row) -> Number:
    a, _, c = both(ours, truth)
    if not any(x > 0 for x in c) or not any(x != 0 for x in a):
        return None
    largest = max(a)
    near = largest - TIE * abs(largest)
    top = [share for weight, share in zip(a, c, strict=True) if weight >= near]
    return sum(top) / len(top)


def mass_inside(ours: Row, truth: Row) -> Number:
    a, _, c = both(ours, truth)
    if not any(x > 0 for x in c) or not any(x > 0 for x in a):
        return None
    parts = shares(a)
    return None if parts is None else sum(p * x for p, x in zip(parts, c, strict=True))


def overlap(found: Sequence[bool], covered: Sequence[float]) -> float:
    shared = sum(x for f, x in zip(found, covered, strict=True) if f)
    joint = sum(1.0 if f else x for f, x in zip(found, covered, strict=True))
    # a selected cell counts fully in the union, whatever share of it is covered
    return shared / joint if joint > 0 else 0.0


def iou(ours: Row, truth: Row, at: float = 0.5) -> Number:
    a, _, c = both(ours, truth)
    if not any(x > 0 for x in c) or not any(x != 0 for x in a):
        return None
    cut = max(0.0, at * max(a))
    return overlap([x > cut for x in a], c)


def mean_iou(ours: Row, truth: Row) -> Number:
    each = [iou(ours, truth, tenth / 10) for tenth in range(1, 10)]
    known = [one for one in each if one is not None]
    return sum(known) / 9 if len(known) == 9 else None


def cut_out(ours: Row, truth: Row) -> Number:
    found = iou(ours, truth)
    return None if found is None else float(found >= 0.5)


def otsu_jaccard(ours: Row, truth: Row) -> Number:
    a, _, c = both(ours, truth)
    if not any(x > 0 for x in c) or not any(x != 0 for x in a):
        return None
    low, high = min(a), max(a)
    if high - low <= TIE * max(abs(low), abs(high)):
        return overlap([True] * len(a), c)
    levels = [(x - low) / (high - low) for x in a]
    bins = [min(255, int(x * 256)) for x in levels]
    best, chosen = -1.0, 0
    for cut in range(255):  # the first of equal maxima
        under = [b for b in bins if b <= cut]
        over = [b for b in bins if b > cut]
        if not under or not over:
            continue
        apart = (sum(over) / len(over) - sum(under) / len(under)) / 256
        between = len(under) * len(over) * apart**2
        if between > best * (1 + 1e-11):
            best, chosen = between, cut
    return overlap([x > (chosen + 0.5) / 256 for x in levels], c)


# --- agreement


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def pearson(first: Sequence[float], second: Sequence[float]) -> Number:
    if not first or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    middle = [sum(side) / len(side) for side in (first, second)]
    x, y = ([v - m for v in side] for side, m in zip((first, second), middle, strict=True))
    scale = math.sqrt(sum(v * v for v in x) * sum(v * v for v in y))
    return sum(p * q for p, q in zip(x, y, strict=True)) / scale


def cc(ours: Row, truth: Row) -> Number:
    a, t, _ = both(ours, truth)
    return pearson(a, t)


def spearman(ours: Row, truth: Row) -> Number:
    a, t, _ = both(ours, truth)
    return pearson(ranks(a), ranks(t))


def kendall(ours: Row, truth: Row) -> Number:
    a, t, _ = both(ours, truth)
    more = tied = also = every = 0
    for i in range(len(a)):
        for j in range(i):
            x, y = (a[i] > a[j]) - (a[i] < a[j]), (t[i] > t[j]) - (t[i] < t[j])
            more, every = more + x * y, every + 1
            tied, also = tied + (x == 0), also + (y == 0)
    scale = math.sqrt((every - tied) * (every - also))
    return more / scale if scale > 0 else None


def divergence(first: Sequence[float], second: Sequence[float]) -> float:
    total = 0.0
    for p, q in zip(first, second, strict=True):
        if p > 0:
            total += math.inf if q == 0 else p * math.log(p / q)
    return max(0.0, total)


def distributions(ours: Row, truth: Row) -> tuple[list[float], list[float]] | None:
    a, t, _ = both(ours, truth)
    found = shares(a), shares(t)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def sim(ours: Row, truth: Row) -> Number:
    found = distributions(ours, truth)
    return None if found is None else sum(map(min, *found))


def kl(ours: Row, truth: Row) -> Number:
    found = distributions(ours, truth)
    return None if found is None else divergence(found[1], found[0])


def js(ours: Row, truth: Row) -> Number:
    found = distributions(ours, truth)
    if found is None:
        return None
    middle = [(p + q) / 2 for p, q in zip(*found, strict=True)]
    return (divergence(found[0], middle) + divergence(found[1], middle)) / 2


# --- words


def marked(ours: Row, truth: Row) -> tuple[list[float], list[bool]] | None:
    a, t, _ = both(ours, truth)
    if not any(x > 0 for x in t) or not any(x != 0 for x in a):
        return None
    return a, [x > 0 for x in t]


def token_auc(ours: Row, truth: Row) -> Number:
    found = marked(ours, truth)
    if found is None or all(found[1]):
        return None
    wins = [
        0.5 if a == b else float(a > b)
        for a, m in zip(*found, strict=True) if m
        for b, n in zip(*found, strict=True) if not n
    ]  # fmt: skip
    return sum(wins) / len(wins)


def selected(ours: Row, truth: Row) -> tuple[list[bool], list[bool]] | float | None:
    """Top keys, as many as are marked, and the marked keys; ANY if a tie is at the cut."""
    if not any(w != 0 for w in ours.shown):
        return None
    wanted = sum(t > 0 for t in truth.shown)
    order = sorted(ours.shown, reverse=True)
    if not 0 < wanted <= len(order):
        chosen = [s and wanted > 0 for s in ours.visible]
    else:
        least = order[wanted - 1]
        if wanted < len(order) and order[wanted] == least:
            return ANY
        chosen = [s and w >= least for w, s in zip(ours.weights, ours.visible, strict=True)]
    there = [a and b for a, b in zip(ours.visible, truth.visible, strict=True)]
    true = [t > 0 and s for t, s in zip(truth.weights, there, strict=True)]
    return [c and s for c, s in zip(chosen, there, strict=True)], true


def token_counts(ours: Row, truth: Row) -> tuple[int, int, int] | float | None:
    found = selected(ours, truth)
    if found is None or isinstance(found, float):
        return found
    chosen, true = found
    if not any(true):
        return None
    return sum(map(min, chosen, true)), sum(chosen), sum(true)


def of_counts(count: Callable, score: Callable[[int, int, int], Number]) -> Callable:
    def metric(ours: Row, truth: Row) -> Number:
        found = count(ours, truth)
        return found if found is None or isinstance(found, float) else score(*found)

    return metric


def runs(words: Sequence[bool]) -> list[set[int]]:
    found: list[set[int]] = []
    for at, word in enumerate(words):
        if word and at and words[at - 1]:
            found[-1].add(at)
        elif word:
            found.append({at})
    return found


def span_counts(ours: Row, truth: Row) -> tuple[int, int, int] | float | None:
    found = selected(ours, truth)
    if found is None or isinstance(found, float):
        return found
    chosen, true = runs(found[0]), runs(found[1])
    hits = [any(2 * len(one & other) >= len(one | other) for other in true) for one in chosen]
    return sum(hits), len(chosen), len(true)


def f1(both: int, ours: int, theirs: int) -> Number:
    return 2 * both / (ours + theirs) if theirs else None


SELECTED = {
    "token_f1": of_counts(token_counts, f1),
    "token_iou": of_counts(token_counts, lambda both, a, b: both / (a + b - both)),
    "token_precision": of_counts(token_counts, lambda both, a, b: both / a if a else None),
    "token_recall": of_counts(token_counts, lambda both, a, b: both / b),
    "span_f1": of_counts(span_counts, f1),
    "span_precision": of_counts(span_counts, lambda both, a, b: both / a if a else None),
    "span_recall": of_counts(span_counts, lambda both, a, b: both / b if b else None),
}


def points(ours: Row, truth: Row) -> list[tuple[float, float]] | None:
    """Recall and precision at each distinct weight, from the largest."""
    found = marked(ours, truth)
    if found is None:
        return None
    made = []
    for cut in sorted(set(found[0]), reverse=True):
        taken = [m for a, m in zip(*found, strict=True) if a >= cut]
        made.append((sum(taken) / sum(found[1]), sum(taken) / len(taken)))
    return made


def token_ap(ours: Row, truth: Row) -> Number:
    found = points(ours, truth)
    if found is None:
        return None
    before = [0.0, *(recall for recall, _ in found)]
    return sum((r - b) * p for (r, p), b in zip(found, before, strict=False))


def token_auprc(ours: Row, truth: Row) -> Number:
    found = points(ours, truth)
    if found is None:
        return None
    line = [(0.0, 1.0), *found]
    return sum((r - b) * (p + q) / 2 for (r, p), (b, q) in zip(line[1:], line, strict=False))


# --- shape


def entropy(ours: Row, truth: Row | None = None) -> Number:
    each = shares(ours.shown) if ours.shown else None
    if each is None:
        return None
    return max(0.0, -sum(p * math.log(p) for p in each if p > 0))


def effective_support(ours: Row, truth: Row | None = None) -> Number:
    each = shares(ours.shown) if ours.shown else None
    return None if each is None else max(1.0, 1 / sum(p * p for p in each))


def gini(ours: Row, truth: Row | None = None) -> Number:
    each = shares(ours.shown) if ours.shown else None
    if each is None:
        return None
    pairs = sum(abs(p - q) for p in each for q in each)
    return min(1.0, max(0.0, pairs / (2 * len(each))))


def hoyer(ours: Row, truth: Row | None = None) -> Number:
    each = shares(ours.shown) if ours.shown else None
    if each is None or len(each) < 2:
        return None
    root = math.sqrt(len(each))
    norm = math.sqrt(sum(p * p for p in each))
    return min(1.0, max(0.0, (root - sum(each) / norm) / (root - 1)))


CELLS: dict[str, Callable[[Row, Row], Number]] = {
    one.__name__: one
    for one in (
        pointing_game, mass_inside, iou, mean_iou, otsu_jaccard, cut_out, spearman, kendall, cc,
        sim, kl, js, entropy, effective_support, gini, hoyer,
    )
}  # fmt: skip
WORDS = {one.__name__: one for one in (token_auc, token_ap, token_auprc)} | SELECTED


# --- controls


def uniform(like: Row) -> Row:
    count = max(1, sum(like.seen))
    return Row([1 / count if s else 0.0 for s in like.seen], like.seen)


def centre(like: Row, shape: tuple[int, ...], spread: float = 0.25) -> Row:
    if len(shape) == 1:
        count, at, weights = sum(like.seen), 0, []
        for s in like.seen:
            at += s
            place = (2 * at - 1 - count) / (2 * max(1, count))
            weights.append(math.exp(-(place**2) / (2 * spread**2)) if s else 0.0)
        return Row(weights, like.seen)
    squares = [
        [Fraction(2 * n + 1 - side, 2 * side) ** 2 for n in range(side)] for side in shape
    ]  # exact, so that cells at the same distance tie
    weights = [math.exp(-float(y + x) / (2 * spread**2)) for y in squares[0] for x in squares[1]]
    return Row([w if s else 0.0 for w, s in zip(weights, like.seen, strict=True)], like.seen)
