"""Sampling against transformers' own warpers and against frequencies."""

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from recipes.pipeline.config import GenerateConfig
from recipes.pipeline.sampling import Sampler, draw, prompt_seed, uniform_rows

SCORES = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3


def expected_shares(scores, options):
    scores = TemperatureLogitsWarper(options.temperature)(None, scores)
    if options.top_k:
        scores = TopKLogitsWarper(options.top_k)(None, scores)
    if options.top_p < 1:
        scores = TopPLogitsWarper(options.top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.8, 10, 0.9)]
)
def test_every_token_comes_as_often_as_transformers_warpers_say(temperature, top_k, top_p):
    options = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    steps = 20000
    wanted = expected_shares(SCORES, options)
    even = (torch.arange(steps) + 0.5) / steps  # instead of random numbers: frequencies without noise
    for row in range(4):
        drawn = draw(SCORES[row : row + 1].expand(steps, -1), options, even.unsqueeze(1))
        found = torch.bincount(drawn, minlength=50) / steps
        torch.testing.assert_close(found, wanted[row], rtol=0, atol=2 / steps)
        assert found[wanted[row] == 0].sum() == 0


def test_repetition_penalty_is_transformers_own_and_covers_prompt_and_new_tokens():
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
    options = GenerateConfig(repetition_penalty=1.7, max_new_tokens=3)
    sampler = Sampler(options, prompts, [0] * 4, 50)
    seen = torch.tensor(prompts)
    for _ in range(3):
        wanted = RepetitionPenaltyLogitsProcessor(1.7)(seen, SCORES.clone()).argmax(-1)
        found = sampler(SCORES)
        assert torch.equal(found, wanted)
        seen = torch.cat((seen, found.unsqueeze(1)), dim=1)


def test_numbers_of_a_prompt_depend_on_its_seed_only():
    one = uniform_rows([5], 40)
    assert torch.equal(uniform_rows([9, 5, 7], 40)[1], one[0])
    for fewer in (3, 16, 20):
        assert torch.equal(uniform_rows([5], fewer)[0], one[0, :fewer])
    assert len({prompt_seed(42, n) for n in range(1000)} | {prompt_seed(43, n) for n in range(1000)}) == 2000


def test_rows_that_are_left_behind_take_their_numbers_along():
    options = GenerateConfig(temperature=1.0, max_new_tokens=4, repetition_penalty=1.2)
    whole = Sampler(options, [[1], [2], [3], [4]], [1, 2, 3, 4], 50)
    cut = Sampler(options, [[1], [2], [3], [4]], [1, 2, 3, 4], 50)
    first = whole(SCORES), cut(SCORES)
    assert torch.equal(*first)
    rows = torch.tensor([3, 1])
    cut.keep(rows)
    assert torch.equal(whole(SCORES)[rows], cut(SCORES[rows]))


def test_greedy_is_the_likeliest_token_and_a_cold_draw_too():
    assert torch.equal(Sampler(GenerateConfig(), [[1]] * 4, [0] * 4, 50)(SCORES), SCORES.argmax(-1))
    cold = Sampler(GenerateConfig(temperature=1e-4), [[1]] * 4, [0] * 4, 50)(SCORES)
    assert torch.equal(cold, SCORES.argmax(-1))
