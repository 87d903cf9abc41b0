"""Adversarial attacks: agreement with captum, a linear model by hand, and model state."""

from functools import partial

import pytest
import torch
from captum.robust import FGSM
from torch import nn

from overt.capture.eval_mode import eval_mode
from overt.metrics.robustness import (
    LEVELS,
    Attack,
    AttackResult,
    evaluate_attack,
    fgsm,
    fooling_rate,
    misclassification_margin,
    negative_log_odds,
    negative_logit,
    pgd,
)

EPS = 8 / 255


def random_images(count: int, generator: torch.Generator, low: float = 0.0) -> torch.Tensor:
    return low + (1 - 2 * low) * torch.rand(count, 3, 4, 4, generator=generator)


def network(scale: float = 1.0) -> nn.Sequential:
    """Return a small network with batch norm, dropout and one frozen parameter."""
    torch.manual_seed(3)
    made = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(96, 5),
    )
    made[5].weight.data *= scale
    made[0].bias.requires_grad_(False)
    return made


def attacks(seed: int = 0) -> dict[str, Attack]:
    generator = torch.Generator().manual_seed(seed)
    return {"fgsm": fgsm, "pgd": partial(pgd, generator=generator, steps=5, restarts=2)}


# --- fgsm


def test_fgsm_agrees_with_captum(generator):
    model = network().eval()
    images = random_images(20, generator)
    labels = model(images).argmax(dim=-1)
    theirs = FGSM(
        model, nn.CrossEntropyLoss(reduction="none"), lower_bound=0.0, upper_bound=1.0
    ).perturb(images.clone(), EPS, labels)
    torch.testing.assert_close(fgsm(model, images, labels, EPS), theirs)


def test_a_linear_model_is_fooled_exactly_at_small_margins(generator):
    """One step of eps reduces the margin of two classes by eps |w|_1 if no pixel is clipped."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    images = random_images(200, generator, low=0.1)
    with torch.no_grad():
        model[1].bias -= model(images).mean(dim=0)  # balanced classes
        first, second = model(images).unbind(dim=-1)
        reach = float((model[1].weight[0] - model[1].weight[1]).abs().sum())
    for eps in (1 / 255, 4 / 255, 16 / 255):
        expected = ((first - second).abs() < eps * reach).float()
        assert 0 < expected.mean() < 1
        assert torch.equal(fooling_rate(model, images, eps), expected)
        many = partial(pgd, generator=generator)
        assert torch.equal(fooling_rate(model, images, eps, many), expected), (
            "more steps do not help"
        )


@pytest.mark.parametrize("objective", [negative_log_odds, negative_logit, misclassification_margin])
def test_objectives_match_examples_by_hand(objective):
    logits, labels = torch.tensor([[2.0, 1.0, 0.0], [0.0, 5.0, 1.0]]), torch.tensor([0, 2])
    expected = {
        negative_log_odds: -logits.softmax(dim=-1)[[0, 1], [0, 2]].logit(),
        negative_logit: torch.tensor([-2.0, -1.0]),
        misclassification_margin: torch.tensor([-1.0, 4.0]),
    }
    torch.testing.assert_close(objective(logits, labels), expected[objective])


def test_large_logits_do_not_mask_the_gradient(generator):
    """Scaled logits give the same predictions, so a step must fool the same images."""
    images = random_images(100, generator)
    calm, sure = network().eval(), network(scale=3000.0).eval()
    sure[5].bias.data *= 3000
    labels = calm(images).argmax(dim=-1)
    margins = sure(images).topk(2).values.diff().abs()
    assert (margins > 17).float().mean() > 0.5, "the gradient of the cross-entropy would be zero"
    changed = fgsm(sure, images, labels, EPS) - images
    assert (changed != 0).flatten(1).any(dim=-1).all()
    before, after = fooling_rate(calm, images, EPS), fooling_rate(sure, images, EPS)
    assert 0.1 < before.mean() < 0.9
    assert abs(float(before.mean() - after.mean())) < 0.15, "the odds are of all other classes"
    by_margin = partial(fgsm, objective=misclassification_margin)
    assert torch.equal(*(fooling_rate(model, images, EPS, by_margin) for model in (calm, sure)))


def test_log_odds_gradients_are_parallel_to_cross_entropy_gradients(generator):
    logits = (5 * torch.randn(50, 6, generator=generator)).double().requires_grad_()
    labels = logits.argmax(dim=-1)
    (odds,) = torch.autograd.grad(negative_log_odds(logits, labels).sum(), logits)
    entropy = nn.functional.cross_entropy(logits, labels, reduction="sum")
    (slope,) = torch.autograd.grad(entropy, logits)
    others = 1 - logits.softmax(dim=-1).gather(-1, labels[:, None])
    torch.testing.assert_close(odds * others, slope)


# --- both


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_t_lt_12_zero_strength_fools_no_image(name, generator):
    images = random_images(30, generator)
    assert not fooling_rate(network(), images, 0.0, attacks()[name]).any()


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
@pytest.mark.parametrize("eps", LEVELS)
def test_t_lt_12_perturbations_stay_within_eps_and_range(name, eps, generator):
    model = network().eval()
    images = random_images(10, generator).round(decimals=1)  # some at 0 and at 1
    found = attacks()[name](model, images, model(images).argmax(dim=-1), eps)
    assert float((found - images).abs().max()) <= eps + 1e-7
    assert float(found.min()) >= 0 and float(found.max()) <= 1
    assert not found.requires_grad


def test_t_lt_12_fooling_compares_with_the_clean_prediction(generator):
    """A model with constant predictions is never fooled, even if it is always wrong."""
    stubborn = network()
    stubborn[5].weight.data *= 1e-6
    stubborn[5].bias.data = torch.tensor([0.0, 9, 0, 0, 0])
    images = random_images(20, generator)
    found = evaluate_attack(stubborn, images)
    assert not found.fooled.any() and (found.clean == 1).all()

    made = AttackResult((0.1, 0.2), torch.tensor([0, 1, 2]), torch.tensor([[0, 1, 2], [1, 1, 0]]))
    assert made.fooled.tolist() == [[0, 0, 0], [1, 0, 1]]


def test_stronger_attacks_and_more_steps_fool_more(generator):
    images = random_images(150, generator)
    model = network()
    one = evaluate_attack(model, images).fooled.mean(dim=-1)
    many = evaluate_attack(model, images, attack=partial(pgd, generator=generator)).fooled.mean(
        dim=-1
    )
    assert one[0] < one[-1] and 0 < one[1] < 1
    assert (many >= one - 0.02).all() and many.sum() > one.sum()


def test_restarts_fool_more_than_one_path(generator):
    """On a surface with many local maxima a single path ends at the next one."""
    images = random_images(100, generator)
    steep = torch.randn(48, generator=generator)

    def hills(x: torch.Tensor) -> torch.Tensor:
        height = (9 * x.flatten(1) * steep).sin().sum(dim=-1)
        return torch.stack([height, torch.full_like(height, -12.0)], dim=-1)

    labels = hills(images).argmax(dim=-1)

    def fooled(restarts: int) -> int:
        fixed = torch.Generator().manual_seed(1)
        found = pgd(hills, images, labels, 0.3, fixed, steps=1, restarts=restarts)
        return int((hills(found).argmax(dim=-1) != labels).sum())

    once, often = fooled(1), fooled(8)
    assert once > 0 and often > 2 * once


def test_attacks_depend_on_the_seed_and_not_on_portions(generator):
    images, model = random_images(23, generator), network()

    def run(seed: int, portion: int) -> torch.Tensor:
        fixed = torch.Generator().manual_seed(seed)
        attack = partial(pgd, generator=fixed, steps=2)
        with eval_mode(model):
            labels = model(images).argmax(dim=-1)
            parts = zip(images.split(portion), labels.split(portion), strict=True)
            return torch.cat([attack(model, some, wanted, EPS) for some, wanted in parts])

    torch.testing.assert_close(run(0, 23), run(0, 7), atol=1e-6, rtol=0)
    assert not torch.allclose(run(0, 23), run(1, 23))

    portions = [
        evaluate_attack(
            model,
            images,
            attack=partial(pgd, generator=torch.Generator().manual_seed(0)),
            portion=portion,
        ).predictions
        for portion in (23, 5)
    ]
    assert torch.equal(*portions)


# --- the user's model


def model_state(model: nn.Module) -> dict[str, object]:
    kept: dict[str, object] = {n: v.clone() for n, v in model.state_dict().items()}
    for name, part in model.named_modules():
        kept[f"mode {name}"] = part.training
        kept[f"hooks {name}"] = len(part._forward_hooks) + len(part._forward_pre_hooks)
    for name, value in model.named_parameters():
        kept[f"wanted {name}"] = value.requires_grad
        kept[f"gradient {name}"] = None if value.grad is None else value.grad.clone()
    return kept


def equal_states(first: dict[str, object], second: dict[str, object]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name])
        if isinstance(value, torch.Tensor)
        else value == second[name]  # type: ignore[arg-type]
        for name, value in first.items()
    )


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_state_is_restored(name, training, generator):
    model = network().train(training)
    model[1].eval()  # mixed modes, as with frozen batch norm
    model(random_images(4, generator)).sum().backward()
    before = model_state(model)
    images = random_images(9, generator)
    kept = images.clone()
    evaluate_attack(model, images, attack=attacks()[name])
    assert equal_states(before, model_state(model))
    assert torch.equal(images, kept) and not images.requires_grad and images.grad is None


def test_a_function_of_a_model_runs_in_eval_mode(generator):
    model = network().train()
    before = model_state(model)
    images = random_images(9, generator)

    def classify(x: torch.Tensor) -> torch.Tensor:
        return model(x * 2 - 1)

    with eval_mode(model):
        assert not any(part.training for part in model.modules())
        found = evaluate_attack(classify, images)
        assert torch.equal(found.clean, model(images * 2 - 1).argmax(dim=-1))
    assert equal_states(before, model_state(model))
    with pytest.raises(RuntimeError, match="broke"), eval_mode(model):
        raise RuntimeError("broke")
    assert equal_states(before, model_state(model))


def test_attacks_work_under_no_grad_and_inference_mode(generator):
    images, model = random_images(6, generator), network()
    expected = evaluate_attack(model, images).predictions
    with torch.no_grad():
        assert torch.equal(evaluate_attack(model, images).predictions, expected)
    with torch.inference_mode():
        assert torch.equal(evaluate_attack(model, images).predictions, expected)


# --- bad input


def test_normalized_images_and_invalid_levels_raise(generator):
    images = random_images(2, generator) * 4 - 2
    with pytest.raises(ValueError, match=r"0 to 1.* -"):
        evaluate_attack(network(), images)
    for levels in ((0.1, -0.1), ()):
        with pytest.raises(ValueError, match="levels"):
            evaluate_attack(network(), random_images(2, generator), levels)
    with pytest.raises(ValueError, match=r"steps.*0"):
        fooling_rate(
            network(), random_images(2, generator), EPS, partial(pgd, generator=generator, steps=0)
        )


def test_a_model_without_input_gradient_raises(generator):
    model = network()
    with pytest.raises(ValueError, match="no gradient"):
        evaluate_attack(lambda x: model((x * 255).byte().float()), random_images(2, generator))


def test_a_vgg_attention_model_can_be_attacked(generator):
    """Models of overt take a batch; the caller normalizes the images."""
    from overt.data.batch import Batch
    from overt.papers.ltpa.vgg import HEAD_ONLY, VGGAttention, VGGSizes

    model = VGGAttention(VGGSizes(3, 0.05, HEAD_ONLY))
    images = torch.rand(4, 3, 32, 32, generator=generator)

    def classify(x: torch.Tensor) -> torch.Tensor:
        ids = tuple(map(str, range(len(x))))
        return model(Batch(ids=ids, images=(255 * x - 110) / 70)).prediction

    with eval_mode(model):
        found = evaluate_attack(classify, images, (0.0, 0.3))
    assert not found.fooled[0].any()
    assert found.predictions.shape == (2, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_gpu_and_cpu_fool_the_same_images(name, generator):
    images = random_images(64, generator)
    here = fooling_rate(network(), images, EPS, attacks()[name])
    there = fooling_rate(network().cuda(), images.cuda(), EPS, attacks()[name])
    assert there.is_cuda
    assert float((here - there.cpu()).abs().mean()) < 0.05


def test_nan_predictions_give_nan_fooling(generator):
    images = random_images(3, generator)
    weight = torch.randn(48, 4, generator=generator)

    def classify(given: torch.Tensor) -> torch.Tensor:
        logits = given.flatten(1) @ weight
        return torch.where(torch.arange(len(given))[:, None] == 1, torch.nan, logits)

    found = evaluate_attack(classify, images)
    assert (found.clean == -1).tolist() == [False, True, False]
    assert fooling_rate(classify, images, EPS).isnan().tolist() == [False, True, False]
