"""What a benchmark runs: one job per figure, contender and seed, in the order they are run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
RESULTS = Path("bench/results")  # all paths are below the repository root, where every job is started
RAW = RESULTS / "raw"

LUNAR, CARTPOLE = "LunarLander-v3", "CartPole-v1"
FIGURES = ("lunar", "quality", "cartpole", "speed", "start", "memory", "rllib")
QUALITY_EPISODES = 500
START_REPEATS = 3
SPEED_S = 30
MEMORY_S = 30


@dataclass(frozen=True)
class Options:
    """The choices of one benchmark."""

    figures: tuple[str, ...]
    only: tuple[str, ...]  # contenders, or the part of their names before the dash; empty for all
    seeds: int
    rllib_seeds: int
    cap_s: float
    cartpole_cap_s: float
    rllib_cap_s: float
    quality_at_s: tuple[int, ...]
    troupe_python: str

    def wants(self, contender: str) -> bool:
        """Say whether to run this contender."""
        return not self.only or contender in self.only or contender.split("-")[0] in self.only


@dataclass(frozen=True)
class Job:
    """One command that leaves one JSON file."""

    figure: str
    contender: str
    label: str  # what tells it from the contender's other jobs of this figure
    command: tuple[str, ...]  # without --out
    expected_s: float  # at most, evaluations included
    cap_s: float | None = None  # set when the job runs until solved
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the name of the job's file."""
        return f"{self.figure}-{self.contender}-{self.label}"

    @property
    def out(self) -> Path:
        """Return the job's file, below the repository root."""
        return RAW / f"{self.id}.json"


def peer_command(contender: str, env: str, seed: int, cap_s: float, *more: str) -> tuple[str, ...]:
    """Return the command that runs `sb3-ppo`, `rllib-impala` and the like."""
    peer, algo = contender.split("-")
    script = f"bench/peers/{peer}_run.py"
    numbers = ("--seed", str(seed), "--cap-s", f"{cap_s:g}")
    return (f".venv-{peer}/bin/python", script, "--algo", algo, "--env", env, *numbers, *more)


def troupe_command(options: Options, env: str, seed: int, cap_s: float, *more: str) -> tuple[str, ...]:
    """Return the command that runs Troupe and reads its metrics."""
    numbers = ("--seed", str(seed), "--cap-s", f"{cap_s:g}")
    return (options.troupe_python, "bench/troupe_run.py", "--env", env, *numbers, *more)


def until_solved(options: Options, figure: str, env: str, contenders: list[str], cap_s: float) -> Iterator[Job]:
    """Yield the time-to-solved jobs, seed by seed, so that a drift of the machine hits all contenders alike."""
    for seed in range(1, options.seeds + 1):
        for contender in contenders:
            command = (
                troupe_command(options, env, seed, cap_s)
                if contender == "troupe"
                else peer_command(contender, env, seed, cap_s)
            )
            yield Job(figure, contender, f"seed{seed}", command, 1.5 * cap_s + 30, cap_s)


def quality(options: Options) -> Iterator[Job]:
    """Yield the jobs that train for a fixed time; a peer's evaluation stops its clock, so one run gives all times."""
    episodes = ("--quality-episodes", str(QUALITY_EPISODES))
    longest = max(options.quality_at_s)
    for seed in range(1, options.seeds + 1):
        for at_s in options.quality_at_s:
            command = troupe_command(options, LUNAR, seed, at_s, *episodes)
            yield Job("quality", "troupe", f"{at_s}s-seed{seed}", command, at_s + 60)
        if seed == 1:  # beside it for orientation; a comparison would be figure 1
            moments = ("--quality-at", *map(str, options.quality_at_s))
            command = peer_command("sb3-ppo", LUNAR, seed, longest + 1, *moments, *episodes)
            yield Job("quality", "sb3-ppo", f"seed{seed}", command, longest + 90)


def speed(options: Options) -> Iterator[Job]:
    """Yield the jobs that compare the whole training loop with bare stepping."""
    yield Job("speed", "bare", "all", (options.troupe_python, "bench/bare.py"), 45)
    for env in (LUNAR, CARTPOLE):
        yield Job("speed", "troupe", env, troupe_command(options, env, 1, SPEED_S, "--no-stop"), SPEED_S + 15)
        command = peer_command("sb3-ppo", env, 1, SPEED_S, "--no-evaluate")
        yield Job("speed", "sb3-ppo", env, command, SPEED_S + 15)


def start(options: Options) -> Iterator[Job]:
    """Yield the jobs that measure the time from the command to the first environment step."""
    for repeat in range(1, START_REPEATS + 1):
        command = troupe_command(options, LUNAR, repeat, 3, "--no-stop")
        yield Job("start", "troupe", f"{repeat}", command, 20)
        for contender in ("sb3-ppo", "rllib-ppo"):
            command = peer_command(contender, LUNAR, repeat, 1, "--no-evaluate")
            yield Job("start", contender, f"{repeat}", command, 40)


def memory(options: Options) -> Iterator[Job]:
    """Yield the jobs that measure the peak memory of all processes of a default run."""
    minutes = f"minutes={MEMORY_S / 60:g}"
    troupe = str(Path(options.troupe_python).with_name("troupe"))
    commands: dict[str, tuple[str, ...]] = {
        "troupe": (troupe, "train", LUNAR, "--name", "bench", "--fresh", "--seed", "1", "--until", minutes)
    }
    for contender in ("sb3-ppo", "sb3-dqn", "rllib-ppo"):
        out = str(RAW / f"memory-{contender}-run.json")
        commands[contender] = peer_command(contender, LUNAR, 1, MEMORY_S, "--no-evaluate", "--out", out)
    for contender, command in commands.items():
        yield Job("memory", contender, "peak", command, MEMORY_S + 40, variables={"TROUPE_RUNS": ""})


def rllib(options: Options) -> Iterator[Job]:
    """Yield RLlib's jobs."""
    for seed in range(1, options.rllib_seeds + 1):
        for contender in ("rllib-ppo", "rllib-impala"):
            command = peer_command(contender, LUNAR, seed, options.rllib_cap_s)
            yield Job("rllib", contender, f"seed{seed}", command, 1.5 * options.rllib_cap_s + 40)


def jobs(options: Options) -> list[Job]:
    """Return every job of the chosen figures and contenders, in order."""
    lunar = ["troupe", "sb3-ppo", "sb3-a2c", "sb3-dqn"]
    figures: dict[str, Iterator[Job]] = {
        "lunar": until_solved(options, "lunar", LUNAR, lunar, options.cap_s),
        "quality": quality(options),
        "cartpole": until_solved(options, "cartpole", CARTPOLE, ["troupe", "sb3-ppo"], options.cartpole_cap_s),
        "speed": speed(options),
        "start": start(options),
        "memory": memory(options),
        "rllib": rllib(options),
    }
    chosen = [job for figure in options.figures for job in figures[figure]]
    return [job for job in chosen if job.contender == "bare" or options.wants(job.contender)]


def default_troupe_python() -> str:
    """Return the Python that Troupe is installed in: the repository's own environment, if there is one."""
    return ".venv/bin/python" if os.access(REPO / ".venv/bin/python", os.X_OK) else "python3"
