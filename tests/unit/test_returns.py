"""Each return is what the paper's formula says, and nothing flows where it must not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.returns import gae, n_step_returns, vtrace
from troupe.types import Array

GAMMA, LAM = 0.97, 0.9


@dataclass(frozen=True)
class Played:
    """A rollout as the returns see it; [T, B] each."""

    rewards: Array
    values: Array
    next_values: Array
    terminated: Array
    truncated: Array
    log_rhos: Array
    valid: Array

    @property
    def ended(self) -> Array:
        return self.terminated | self.truncated

    def n_step(self) -> Array:
        return n_step_returns(self.rewards, self.next_values, self.terminated, self.ended, gamma=GAMMA)

    def gae(self) -> Array:
        return gae(self.rewards, self.values, self.next_values, self.terminated, self.ended, gamma=GAMMA, lam=LAM)

    def vtrace(self, lam: float = LAM, rho_max: float = 1.3, c_max: float = 0.8) -> tuple[Array, Array]:
        return vtrace(
            self.log_rhos, self.rewards, self.values, self.next_values, self.terminated, self.ended,
            gamma=GAMMA, lam=lam, rho_max=rho_max, c_max=c_max,
        )  # fmt: skip

    def all(self) -> list[Array]:
        return [self.n_step(), self.gae(), *self.vtrace()]


def made(seed: int, length: int, batch: int, ends: float) -> Played:
    """Random numbers with the shape of a rollout under NEXT_STEP autoreset: the step after an end is not valid."""
    rng = np.random.default_rng(seed)
    shape = (length, batch)
    terminated, truncated = rng.random(shape) < ends, rng.random(shape) < ends
    valid = np.ones(shape, bool)
    for t in range(1, length):
        valid[t] = ~(valid[t - 1] & (terminated | truncated)[t - 1])
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
    values = rng.normal(size=shape)
    next_values = np.concatenate([values[1:], rng.normal(size=(1, batch))])
    next_values = np.where(terminated | truncated, rng.normal(size=shape), next_values)  # of the final observation
    return Played(rng.normal(size=shape), values, next_values, terminated, truncated, rng.normal(size=shape), valid)


rollouts = st.builds(
    made, st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.4, 1.0])
)


def last_of_episode(p: Played, t: int, b: int) -> int:
    """The step at which the episode of step t stops, or the rollout."""
    return next((k for k in range(t, len(p.rewards)) if p.ended[k, b]), len(p.rewards) - 1)


def after(p: Played, t: int, b: int) -> float:
    """V of what follows step t: nothing does after a termination."""
    return 0.0 if p.terminated[t, b] else float(p.next_values[t, b])


def slow_n_step(p: Played) -> Array:
    """R[t] = sum over k of gamma^k r[t+k], + gamma^n V (Mnih 2016, section 4)."""
    out = np.zeros_like(p.values)
    for t, b in np.ndindex(out.shape):
        last = last_of_episode(p, t, b)
        out[t, b] = sum(GAMMA ** (k - t) * p.rewards[k, b] for k in range(t, last + 1))
        out[t, b] += GAMMA ** (last - t + 1) * after(p, last, b)
    return out


def slow_gae(p: Played) -> Array:
    """A[t] = sum over l of (gamma lambda)^l delta[t+l] (Schulman 2016, eq. 16)."""
    out = np.zeros_like(p.values)
    for t, b in np.ndindex(out.shape):
        for k in range(t, last_of_episode(p, t, b) + 1):
            delta = p.rewards[k, b] + GAMMA * after(p, k, b) - p.values[k, b]
            out[t, b] += (GAMMA * LAM) ** (k - t) * delta
    return out


def slow_vtrace(p: Played, lam: float, rho_max: float, c_max: float) -> tuple[Array, Array]:
    """v[s] = V(x[s]) + sum over t of gamma^(t-s) (prod of c[i]) delta[t] (Espeholt 2018, eq. 1)."""
    ratios = np.exp(p.log_rhos)
    targets = p.values.copy()
    for s, b in np.ndindex(targets.shape):
        for t in range(s, last_of_episode(p, s, b) + 1):
            product = np.prod([lam * min(c_max, float(ratios[i, b])) for i in range(s, t)])
            delta = min(rho_max, float(ratios[t, b])) * (p.rewards[t, b] + GAMMA * after(p, t, b) - p.values[t, b])
            targets[s, b] += GAMMA ** (t - s) * product * delta
    advantages = np.zeros_like(targets)
    for s, b in np.ndindex(targets.shape):
        stops = p.ended[s, b] or s == len(targets) - 1
        following = after(p, s, b) if stops else targets[s + 1, b]
        advantages[s, b] = min(rho_max, float(ratios[s, b])) * (p.rewards[s, b] + GAMMA * following - p.values[s, b])
    return targets, advantages


@given(rollouts)
def test_n_step_returns_are_the_papers(p: Played) -> None:
    np.testing.assert_allclose(p.n_step(), slow_n_step(p), atol=1e-9)


@given(rollouts)
def test_gae_is_the_papers(p: Played) -> None:
    np.testing.assert_allclose(p.gae(), slow_gae(p), atol=1e-9)


@given(rollouts, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_vtrace_is_the_papers(p: Played, lam: float, rho_max: float, c_max: float) -> None:
    for fast, slow in zip(p.vtrace(lam, rho_max, c_max), slow_vtrace(p, lam, rho_max, c_max), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-9)


@given(rollouts)
def test_on_policy_vtrace_is_n_step_returns(p: Played) -> None:
    p = replace(p, log_rhos=np.zeros_like(p.log_rhos))
    targets, advantages = p.vtrace(lam=1.0, rho_max=1.0, c_max=1.0)
    np.testing.assert_allclose(targets, p.n_step(), atol=1e-9)
    np.testing.assert_allclose(advantages, p.n_step() - p.values, atol=1e-9)


@given(rollouts)
def test_gae_with_lambda_one_is_n_step_returns_minus_the_value(p: Played) -> None:
    advantages = gae(p.rewards, p.values, p.next_values, p.terminated, p.ended, gamma=GAMMA, lam=1.0)
    np.testing.assert_allclose(advantages, p.n_step() - p.values, atol=1e-9)


def test_truncation_bootstraps_and_termination_does_not() -> None:
    one, zero, no, yes = np.ones((1, 1)), np.zeros((1, 1)), np.zeros((1, 1), bool), np.ones((1, 1), bool)
    for terminated, expected in ((no, 1 + 0.5 * 8), (yes, 1.0)):
        assert n_step_returns(one, 8 * one, terminated, yes, gamma=0.5).item() == expected
        assert gae(one, zero, 8 * one, terminated, yes, gamma=0.5, lam=0.9).item() == expected
        targets, advantages = vtrace(zero, one, zero, 8 * one, terminated, yes, gamma=0.5)
        assert (targets.item(), advantages.item()) == (expected, expected)


@given(rollouts, st.data())
def test_nothing_flows_back_over_the_end_of_an_episode(p: Played, data: st.DataObject) -> None:
    ends = np.argwhere(p.ended)
    if not len(ends):
        return
    t, b = ends[data.draw(st.integers(0, len(ends) - 1))]
    other = replace(p, **{name: getattr(p, name).copy() for name in ("rewards", "values", "next_values", "log_rhos")})
    for array in (other.rewards, other.values, other.next_values, other.log_rhos):
        array[t + 1 :, b] += 5.0
    for before, now in zip(p.all(), other.all(), strict=True):
        np.testing.assert_array_equal(now[: t + 1, b], before[: t + 1, b])


@given(rollouts)
def test_reset_steps_influence_nothing_that_is_valid(p: Played) -> None:
    other = replace(p, **{name: getattr(p, name).copy() for name in ("rewards", "values", "next_values", "log_rhos")})
    for array in (other.rewards, other.values, other.next_values, other.log_rhos):
        array[~p.valid] += 50.0
    for before, now in zip(p.all(), other.all(), strict=True):
        np.testing.assert_array_equal(now[p.valid], before[p.valid])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_arrays_given_are_left_as_they_were(dtype: type) -> None:
    p = made(1, 6, 3, 0.4)
    fields = {name: getattr(p, name).astype(dtype) for name in ("rewards", "values", "next_values", "log_rhos")}
    p = replace(p, **fields)
    copies = {name: array.copy() for name, array in fields.items()}
    assert all(array.dtype == dtype for array in p.all())
    for name, array in copies.items():
        np.testing.assert_array_equal(getattr(p, name), array)
