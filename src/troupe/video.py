"""Watch an agent: episodes of the reference environment as a video file, or in a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from troupe.api import Agent
from troupe.build import env_spec
from troupe.envs import make_reference
from troupe.errors import ConfigError, MissingExtra
from troupe.roles.evaluator import evaluation_seeds
from troupe.seeding import Seeds
from troupe.types import Array

MAX_STEPS = 20_000  # of an episode that no clock ends


def record(agent: Agent, episodes: int, out: Path, *, seed: int | None, greedy: bool) -> list[float]:
    """Write `episodes` episodes to `out`; their returns."""
    try:
        import imageio_ffmpeg
    except ImportError as e:
        raise MissingExtra("what writes video files", "video") from e
    env = make_reference(env_spec(agent.config), render_mode="rgb_array")
    returns: list[float] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        writer: Any = None
        fps = env.metadata.get("render_fps", 30)

        def keep() -> None:
            nonlocal writer
            frame = _frame(env.render(), agent.config.env)
            if writer is None:
                height, width = frame.shape[:2]
                writer = imageio_ffmpeg.write_frames(str(out), (width, height), fps=fps, macro_block_size=2)
                writer.send(None)
            writer.send(frame)

        returns = [*_episodes(agent, env, episodes, seed, greedy, keep)]
        if writer is not None:
            writer.close()
    finally:
        env.close()
    return returns


def show(agent: Agent, episodes: int, *, seed: int | None, greedy: bool) -> list[float]:
    """Play in a window, at the environment's own pace."""
    env = make_reference(env_spec(agent.config), render_mode="human")
    try:
        return [*_episodes(agent, env, episodes, seed, greedy, lambda: None)]
    finally:
        env.close()


def _episodes(
    agent: Agent, env: Any, episodes: int, seed: int | None, greedy: bool, each_frame: Callable[[], None]
) -> Iterator[float]:
    rng = Seeds(agent.config.seed).stream("play command") if seed is None else np.random.default_rng(seed)
    for episode_seed in evaluation_seeds(rng, episodes):
        observation, _ = env.reset(seed=episode_seed)
        each_frame()
        total = 0.0
        for _ in range(MAX_STEPS):
            observation, reward, terminated, truncated, _ = env.step(agent.act(observation, greedy=greedy))
            total += float(reward)
            each_frame()
            if terminated or truncated:
                break
        yield total


def _frame(frame: Any, name: str) -> Array:
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ConfigError(f"{name} draws no pictures (render_mode rgb_array): there is nothing to put into a video")
    height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2  # the codec wants even sizes
    return np.ascontiguousarray(frame[:height, :width], dtype=np.uint8)
