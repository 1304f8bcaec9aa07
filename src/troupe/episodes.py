"""Episodes: whole ones put together from rollouts, wherever their borders fall; and a memory of them that ages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from troupe.types import Array, Episodes, Rollout, State

_FIELDS = ("observations", "actions", "rewards")  # of an open episode
_KEPT = ("observations", "actions", "credits")


def most_steps(lanes: int, rollout_steps: int, episode_steps: int) -> int:
    """The most steps, of episodes that are kept up to `episode_steps`, that one rollout can bring to an end."""
    return lanes * (episode_steps + rollout_steps)


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode from its first step."""

    observations: Array  # [n, ...], o[t]
    actions: Array  # [n] or [n, A], what was done at o[t]
    rewards: Array  # [n] float32, what that brought
    score: float  # the sum of all its rewards, also of steps that were too many to keep

    def __len__(self) -> int:
        return len(self.rewards)


class Assembler:
    """Keeps what each lane played of its open episode. Of a long one only the first `most_steps` steps."""

    def __init__(self, lanes: int, most_steps: int) -> None:
        self.most_steps = most_steps
        self._pieces: list[list[tuple[Array, Array, Array]]] = [[] for _ in range(lanes)]  # observations, actions...
        self._kept = np.zeros(lanes, np.int64)  # steps in the pieces
        self._played = np.zeros(lanes, np.int64)  # steps of the open episode so far

    def add(self, rollout: Rollout, wanted: Array) -> list[Episode]:
        """Of the episodes that ended in `rollout` those that are `wanted`, [m] bool in the order in which they ended.

        The player that made the rollout counted them: where it began an episode anew, as it does when a run is resumed
        on environments that cannot be rebuilt, the pieces are of another episode, and are dropped.
        """
        ends = rollout.terminated | rollout.truncated  # [T, B]
        number = ends.cumsum().reshape(ends.shape) - 1  # of the episode that ended at t, b
        done: dict[int, Episode] = {}
        for lane in range(ends.shape[1]):
            begin = 0
            for end in np.flatnonzero(ends[:, lane]).tolist():
                self._grow(lane, rollout, begin, end + 1)
                i = int(number[end, lane])
                if wanted[i] and self._kept[lane] and self._played[lane] == rollout.episode_lengths[i]:
                    pieces = zip(*self._pieces[lane], strict=True)
                    observations, actions, rewards = (np.concatenate(part) for part in pieces)
                    done[i] = Episode(observations, actions, rewards, float(rollout.episode_returns[i]))
                self._pieces[lane], self._kept[lane], self._played[lane] = [], 0, 0
                begin = end + 1
            self._grow(lane, rollout, begin, len(ends))
        return [done[i] for i in sorted(done)]

    def _grow(self, lane: int, rollout: Rollout, begin: int, end: int) -> None:
        rows = begin + np.flatnonzero(rollout.valid[begin:end, lane])  # those not valid were reset, not played
        self._played[lane] += len(rows)
        rows = rows[: self.most_steps - self._kept[lane]]
        if len(rows):
            taken = (rollout.observations[rows, lane], rollout.actions[rows, lane], rollout.rewards[rows, lane])
            self._pieces[lane].append(taken)  # copies: a view would keep the whole rollout
            self._kept[lane] += len(rows)

    def state(self) -> State:
        """The pieces of all lanes, one after another."""
        arrays = {"kept": self._kept.copy(), "played": self._played.copy()}
        whole = [piece for pieces in self._pieces for piece in pieces]
        if whole:
            for name, parts in zip(_FIELDS, zip(*whole, strict=True), strict=True):
                arrays[name] = np.concatenate(parts)
        return State(arrays)

    def restore(self, state: State) -> None:
        """Hold again what `state` held; with another number of lanes every episode begins anew."""
        if len(state.arrays["kept"]) != len(self._kept):
            return
        self._kept, self._played = state.arrays["kept"].copy(), state.arrays["played"].copy()
        for lane, (kept, end) in enumerate(zip(self._kept, self._kept.cumsum(), strict=True)):
            self._pieces[lane] = []
            if kept:
                observations, actions, rewards = (state.arrays[name][end - kept : end] for name in _FIELDS)
                self._pieces[lane].append((observations, actions, rewards))


@dataclass(frozen=True, slots=True)
class Kept:
    """Steps of one episode, and when it was heard of."""

    observations: Array  # [n, ...]
    actions: Array  # [n] or [n, A]
    credits: Array  # [n] float32, the discounted rewards from there to the end
    score: float
    number: int  # episodes that had been heard of by then

    def __len__(self) -> int:
        return len(self.actions)


class EpisodeMemory:
    """The returns of recent episodes, kept or not, and the steps of those that were kept.

    What was kept is forgotten once `window` more episodes were heard of (None: never), and, the oldest first, where it
    would be more than `steps` steps.
    """

    def __init__(self, *, window: int | None, steps: int) -> None:
        self._window, self._most = window, steps
        self.returns: deque[float] = deque(maxlen=window or 0)  # without a window nobody asks for them
        self.kept: deque[Kept] = deque()
        self.heard = 0  # episodes so far
        self.steps = 0  # of what is kept

    def add(self, episodes: Episodes) -> None:
        """Hear of them; what is too old, or too much, goes."""
        self.heard += len(episodes.episode_returns)
        self.returns.extend(episodes.episode_returns.tolist())
        begin = 0
        for length, score in zip(episodes.lengths.tolist(), episodes.returns.tolist(), strict=True):
            rows = slice(begin, begin + length)
            observations, actions, credits = (getattr(episodes, name)[rows] for name in _KEPT)
            self.kept.append(Kept(observations, actions, credits, score, self.heard))
            begin += length
        self.steps += begin
        while self.kept and (self.steps > self._most or self._too_old(self.kept[0])):
            self.steps -= len(self.kept.popleft())

    def _too_old(self, one: Kept) -> bool:
        return self._window is not None and one.number <= self.heard - self._window

    def state(self) -> State:
        """All of it."""
        arrays = {
            "returns": np.array(self.returns, np.float64), "scores": np.array([k.score for k in self.kept], np.float64),
            "lengths": np.array([len(k) for k in self.kept], np.int64),
            "numbers": np.array([k.number for k in self.kept], np.int64),
        }  # fmt: skip
        if self.kept:
            arrays |= {name: np.concatenate([getattr(k, name) for k in self.kept]) for name in _KEPT}
        return State(arrays, {"heard": self.heard})

    def restore(self, state: State) -> None:
        """Hold again what `state` held."""
        arrays, self.heard, self.steps = state.arrays, int(state.values["heard"]), 0
        self.returns.clear()
        self.returns.extend(arrays["returns"].tolist())
        self.kept.clear()
        for length, score, number in zip(*(arrays[n].tolist() for n in ("lengths", "scores", "numbers")), strict=True):
            rows = slice(self.steps, self.steps + length)
            observations, actions, credits = (arrays[name][rows] for name in _KEPT)
            self.kept.append(Kept(observations, actions, credits, score, number))
            self.steps += length
