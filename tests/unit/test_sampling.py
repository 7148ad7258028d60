"""Sampling against an independent NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rl_core.rollout.sampling import Truncation, pick, sample, truncate, uniforms

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -2.0])
"""Softmax: 0.6364, 0.2341, 0.0861, 0.0317, 0.0117."""

CUTS = {
    "nothing": (1.0, 0, 0.0, 5),
    "top_k 2": (1.0, 2, 0.0, 2),
    "top_p 0.6, the first token reaches it": (0.6, 0, 0.0, 1),
    "top_p 0.87, two reach it": (0.87, 0, 0.0, 2),
    "top_p 0.88, three are needed": (0.88, 0, 0.0, 3),
    "top_p of what top_k left": (0.74, 2, 0.0, 2),
    "min_p 0.1 of the likeliest": (1.0, 0, 0.1, 3),
    "all three": (0.97, 4, 0.04, 4),
}


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = np.exp(x - x.max())
    return shares / shares.sum()


def truncation(top_p: float, top_k: int, min_p: float, n: int = 1) -> Truncation:
    return Truncation(row_M=np.arange(n), top_p_M=np.full(n, top_p, np.float32), top_k_M=np.full(n, top_k),
                      min_p_M=np.full(n, min_p, np.float32))


@pytest.mark.parametrize("case", CUTS)
def test_truncation_keeps_the_named_tokens_and_renormalises(case: str) -> None:
    top_p, top_k, min_p, kept = CUTS[case]
    order = np.array([3, 0, 4, 1, 2])  # the likeliest is not the first id
    shuffled = torch.tensor(LOGITS[order]).float().log_softmax(-1)[None]
    expected = np.full(5, -np.inf)
    expected[np.isin(order, np.arange(kept))] = np.log(softmax(LOGITS[:kept]))[order[order < kept]]
    np.testing.assert_allclose(truncate(shuffled, truncation(top_p, top_k, min_p))[0].numpy(), expected, atol=1e-6)


def test_rows_are_cut_each_by_its_own_settings() -> None:
    cut = Truncation(row_M=np.array([1, 3]), top_p_M=np.array([0.87, 1], np.float32), top_k_M=np.array([0, 1]),
                     min_p_M=np.zeros(2, np.float32))
    logits = torch.tensor(LOGITS).float().expand(4, -1)
    noise = np.array([0.95, 0.95, 0.999, 0.95])
    token, logprob = sample(logits, np.ones(4, np.float32), noise, cut)
    assert token.tolist() == [2, 1, 4, 0]
    whole, two = softmax(LOGITS), softmax(LOGITS[:2])
    np.testing.assert_allclose(logprob, np.log([whole[2], two[1], whole[4], 1]), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_and_logprobs_are_those_of_the_sampled_distribution(temperature: float) -> None:
    n = 20000
    logits = torch.tensor(LOGITS).float().expand(n, -1)
    noise = uniforms(np.arange(n).astype(np.uint64), np.full(n, 17))
    token, logprob = sample(logits, np.full(n, temperature, np.float32), noise, None)
    expected = softmax(LOGITS / temperature)
    np.testing.assert_allclose(np.bincount(token, minlength=5) / n, expected, atol=0.012)
    np.testing.assert_allclose(logprob, np.log(expected)[token], atol=1e-6)


def test_logprobs_of_a_cut_distribution_are_renormalised() -> None:
    n = 500
    logits = torch.tensor(LOGITS).float().expand(n, -1)
    noise = uniforms(np.arange(n).astype(np.uint64), np.zeros(n, np.int64))
    token, logprob = sample(logits, np.ones(n, np.float32), noise, truncation(1.0, 2, 0.0, n))
    assert set(token.tolist()) == {0, 1}
    np.testing.assert_allclose(logprob, np.log(softmax(LOGITS[:2]))[token], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 0.0, 0.0]])
    token, logprob = sample(logits, np.array([0, 1], np.float32), np.array([0.999, 0.999]), None)
    assert token.tolist() == [1, 2]
    np.testing.assert_allclose(logprob[0], np.log(softmax(np.array([0.0, 3.0, 3.0])))[1], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [58, 2048, 2049, 50000])
def test_pick_inverts_the_running_sum(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    shares = torch.softmax(3 * torch.randn(64, vocabulary, generator=generator), -1)
    shares[:, ::3] = 0  # tokens that were cut
    noise = torch.rand(64, generator=generator, dtype=torch.float64)
    noise[:2] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    token = pick(shares, noise)
    assert (shares.gather(-1, token[:, None]) > 0).all()
    sums = np.cumsum(shares.numpy().astype(np.float64), -1)
    expected = [int(np.searchsorted(row, u * row[-1], side="right"))
                for row, u in zip(sums, noise.tolist(), strict=True)]
    assert token.tolist() == expected


@pytest.mark.parametrize("vocabulary", [58, 5000])
def test_logits_that_are_not_finite_are_an_error_not_a_token(vocabulary: int) -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.full((2, vocabulary), torch.nan), np.ones(2, np.float32), np.array([0.1, 0.9]), None)


def test_noise_is_uniform_and_a_function_of_seed_and_place() -> None:
    seed, place = np.meshgrid(np.arange(200).astype(np.uint64), np.arange(200))
    noise = uniforms(seed.ravel(), place.ravel())
    assert noise.min() >= 0 and noise.max() < 1 and len(np.unique(noise)) == 40000
    assert abs(noise.mean() - 0.5) < 0.005 and abs(noise.var() - 1 / 12) < 0.002
    grid = noise.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert uniforms(np.array([5], np.uint64), np.array([9]))[0] == noise[9 * 200 + 5]
