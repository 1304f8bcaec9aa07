"""Turn a benchmark's results into a Markdown page: every seed is shown, medians and ratios beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from plan import CARTPOLE, LUNAR, QUALITY_EPISODES, Job

Records = dict[str, dict[str, Any]]
NOTHING = "-"


def row(cells: Iterable[str]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)])


def seconds(value: float, cap_s: float) -> str:
    """Write a time to solved; infinity stands for not solved within the cap."""
    return f"> {cap_s:g}" if math.isinf(value) else f"{value:.1f}"


def ratio(value: float, reference: float, cap_s: float) -> str:
    """Write how many times as long as the reference; at least so many when the cap cut it off."""
    if math.isinf(reference) or reference <= 0:
        return NOTHING
    return f"> {cap_s / reference:.1f} x" if math.isinf(value) else f"{value / reference:.1f} x"


def time_to_solved(record: dict[str, Any], clock: str = "train_s") -> float:
    """Return the training seconds until solved, or infinity; by `wall_s` the time for evaluations counts as well."""
    return float(record[clock]) if record["solved"] else math.inf


def seed_cell(record: dict[str, Any] | None, cap_s: float) -> str:
    """Write one seed's result."""
    if record is None:
        return "not run"
    if "error" in record:
        return "failed"
    if record["solved"]:
        return seconds(time_to_solved(record), cap_s)
    best = record.get("best_mean")
    return f"> {cap_s:g} (best {best:.0f})" if best is not None else f"> {cap_s:g}"


def median_time(records: list[dict[str, Any] | None], seeds: int, clock: str = "train_s") -> float | None:
    """Return the median over all seeds: None when it is not known, infinity when it lies beyond the cap."""
    good = [record for record in records if record is not None and "error" not in record]
    times = [time_to_solved(record, clock) for record in good]
    if sum(map(math.isinf, times)) > seeds // 2:
        return math.inf
    return statistics.median(times) if len(times) == seeds else None


def solved_table(records: Records, planned: list[Job], figure: str, seeds: int) -> str:
    """Return the time-to-solved table of one environment."""
    jobs = [job for job in planned if job.figure == figure]
    contenders = list(dict.fromkeys(job.contender for job in jobs))
    cap_s = next(job.cap_s or 0.0 for job in jobs)
    of = {name: [records.get(job.id) for job in jobs if job.contender == name] for name in contenders}
    medians = {name: median_time(of[name], seeds) for name in contenders}
    known_s = {name: median_time(of[name], seeds, "wall_s") for name in contenders}
    rows = []
    for name in contenders:
        median, reference = medians[name], medians.get("troupe")
        known = [record for record in of[name] if record is not None and "error" not in record]
        steps = [record["env_steps"] for record in known if record["solved"]]
        rates = [record["steps_per_s"] for record in known]
        rows.append(
            [
                name,
                *_against(median, reference, cap_s),
                *(seed_cell(record, cap_s) for record in of[name]),
                *_against(known_s[name], known_s.get("troupe"), cap_s),
                f"{statistics.median(steps):,.0f}" if steps else NOTHING,
                f"{statistics.median(rates):,.0f}" if rates else NOTHING,
            ]
        )
    head = ["contender", "median s", "against Troupe", *(f"seed {n}" for n in range(1, seeds + 1))]
    text = grid([*head, "evaluations counted", "against Troupe", "steps to solved", "steps/s"], rows)
    if any(record is None for records_of in of.values() for record in records_of):
        text += "\n\n`not run`: so many seeds passed the cap that the median is known to lie beyond it, or not run yet."
    return text


def _against(median: float | None, reference: float | None, cap_s: float) -> tuple[str, str]:
    """Return a median, and how many times Troupe's it is."""
    return (
        NOTHING if median is None else seconds(median, cap_s),
        NOTHING if median is None or reference is None else ratio(median, reference, cap_s),
    )


def quality_table(records: Records, planned: list[Job]) -> str:
    """Return the table of returns after fixed training times."""
    rows = []
    jobs = [job for job in planned if job.figure == "quality"]
    for name in dict.fromkeys(job.contender for job in jobs):
        qualities = [records.get(job.id, {}).get("quality", {}) for job in jobs if job.contender == name]
        for at_s in sorted({int(at_s) for quality in qualities for at_s in quality}):
            found = [quality.get(str(at_s)) for quality in qualities]
            results = [result for result in found if result]
            if results:
                middle = f"{statistics.fmean(result['mean'] for result in results):.1f}"
                each = ", ".join(f"{result['mean']:.0f} ± {result['sd']:.0f}" for result in results)
                rows.append([name, f"{at_s} s", middle, each])
    return grid(["contender", "trained for", "mean over seeds", "each seed: mean ± sd"], rows)


def speed_table(records: Records) -> str:
    """Return the whole loop's speed beside bare stepping."""
    bare = records.get("speed-bare-all", {}).get("steps_per_s", {})
    rows = []
    for env in (LUNAR, CARTPOLE):
        rates: dict[str, float] = bare.get(env, {})
        best = max((rate for name, rate in rates.items() if name.startswith("envpool")), default=math.nan)
        rows += [[env, f"bare: {name}", f"{rate:,.0f}", f"{rate / best:.0%}"] for name, rate in rates.items()]
        for name in ("troupe", "sb3-ppo"):
            rate = records.get(f"speed-{name}-{env}", {}).get("steps_per_s")
            if rate:
                rows.append([env, f"training: {name}", f"{rate:,.0f}", f"{rate / best:.1%}"])
    return grid(["environment", "what", "steps/s", "of the fastest bare EnvPool"], rows)


def start_table(records: Records, planned: list[Job]) -> str:
    """Return the seconds from the command to the first environment step."""
    rows = []
    jobs = [job for job in planned if job.figure == "start"]
    for name in dict.fromkeys(job.contender for job in jobs):
        found = [records.get(job.id, {}).get("command_to_first_step_s") for job in jobs if job.contender == name]
        times = [value for value in found if value is not None]
        if times:
            rows.append([name, f"{statistics.median(times):.1f}", ", ".join(f"{value:.1f}" for value in times)])
    return grid(["contender", "median s", "each run"], rows)


def memory_table(records: Records, planned: list[Job]) -> str:
    """Return the peak memory of all processes together."""
    rows = []
    for job in planned:
        record = records.get(job.id, {})
        if job.figure == "memory" and "peak_pss_mib" in record:
            pss, rss = f"{record['peak_pss_mib']:,.0f}", f"{record['peak_rss_sum_mib']:,.0f}"
            rows.append([job.contender, pss, rss, f"{record['processes']}"])
    return grid(["contender", "peak PSS, MiB", "peak sum of RSS, MiB", "processes"], rows)


def rllib_table(records: Records, planned: list[Job]) -> str:
    """Return RLlib's results within its cap."""
    rows = []
    for job in planned:
        record = records.get(job.id)
        if job.figure == "rllib" and record is not None and "error" not in record:
            best = record["best_mean"]
            rows.append(
                [
                    f"{job.contender} {job.label}",
                    f"{record['train_s']:.1f} s" if record["solved"] else f"not within {record['cap_s']:g} s",
                    NOTHING if best is None else f"{best:.0f}",
                    f"{record['env_steps']:,}",
                    f"{record['steps_per_s']:,.0f}",
                    f"{record['command_to_first_step_s']:.1f}",
                ]
            )
    return grid(["contender", "solved", "best mean", "steps", "steps/s", "start s"], rows)


def conditions(results: dict[str, Any]) -> str:
    """Say on what and how disturbed the figures were measured."""
    machine = results["machine"]
    loads = [record["job"]["load_before"] for record in results["records"].values()]
    known: dict[str, str] = {}
    for record in results["records"].values():
        known |= {f"{record.get('peer', '')} {name}": version for name, version in record.get("versions", {}).items()}
    shown = ", ".join(f"{name} {version}".strip() for name, version in sorted(known.items()))
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['system']}. "
        f"Load average before a job: {max(loads, default=0.0):.2f} at most.\n\n"
        f"Versions: {shown or NOTHING}."
    )


def failures(records: Records) -> str:
    """List the jobs that failed."""
    lines = [f"- `{name}`: {record['error']}" for name, record in records.items() if "error" in record]
    return "\n".join(["## Failed", "", *lines, ""]) if lines else ""


def markdown(results: dict[str, Any], planned: list[Job]) -> str:
    """Return the whole page."""
    records: Records = results["records"]
    seeds: int = results["seeds"]
    sections: dict[str, tuple[str, Callable[[], str]]] = {
        "lunar": (
            f"{LUNAR}: training seconds until solved (200 over 100 reference episodes)",
            lambda: solved_table(records, planned, "lunar", seeds),
        ),
        "quality": (
            f"{LUNAR}: return over {QUALITY_EPISODES} reference episodes after a fixed time",
            lambda: quality_table(records, planned),
        ),
        "cartpole": (
            f"{CARTPOLE}: training seconds until solved (475 over 100 reference episodes)",
            lambda: solved_table(records, planned, "cartpole", seeds),
        ),
        "speed": ("Speed of the whole training loop", lambda: speed_table(records)),
        "start": ("Seconds from the command to the first environment step", lambda: start_table(records, planned)),
        "memory": ("Peak memory of all processes of a default run", lambda: memory_table(records, planned)),
        "rllib": (f"RLlib on {LUNAR}", lambda: rllib_table(records, planned)),
    }
    parts = [f"# Benchmark of {results['date']}", conditions(results)]
    for number, (figure, (title, write)) in enumerate(sections.items(), start=1):
        if any(job.figure == figure for job in planned):
            parts += [f"## {number}. {title}", write()]
    parts += [text for text in [failures(records)] if text]
    return "\n\n".join(parts).rstrip() + "\n"
