"""Training over a real RabbitMQ node of its own: the algorithms, the queue's bound, two runs at once, the fixed rule.

    python bench/rabbit.py                         everything, about half an hour on two cores; close all else
    python bench/rabbit.py --only elite,ppo     only these

Broker, learner and workers share this machine. Each job leaves a file in bench/results/rabbit/, and what is there is
not run again (`--again` does); the table is in bench/results/rabbit/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills import journal
from memory import rollup_bytes, tree
from troupe import broker
from troupe_run import troupe_command

RESULTS = Path(__file__).resolve().parent / "results" / "rabbit"
LUNAR, CARTPOLE = "LunarLander-v3", "CartPole-v1"
OVER = "--via rabbitmq"
SETTLE_S = 2.0
BOUND_MINUTES = 5
SLOW = "--envs 64 --workers 2 --rollout-steps 64 --round-episodes 20 --gradients 300 --batch 4096"  # learning, that is
FIXED = {  # the original's four experiments: shares of the goal from which an episode is taken, or cleaned
    "1": "--take 0 --clean -2 --seed 1 --until minutes=3",
    "2": "--take 0 --clean -2 --seed 2 --until minutes=1",
    "3": "--take 0.5 --clean -0.25 --until minutes=3",
    "4": "--take 0.75 --clean 0.75 --until minutes=1",
}
RANDOM = "--explorers 0.25 --temperature 100"  # some of its workers played at random


@dataclass(frozen=True)
class Job:
    """One file of results; runs with more than one command are at the same time."""

    group: str
    label: str
    commands: tuple[str, ...]  # what follows `troupe train`
    watch: bool = False  # the queue and every process's memory, once a second

    @property
    def out(self) -> Path:
        """Where its record is."""
        return RESULTS / f"{self.group}-{self.label}.json"


def jobs(seeds: int) -> list[Job]:
    """All there are, in the order in which they are run."""
    found = []
    for seed in range(1, seeds + 1):
        end = f"--seed {seed} --until solved,minutes=8"
        found += [
            Job("elite", f"lunar-{seed}", (f"{LUNAR} --algo elite --workers 1 {OVER} {end}",)),
            Job("elite", f"cartpole-{seed}", (f"{CARTPOLE} --algo elite --workers 1 {OVER} {end}",)),
        ]
        for via in ("shared", "rabbitmq"):  # in turn, so that a drift of the machine hits both
            found.append(Job("ppo", f"{via}-{seed}", (f"{LUNAR} --algo ppo --workers 1 --via {via} {end}",)))
    both = f"{LUNAR} --algo elite --workers 1 {OVER}", f"{CARTPOLE} --algo impala --scheme actor-learner {OVER}"
    found += [
        Job("both", str(seed), tuple(f"{run} --seed {seed}" for run in both)) for seed in range(1, min(seeds, 3) + 1)
    ]
    for algo in ("ppo", "impala", "dqn"):
        play = f"{LUNAR} --algo {algo} --scheme actor-learner --workers 2 {OVER} --until minutes=0.5"
        found.append(Job("starved", algo, (play,)))
    slow = f"{LUNAR} --algo elite {SLOW} {OVER} --queue 64"
    found += [
        Job("bound", "lossless", (f"{slow} --until minutes={BOUND_MINUTES}",), watch=True),
        Job("bound", "quick", (f"{LUNAR} --algo elite {SLOW.partition('--round')[0]} {OVER} --until minutes=0.5",)),
    ]
    rule = f"{LUNAR} --algo elite --rule fixed {RANDOM} --workers 1 {OVER}"
    found += [Job("fixed", name, (f"{rule} {options}",)) for name, options in FIXED.items()]
    return found


def run(job: Job, node: broker.Node) -> dict[str, Any]:
    """Its commands, at once; what their journals say."""
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as folder, ExitStack() as stack:
        environment = os.environ | {"TROUPE_RUNS": folder, "TROUPE_BROKER": node.address}
        begun = [
            stack.enter_context(
                subprocess.Popen(
                    [troupe_command(), "train", *shlex.split(words), "--name", f"run-{number}", "--quiet"],
                    env=environment, stdin=subprocess.DEVNULL, start_new_session=True,
                )
            )
            for number, words in enumerate(job.commands)
        ]  # fmt: skip
        paths = [Path(folder) / f"run-{number}" / "metrics.jsonl" for number in range(len(begun))]
        memory = watched(begun, os.getpid()) if job.watch else None
        for process in begun:
            process.wait(timeout=3600)
        records = [read(path) for path in paths]
    for record, words, process in zip(records, job.commands, begun, strict=True):
        record |= {"command": f"troupe train {words}", "exit_code": process.returncode}
    return {"runs": records, **({"memory": memory} if memory else {})}


def watched(begun: list[subprocess.Popen[bytes]], root: int) -> dict[str, Any]:
    """Every process's memory while they run, the broker's included: MiB, and MiB a minute from the second one on."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    members: set[int] = set()
    start = time.monotonic()
    while any(process.poll() is None for process in begun):
        members = tree(root, members) - {root}
        for pid in members:
            if rss := rollup_bytes(pid)[1]:
                series[f"{name_of(pid)} {pid}"].append(((time.monotonic() - start) / 60, rss / 2**20))
        time.sleep(1.0)
    end = (time.monotonic() - start) / 60
    rows = {}
    for name, points in series.items():
        late = [(minute, mib) for minute, mib in points if 1 <= minute <= end - 0.1]
        if len(late) > 60:  # of those that lived through it
            minutes, mib = zip(*late, strict=True)
            slope = statistics.linear_regression(minutes, mib).slope
            rows[name] = {
                "first_mib": round(mib[0], 1),
                "last_mib": round(mib[-1], 1),
                "mib_per_minute": round(slope, 2),
            }
            rows[name]["series"] = [round(one) for one in mib[::15]]
    return rows


def name_of(pid: int) -> str:
    """What a process is called."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def read(path: Path) -> dict[str, Any]:
    """A run's figures, from its journal."""
    events = journal(path)
    of = {kind: [e for e in events if e["kind"] == kind] for kind in ("progress", "eval", "solved", "end", "rejected")}
    last, solved, end = of["progress"][-1:], of["solved"], of["end"][-1:]
    carriers = [event["carrier"] for event in of["progress"] if "carrier" in event]
    shares = (last[0]["workers"].get("learner") or {}) if last else {}
    returns = [value for event in events if event["kind"] == "episodes" for value in event["returns"]]
    return {
        "solved_s": round(solved[0]["taken_s"], 2) if solved else None,
        "known_s": round(solved[0]["t"], 2) if solved else None,
        "steps": end[0]["steps"] if end else None, "steps_per_s": round(end[0]["steps_per_s"]) if end else None,
        "messages_per_s": round(end[0]["ledger"]["messages"] / max(end[0]["seconds"], 1e-9), 2) if end else None,
        "ledger": end[0]["ledger"] if end else None, "rejected": [event["why"] for event in of["rejected"]][:5],
        "learner": {part: shares.get(part) for part in ("learn", "parse", "wait", "send")},
        "best_eval": max((event["mean"] for event in of["eval"]), default=None),
        "last_eval": of["eval"][-1]["mean"] if of["eval"] else None,
        "last_returns_mean": round(statistics.fmean(returns[-1000:]), 1) if returns else None,
        "queue_most": max((c["ready"] + c["unacknowledged"] for c in carriers), default=None),
        "queue_bound": carriers[-1]["bound"] if carriers else None,
        "queue_polls": len(carriers), "rest_s_most": max((c["rest_s"] for c in carriers), default=None),
        "lost": carriers[-1]["lost"] if carriers else None,
        "duplicates": carriers[-1]["duplicates"] if carriers else None,
    }  # fmt: skip


def table(records: dict[str, dict[str, Any]]) -> str:
    """What there is, as Markdown."""
    lines = ["| what | figures |", "|---|---|"]

    def row(what: str, figures: str) -> None:
        lines.append(f"| {what} | {figures} |")

    for group, part, what in (
        ("elite", "lunar-", "LunarLander-v3 by elite over RabbitMQ, seconds to solved"),
        ("elite", "cartpole-", "CartPole-v1 by elite over RabbitMQ, seconds to solved"),
        *(("ppo", f"{via}-", f"LunarLander-v3 by ppo over {via}, seconds to solved") for via in ("shared", "rabbitmq")),
    ):  # fmt: skip
        found = {key: r["runs"][0] for key, r in records.items() if key.startswith(f"{group}-{part}")}
        if found:
            times = [one["solved_s"] for one in found.values()]
            median = statistics.median(time_s if time_s is not None else float("inf") for time_s in times)
            seeds = ", ".join("not" if time_s is None else f"{time_s:g}" for time_s in times)
            row(what, f"median {median:g} ({seeds})")
    for key, record in records.items():
        group, runs = key.partition("-")[0], record["runs"]
        if group == "both":
            row(f"two runs at once, {key}", "; ".join(f"{r['solved_s']} s, {len(r['rejected'])} refused" for r in runs))
        elif group in ("starved", "bound"):
            one = runs[0]
            shares = ", ".join(f"{part} {100 * share:.2g} %" for part, share in one["learner"].items() if share)
            row(
                f"{key}: learner's time", f"{shares}; {one['messages_per_s']} messages/s; queue at most "
                f"{one['queue_most']} of {one['queue_bound']}, lost {one['lost']}, {one['queue_polls']} polls"
            )  # fmt: skip
        elif group == "fixed":
            one = runs[0]
            figures = f"best evaluation {one['best_eval']:.0f}, last {one['last_eval']:.0f}"
            row(f"the fixed rule, experiment {key[-1]}", f"{figures}, mean of training {one['last_returns_mean']}")
    for key, record in records.items():
        for name, memory in record.get("memory", {}).items():
            row(
                f"{key}: RSS of {name}",
                f"{memory['first_mib']} to {memory['last_mib']} MiB, {memory['mib_per_minute']} a minute",
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is asked for and has not been run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups: elite, ppo, both, starved, bound, fixed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    planned = jobs(given.seeds)
    wanted = [job for job in planned if not given.only or job.group in given.only.split(",")]
    with tempfile.TemporaryDirectory(prefix="troupe-node-") as folder, broker.start(Path(folder) / "node") as node:
        for job in wanted:
            if job.out.exists() and not given.again:
                continue
            record = run(job, node)
            job.out.write_text(json.dumps(record, indent=1) + "\n")
            print(job.out.stem, [(r["solved_s"], r["best_eval"], r["steps"]) for r in record["runs"]], flush=True)
            time.sleep(SETTLE_S)
    records = {job.out.stem: json.loads(job.out.read_text()) for job in planned if job.out.exists()}
    (RESULTS / "table.md").write_text(table(records))


if __name__ == "__main__":
    main()
