"""Returns, advantages and targets: pure functions of arrays with time first, [T, B].

In all of them: `next_values[t]` is V of what really followed step t (the final observation where the episode ended
there); `terminated[t]` means that nothing follows, so it counts as 0; `ended[t]` is terminated or truncated: nothing
flows back over that line, a truncated step only bootstraps.
"""

from __future__ import annotations

import numpy as np

from troupe.types import Array


def n_step_returns(rewards: Array, next_values: Array, terminated: Array, ended: Array, *, gamma: float) -> Array:
    """R[t] = r[t] + gamma R[t+1], bootstrapped with V where the rollout or the episode stops; [T, B]."""
    returns = np.empty_like(next_values)
    bootstrap = next_values * ~terminated
    follows = bootstrap[-1]
    for t in range(len(rewards) - 1, -1, -1):
        follows = rewards[t] + gamma * np.where(ended[t], bootstrap[t], follows)
        returns[t] = follows
    return returns


def gae(
    rewards: Array, values: Array, next_values: Array, terminated: Array, ended: Array, *, gamma: float, lam: float
) -> Array:
    """Generalised advantage estimates (Schulman 2016): A[t] = sum over l of (gamma lam)^l delta[t+l]; [T, B]."""
    deltas = rewards + gamma * next_values * ~terminated - values  # delta[t], aligned with rewards[t]
    carry = gamma * lam * ~ended
    advantages = np.empty_like(deltas)
    follows = np.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        follows = deltas[t] + carry[t] * follows
        advantages[t] = follows
    return advantages


def vtrace(
    log_rhos: Array,
    rewards: Array,
    values: Array,
    next_values: Array,
    terminated: Array,
    ended: Array,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
) -> tuple[Array, Array]:
    """V-trace targets vs[t] and policy advantages (Espeholt 2018, eq. 1); log_rhos = log pi - log mu; [T, B] both."""
    ratios = np.exp(np.minimum(log_rhos, 80.0))  # clipped below anyway; float32 overflows above 88
    rhos, cs = np.minimum(ratios, rho_max), lam * np.minimum(ratios, c_max)
    deltas = rhos * (rewards + gamma * next_values * ~terminated - values)
    carry = gamma * cs * ~ended
    corrections = np.empty_like(deltas)  # vs[t] - V(s[t])
    follows = np.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        follows = deltas[t] + carry[t] * follows
        corrections[t] = follows
    targets = values + corrections
    next_targets = next_values.copy()  # vs[t+1]; at a stop only V is known
    next_targets[:-1] = np.where(ended[:-1], next_values[:-1], targets[1:])
    advantages = rhos * (rewards + gamma * next_targets * ~terminated - values)
    return targets, advantages
