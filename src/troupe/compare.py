"""troupe compare: run every cell of a study one after another, each as an ordinary run, and write what came of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from troupe import charts, tables
from troupe.checkpoints import replace_file
from troupe.config import Config, nearest
from troupe.errors import ConfigError, MissingExtra
from troupe.figures import read_figures
from troupe.goal import parse_goal
from troupe.prepare import prepare
from troupe.resolve import hyper_class
from troupe.rundir import machine, package_versions
from troupe.schemes import SCHEMES
from troupe.signals import Signals
from troupe.study import Cell, Plan, StudyDir, study_dir
from troupe.tables import Result
from troupe.types import Scalar

OWN: Final = ("algo", "schemes", "workers", "seeds", "envs_per_worker", "name", "fresh", "quiet")
POLL_S: Final = 0.2  # between two looks for a signal while a cell runs
_PR_SET_PDEATHSIG: Final = 1


def plan(env: str | None, options: Mapping[str, Any], given: Mapping[str, Any]) -> Plan:
    """The study that the words of the command line ask for; `given` are its fixed options as values."""
    env = env or given.get("env")
    if env is None:
        raise ConfigError("no environment was named: troupe compare ENV, for example  troupe compare CartPole-v1")
    for one, many in (("scheme", "schemes"), ("seed", "seeds")):
        if one in options:
            raise ConfigError(f"troupe compare varies the {one}: give --{many} instead of --{one}")
    schemes = _words(options.get("schemes", ",".join(SCHEMES)))
    for scheme in schemes:
        if scheme not in SCHEMES:
            raise ConfigError(f"there is no scheme {scheme!r}{nearest(scheme, SCHEMES)} ('troupe list' names them all)")
    seeds = _count("seeds", options.get("seeds", "3"))
    algos = _words(options.get("algo", given.get("algo", "ppo")))
    more = _lists(options, algos)
    vary: dict[str, Sequence[Scalar]] = {
        "algo": algos,
        "scheme": schemes,
        "workers": sorted({_count("workers", n) for n in _words(options.get("workers", _up_to_cores()))}),
        **more,
        "seed": list(range(1, seeds + 1)),
    }
    own = {*OWN, *more}
    fixed = {name: str(value) for name, value in options.items() if name not in own}
    values = {name: value for name, value in given.items() if name not in own | {"scheme", "seed", "config"}}
    per_worker = _count("envs-per-worker", options["envs_per_worker"]) if "envs_per_worker" in options else 0
    if per_worker and "envs" in options:
        raise ConfigError("--envs and --envs-per-worker both say how many environments there are: give one of them")
    return Plan(env, vary, fixed, values, per_worker)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in str(text).split(",") if part.strip()))


def _lists(options: Mapping[str, Any], algos: Sequence[str]) -> dict[str, list[str]]:
    """The options that were given several values: those with commas, where a single value has none."""
    owners: list[Any] = [Config, *map(hyper_class, algos)]
    kinds = {field.name: field.type for kind in owners for field in msgspec.structs.fields(kind)}
    return {
        name: _words(text)
        for name, text in options.items()
        if name in kinds and name not in OWN and "," in str(text) and _is_plain(kinds[name])
    }


def _is_plain(kind: Any) -> bool:
    """Whether a value of this type is written without a comma: a number, a flag, one of several words."""
    described = msgspec.inspect.type_info(kind)
    while isinstance(described, msgspec.inspect.Metadata):
        described = described.type
    plain = msgspec.inspect.IntType | msgspec.inspect.FloatType | msgspec.inspect.BoolType | msgspec.inspect.LiteralType
    return isinstance(described, plain)


def _count(option: str, text: str) -> int:
    if not str(text).isdecimal() or int(text) < 1:
        raise ConfigError(f"troupe compare: --{option} {text} is wrong: give 1 or more")
    return int(text)


def _up_to_cores() -> str:
    cores = len(os.sched_getaffinity(0))
    return ",".join(str(2**i) for i in range(cores.bit_length()))


def compare(plan: Plan, name: str, *, fresh: bool = False, show: bool = True) -> int:
    """Run what has not run yet of the study `name`; the exit code."""
    refused = {cell.name: plan.refusal(cell) for cell in plan.cells()}
    goal = _check(plan, [cell for cell in plan.cells() if not refused[cell.name]])
    folder = study_dir(name, plan)
    with folder.held(plan, fresh=fresh):
        return _Performance(plan, folder, refused, goal=goal, show=show).run()


def _check(plan: Plan, cells: Sequence[Cell]) -> bool:
    """Refuse now what every run of an algorithm would refuse; whether there is a score to reach."""
    if not cells:
        raise ConfigError(f"every combination is refused: {plan.refusal(plan.cells()[0])}")
    scored = False
    for cell in {cell.values["algo"]: cell for cell in reversed(cells)}.values():
        config = plan.config(cell)
        goal = parse_goal(config.until, 0.0)
        if goal.steps is None and goal.seconds is None:
            raise ConfigError(
                f"--until {config.until} has no limit, so a run that never gets there would hold up the study: add "
                "minutes=M or steps=N"
            )
        scored = prepare(config).goal.score is not None
    return scored


@dataclass
class _Performance:
    """One sitting of a study."""

    plan: Plan
    folder: StudyDir
    refused: Mapping[str, str]
    goal: bool
    show: bool

    def run(self) -> int:
        """Every cell that has not ended; tables after each, charts at the end."""
        cells, signals = self.plan.cells(), Signals()
        results = {cell.name: self._known(cell) for cell in cells}
        waiting = [cell for cell in cells if results[cell.name].state in ("not run", "interrupted")]
        self._say(f"study {self.folder.path}: {len(cells)} runs, {len(waiting)} of them to do")
        for note in filter(None, [self.plan.left_out(), self._interrupted(results)]):
            self._say(note)
        with signals.caught():
            for number, cell in enumerate(waiting, start=1):
                self._say(f"[{number}/{len(waiting)}] {cell.name}", end=" ")
                results[cell.name] = result = self._perform(cell, signals)
                self._say(_told(result))
                self._write(results)
                if signals.number:
                    break
        table = self._write(results)
        if signals.number:
            self._say(f"interrupted; what has ended is in {self.folder.path}, and the same command goes on")
            return 128 + signals.number
        self._end(table, results)
        return 1 if any(result.state == "failed" for result in results.values()) else 0

    def _known(self, cell: Cell) -> Result:
        """What is on disk of a cell."""
        if self.refused[cell.name]:
            return Result(cell, "refused", self.refused[cell.name])
        metrics = self.folder.metrics(cell)
        figures = read_figures(metrics)
        if figures is not None:
            return Result(cell, "ended", figures=figures)
        return Result(cell, "interrupted" if metrics.exists() else "not run")

    def _interrupted(self, results: Mapping[str, Result]) -> str:
        names = [name for name, result in results.items() if result.state == "interrupted"]
        return f"not ended, so begun anew for the sake of an honest time: {', '.join(names)}" if names else ""

    def _perform(self, cell: Cell, signals: Signals) -> Result:
        log = self.folder.logs / f"{cell.name}.log"
        code = perform(self.plan.command(cell), self.folder.path, log, signals)
        figures = read_figures(self.folder.metrics(cell))
        if figures is not None:
            return Result(cell, "ended", figures=figures)
        if signals.number:
            return Result(cell, "interrupted")
        return Result(cell, "failed", _reason(code, log))

    def _write(self, results: Mapping[str, Result]) -> list[tables.Row]:
        table = tables.rows(results.values(), goal=self.goal)
        title = f"{self.plan.env}: {', '.join(map(str, self.plan.vary['algo']))}"
        page = tables.table_md(title, table, self._notes())
        files = {
            "cells.csv": tables.cells_csv(list(results.values())),
            "table.csv": tables.table_csv(table),
            "table.md": page,
        }
        for name, text in files.items():
            replace_file(self.folder.path / name, text.encode())
        return table

    def _notes(self) -> list[str]:
        seeds, here = len(self.plan.vary["seed"]), machine()
        fixed = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.plan.options.items())
        if self.plan.envs_per_worker:
            fixed = f"--envs-per-worker {self.plan.envs_per_worker} {fixed}".strip()
        versions = " · ".join(f"{name} {version}" for name, version in package_versions().items() if version)
        notes = [
            f"Median of {seeds} seed{'s'[: seeds > 1]} (lowest to highest). "
            f"Held fixed: {fixed or 'nothing but the presets'}.",
            self.plan.left_out(),
            f"{here['cpu']}, {here['cores']} cores, {here['platform']}. {versions}.",
        ]
        return [note for note in notes if note]

    def _end(self, table: Sequence[tables.Row], results: Mapping[str, Result]) -> None:
        self._say("")
        for row in table:
            self._say(tables.summary(row))
        if not any(row.ended for row in table):
            return
        files: list[Path] = []
        try:
            if self.plan.more:
                self._say(
                    f"no charts: they are by scheme and workers, and {', '.join(self.plan.more)} was varied as well"
                )
            else:
                files = charts.draw(self.folder.path, self.plan.env, table)
        except MissingExtra as e:
            self._say(f"no charts: {e}")
        self._say(f"\ntables and charts: {' '.join(str(file) for file in [self.folder.path / 'table.md', *files])}")

    def _say(self, text: str, end: str = "\n") -> None:
        if self.show:
            print(text, end=end, flush=True)


def perform(command: Sequence[str], runs: Path, log: Path, signals: Signals) -> int:
    """Run `command` with its runs folder at `runs` and what it prints in `log`; its exit code.

    It has a process group of its own, so that Ctrl-C reaches it once, through us, and it can end in order. It is told
    to end when we are gone as well.
    """
    environment = os.environ | {"TROUPE_RUNS": str(runs.resolve())}
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    with log.open("wb") as file:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
            process_group=0, preexec_fn=end_with_parent,
        )  # fmt: skip
    told = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=POLL_S)
        if signals.number and not told:
            child.send_signal(signals.number)
            told = True


def _told(result: Result) -> str:
    f = result.figures
    if f is None:
        return f"{result.state}: {result.why}" if result.why else result.state
    met = {"solved": "solved", "limit": "budget spent"}[f.reason]
    return f"{met} after {f.seconds:.1f} s, {f.episodes:,} episodes, {f.steps:,} steps"


def _reason(code: int, log: Path) -> str:
    """What a run that failed said last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("troupe: ") for line in lines if line.startswith("troupe: ")]
    if ours:
        return ours[-1]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {lines[-1]}" if lines else how
