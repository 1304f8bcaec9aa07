"""The tables of a study: one line per run, and one per combination over its seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from troupe.figures import Figures, Spread, spread
from troupe.study import ALONE, Cell
from troupe.types import Scalar

NOTHING: Final = "-"


@dataclass(frozen=True)
class Result:
    """How far a cell has come."""

    cell: Cell
    state: str  # "ended", "failed", "refused", "interrupted" or "not run"
    why: str = ""  # of a cell that failed or was refused, in a sentence
    figures: Figures | None = None  # of one that ended


@dataclass(frozen=True)
class Row:
    """One combination over its seeds."""

    values: Mapping[str, Scalar]
    results: Sequence[Result]
    goal: bool  # there was a score to reach, so that a run that ended at a limit did not train to the end
    spreads: Mapping[str, Spread | None]

    @property
    def ended(self) -> list[Figures]:
        """Figures of the runs that ended."""
        return [result.figures for result in self.results if result.figures is not None]

    @property
    def solved(self) -> int:
        """Runs that met the goal."""
        return sum(figures.reason == "solved" for figures in self.ended)

    @property
    def state(self) -> str:
        """What is to be said of the runs that have no figures."""
        if any(result.state == "refused" for result in self.results):
            return f"refused: {self.results[0].why}"
        failures = [result for result in self.results if result.state == "failed"]
        said = [f"failed: {len(failures)} of {len(self.results)} ({failures[0].why})"] if failures else []
        missing = sum(result.state in ("not run", "interrupted") for result in self.results)
        return "; ".join(said + ([f"{missing} of {len(self.results)} not run yet"] if missing else []))


def rows(results: Iterable[Result], *, goal: bool) -> list[Row]:
    """The combinations in the order of the study, the reference above what is measured against it."""
    groups: dict[tuple[tuple[str, Scalar], ...], list[Result]] = {}
    for result in results:
        groups.setdefault(result.cell.group, []).append(result)
    made = [Row(dict(group), members, goal, _spreads(members, goal)) for group, members in groups.items()]
    algos = list(dict.fromkeys(row.values.get("algo") for row in made))
    made.sort(key=lambda row: (algos.index(row.values.get("algo")), row.values.get("scheme") != ALONE))
    times = {tuple(row.values.items()): _time(row) for row in made}
    return [_with_speed_ups(row, times) for row in made]


def _time(row: Row) -> Spread | None:
    """What a speed-up compares: the time to train, or, of runs that all last as long as they may, that of a step."""
    if row.goal:
        return row.spreads["train_s"]
    return spread([figures.seconds / figures.steps for figures in row.ended if figures.steps])


def _spreads(members: Sequence[Result], goal: bool) -> dict[str, Spread | None]:
    ended = [result.figures for result in members if result.figures is not None]
    cut = [goal and figures.reason != "solved" for figures in ended]

    def over(values: Iterable[float | None]) -> Spread | None:
        return spread([value for value in values if value is not None])

    found: dict[str, Spread | None] = {
        "train_s": spread([f.seconds for f in ended], cut),
        "train_s_of_solved": over(f.seconds for f in ended if goal and f.reason == "solved"),
        "episodes": spread([float(f.episodes) for f in ended], cut),
        "episode_s": over(f.episode_s for f in ended),
        "steps_per_s": over(f.steps_per_s for f in ended),
        "score": over(f.score for f in ended),
        "score_sd": over(f.score_sd for f in ended),
        "lag_median": over(f.lag_median for f in ended),
        "lag_p95": over(f.lag_p95 for f in ended),
    }
    for part in dict.fromkeys(part for f in ended for part in f.shares):
        found[f"share_{part}"] = over(f.shares.get(part, 0.0) for f in ended)
    return found


def _with_speed_ups(row: Row, times: Mapping[tuple[tuple[str, Scalar], ...], Spread | None]) -> Row:
    """Against one worker of the same algorithm and scheme, and against one process of that algorithm."""

    def against(**other: Scalar) -> Spread | None:
        mine = _time(row)
        reference = times.get(tuple({**row.values, **other}.items()))
        return reference.speed_up(mine) if reference and mine else None

    more = {"speed_up": against(workers=1), "speed_up_local": against(workers=1, scheme=ALONE)}
    return Row(row.values, row.results, row.goal, {**row.spreads, **more})


# As files ------------------------------------------------------------------------------------------------------------


def cells_csv(results: Sequence[Result]) -> str:
    """One line per run."""
    lines: list[dict[str, Any]] = []
    for result in results:
        line: dict[str, Any] = {"run": result.cell.name, **result.cell.values, "state": result.state, "why": result.why}
        f = result.figures
        if f is not None:
            line |= {
                "reason": f.reason, "episodes": f.episodes, "train_s": f.seconds, "episode_s": f.episode_s,
                "steps": f.steps, "steps_per_s": f.steps_per_s, "score": f.score, "score_sd": f.score_sd,
                "lag_median": f.lag_median, "lag_p95": f.lag_p95,
                **{f"share_{part}": share for part, share in f.shares.items()},
            }  # fmt: skip
        lines.append(line)
    return _csv(lines)


def table_csv(table: Sequence[Row]) -> str:
    """One line per combination; `_bound` says on which side of the median the true one lies, where it is not known."""
    lines: list[dict[str, Any]] = []
    for row in table:
        line: dict[str, Any] = {
            **row.values, "runs": len(row.results), "ended": len(row.ended), "solved": row.solved if row.goal else "",
        }  # fmt: skip
        for name, found in row.spreads.items():
            if found is not None:
                first, third = found.quartiles or ("", "")
                line |= {
                    f"{name}_median": found.median, f"{name}_bound": found.bound, f"{name}_min": found.low,
                    f"{name}_max": found.high, f"{name}_q1": first, f"{name}_q3": third,
                }  # fmt: skip
        lines.append({**line, "note": row.state})
    return _csv(lines)


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in line.items()} for line in lines)
    return text.getvalue()


COLUMNS: Final[tuple[tuple[str, str, int], ...]] = (  # name of the spread, head of its column, decimals
    ("train_s", "time to train, s", 1),
    ("train_s_of_solved", "of those solved, s", 1),
    ("episodes", "episodes to train", 0),
    ("episode_s", "s per episode", 4),
    ("speed_up", "speed-up", 2),
    ("speed_up_local", "over local", 2),
    ("steps_per_s", "steps/s", 0),
    ("score", "score", 1),
    ("score_sd", "sd", 1),
)


def table_md(title: str, table: Sequence[Row], notes: Sequence[str]) -> str:
    """The page for a person."""
    goal = any(row.goal for row in table)
    columns = [column for column in COLUMNS if goal or column[0] != "train_s_of_solved"]
    options = list(table[0].values) if table else []
    head = [*options, *(["solved"] if goal else []), *(title for _, title, _ in columns), "lag: median, p95", "time in"]
    lines = [[*map(str, row.values.values()), *_figures(row, columns, goal)] for row in table]
    said = [f"- {_words(row.values)}: {row.state}" for row in table if row.state]
    parts = [f"# {title}", _grid(head, lines), *(["\n".join(said)] if said else []), *notes]
    return "\n\n".join(parts) + "\n"


def _figures(row: Row, columns: Sequence[tuple[str, str, int]], goal: bool) -> list[str]:
    solved = [f"{row.solved} of {len(row.ended)}"] if goal else []
    lags = [row.spreads.get(name) for name in ("lag_median", "lag_p95")]
    lag = ", ".join(f"{found.median:.3g}" for found in lags if found) or NOTHING
    shares = {name: found.median for name, found in row.spreads.items() if found and name.startswith("share_")}
    parts = " ".join(f"{name.removeprefix('share_')} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return [*solved, *(text(row.spreads.get(name), digits) for name, _, digits in columns), lag, parts or NOTHING]


def text(found: Spread | None, digits: int) -> str:
    """12.3 (10.1 to 15.0), with the quartiles where there are any; > 60.0 where the median run was cut off."""
    if found is None:
        return NOTHING
    median = f"{found.bound} {found.median:,.{digits}f}".strip()
    if found.low == found.high:
        return median
    high = f"{'> ' if found.high_open else ''}{found.high:,.{digits}f}"
    inner = "" if found.quartiles is None else "; half in {:,.{d}f} to {:,.{d}f}".format(*found.quartiles, d=digits)
    return f"{median} ({found.low:,.{digits}f} to {high}{inner})"


def summary(row: Row) -> str:
    """A combination in one line of the terminal."""
    if not row.ended:
        return f"{_words(row.values)}: {row.state}"
    solved = f"solved {row.solved} of {len(row.ended)}, " if row.goal else ""
    speed = row.spreads["speed_up"]
    faster = f", speed-up {text(speed, 2)}" if speed is not None and row.values.get("workers") != 1 else ""
    rest = f"; {row.state}" if row.state else ""
    return f"{_words(row.values)}: {solved}{text(row.spreads['train_s'], 1)} s{faster}{rest}"


def _words(values: Mapping[str, Scalar]) -> str:
    names = {"algo": "{}", "scheme": "{}", "workers": "{} worker" if values.get("workers") == 1 else "{} workers"}
    return " ".join(names.get(name, f"{name} {{}}").format(value) for name, value in values.items())


def _grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([row(head), row(["---"] * len(head)), *map(row, lines)])
