"""Attention-Aligned Transformer: caption sampling, on a GPU in a CUDA graph.

A small captioner launches some hundred kernels per token, so launch overhead dominates.
Self-critical training and validation generate captions of the same shapes again and again, which a
CUDA graph replays.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from overt.data.batch import Batch
from overt.nn.captioning.captioner import Memory
from overt.nn.captioning.decoding import (
    DecodingRules,
    GeneratedTexts,
    beam_search_all,
    greedy,
    sample,
    sample_with_greedy,
)
from overt.papers.a2.config import A2Baseline, A2Critic, A2Sampling
from overt.papers.a2.model import CaptionerNet
from overt.train.cuda_graph import CaptureFunction, GraphCapture, GraphedFunction

CaptionSampler = Callable[[Memory], tuple[GeneratedTexts, ...]]


def greedy_sampler(model: CaptionerNet, rules: DecodingRules) -> CaptionSampler:
    """Return a sampler of the greedy caption of every image."""
    return lambda memory: (greedy(model, _placeholder_batch(memory), rules, memory),)


def training_sampler(model: CaptionerNet, critic: A2Critic, rules: DecodingRules) -> CaptionSampler:
    """Return the sampler of the critic; greedy captions come first if they are the baseline."""
    draws, against_greedy = critic.draws, critic.baseline is A2Baseline.GREEDY

    def best(memory: Memory) -> tuple[GeneratedTexts, ...]:
        found = beam_search_all(model, _placeholder_batch(memory), draws, rules, memory)
        return (*greedy_sampler(model, rules)(memory), found) if against_greedy else (found,)

    def with_greedy(memory: Memory) -> tuple[GeneratedTexts, ...]:
        drawn, alone = sample_with_greedy(model, _placeholder_batch(memory), draws, rules, memory)
        return alone, drawn

    def by_chance(memory: Memory) -> tuple[GeneratedTexts, ...]:
        return (sample(model, _placeholder_batch(memory), draws, rules=rules, features=memory),)

    if critic.written is A2Sampling.BEAMS:
        return best
    return with_greedy if against_greedy else by_chance


def _placeholder_batch(memory: Memory) -> Batch:
    """Return a batch of the right length: decoders read nothing else when given the memory."""
    return Batch(("",) * len(memory), features=memory.states)


def _without_attention(texts: tuple[GeneratedTexts, ...]) -> tuple[GeneratedTexts, ...]:
    """Drop the attention maps."""
    return tuple(replace(one, attention=()) for one in texts)


def graphed_sampler(
    write: CaptionSampler, capture: CaptureFunction[tuple[GeneratedTexts, ...]] | None = None
) -> CaptionSampler:
    """Run a sampler in CUDA graphs, one per shape of the memory.

    The first call with a shape runs eagerly. Texts are padded to the maximum length and have no
    attention; each call overwrites the texts of the previous one.
    """
    graphed: GraphedFunction[Memory, tuple[GeneratedTexts, ...]] = GraphedFunction(
        lambda memory: _without_attention(write(memory)),
        (),
        capture or GraphCapture().capture,
        warmup=1,
    )
    # Only tokens are used: the loss computes the log-probabilities again, with gradients.
    return torch.no_grad()(graphed)
