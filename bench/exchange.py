"""What sharing costs one gradient: each scheme's exchange beside the plain optimiser step of `local`, in turn.

    python bench/exchange.py --out bench/results/exchange.json

One worker, nobody else on the vector: what is measured is the machinery, not the contention. Each turn makes a gradient
(A3C's, of 120 steps) and hands it over, as in a run; a parameter server is a process of its own, reached over shared
memory, and applies a gradient while the next one is made. Microseconds, medians over rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from troupe.algos.actor_critic import Samples
from troupe.build import build_algorithm
from troupe.commons import Commons, CommonsLock
from troupe.config import Config
from troupe.goal import Goal
from troupe.parts import Stage
from troupe.ports import Algorithm, Exchange
from troupe.pulse import Pulse
from troupe.resolve import resolve
from troupe.schemes.exchange import apply_here
from troupe.schemes.parameter_server import ParameterServer
from troupe.schemes.scheme import Who
from troupe.schemes.shared_memory import SharedMemoryExchange
from troupe.transports.shared import SharedHub, SharedMailbox

STEPS = 120
ENTER = "import json, sys; from troupe.parts import enter; enter(json.loads(sys.argv[1]), json.loads(sys.argv[2]))"


def pupil(config: Config) -> Algorithm:
    """The network of LunarLander's preset, 9,797 weights."""
    return build_algorithm(config, spaces.Box(-1, 1, (8,), np.float32), spaces.Discrete(4))


def batch() -> Samples:
    """What A3C learns from at once; of no meaning, but of the usual size."""
    numbers = np.random.default_rng(1)
    steps = [torch.from_numpy(numbers.standard_normal(STEPS).astype(np.float32)) for _ in range(3)]
    observations = torch.from_numpy(numbers.standard_normal((STEPS, 8)).astype(np.float32))
    return Samples(observations, torch.from_numpy(numbers.integers(4, size=STEPS)), *steps)


@contextmanager
def served(shards: int) -> Iterator[tuple[Exchange, Algorithm]]:
    """A worker's exchange with `shards` server processes."""
    config = resolve({"env": "LunarLander-v3", "algo": "a3c", "scheme": "parameter-server", "shards": shards})
    commons = Commons.create(pupil(config).parameters, 1 + shards)
    weights = 4 * len(commons.vector) + 8192
    spin_s = 500e-6 if 1 + shards <= (os.cpu_count() or 1) else 0.0  # as cast.py has it
    hubs = [SharedHub(2 * weights, {"weights": weights}, name=f"server-{i}", spin_s=spin_s) for i in range(shards)]
    books, processes = SharedHub(), []
    links = {}
    for hub in hubs:
        connection = hub.connect("worker-0")
        links[hub.name] = SharedMailbox(connection.spec, [os.dup(fd) for fd in connection.fds])
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(config, "bench", Goal(steps=1), 0, Path(folder), commons)
        for rank, hub in enumerate(hubs):
            lent, link, pulse = hub.lend(), books.connect(hub.name), Pulse.create()
            fds = [pulse.fd, commons.fd, *link.fds, *lent.fds]
            payload = {"role": "server", "rank": rank, "incarnation": 0, "stage": stage.plain()}
            payload |= {"links": [dict(link.spec)], "hub": lent.spec}
            command = [sys.executable, "-c", ENTER, json.dumps(payload), json.dumps(fds)]
            processes.append(subprocess.Popen(command, pass_fds=fds))
        who = Who("bench", "worker-0", 0, 0, lambda: None, Path(folder))
        exchange = ParameterServer().exchange(config, commons.seat(0), links, who)
        mine = pupil(config)
        exchange.begin(mine.parameters)
        try:
            yield exchange, mine
        finally:
            books.stop()
            for process in processes:
                process.wait(10)


def microseconds(exchange: Exchange, algorithm: Algorithm, times: int, *, with_gradient: bool) -> float:
    """Of one exchange, with the gradient before it or alone, over `times`."""
    samples, begin = batch(), time.perf_counter()
    for _ in range(times):
        if with_gradient:
            algorithm.gradient(samples)
        exchange(algorithm.parameters)
    return (time.perf_counter() - begin) / times * 1e6


def measure(rounds: int, times: int) -> dict[str, Any]:
    """Every scheme in every round."""
    torch.set_num_threads(1)
    config = resolve({"env": "LunarLander-v3", "algo": "a3c"})
    commons = {name: Commons.create(pupil(config).parameters, 1) for name in ("hogwild", "locked")}
    lock = CommonsLock(commons["locked"])
    with served(1) as one, served(4) as four:
        contenders: dict[str, tuple[Exchange, Algorithm]] = {
            "local": (apply_here, pupil(config)),
            "hogwild": (SharedMemoryExchange(commons["hogwild"].seat(0), 1, None), pupil(config)),
            "locked": (SharedMemoryExchange(commons["locked"].seat(0), 1, lock), pupil(config)),
            "parameter-server": one,
            "parameter-server, 4 shards": four,
        }
        took: dict[tuple[str, bool], list[float]] = {(name, way): [] for name in contenders for way in (True, False)}
        for _ in range(rounds + 1):
            for (name, way), each in took.items():
                each.append(microseconds(*contenders[name], times, with_gradient=way))
    figures = {}
    for (name, way), each in took.items():
        over = [a - b for a, b in zip(each[1:], took["local", way][1:], strict=True)]  # the first round warms up
        figure = {"us": round(statistics.median(each), 1), "over_local_us": round(statistics.median(over), 1)}
        figures[f"{name}, {'with the gradient before it' if way else 'alone'}"] = figure
    return figures


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--times", type=int, default=100)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    figures = measure(given.rounds, given.times)
    given.out.write_text(json.dumps(figures, indent=1) + "\n")
    for name, figure in figures.items():
        print(f"{name:<54} {figure['us']:7.1f} us a gradient, {figure['over_local_us']:+7.1f} over local")
    return 0


if __name__ == "__main__":
    sys.exit(main())
