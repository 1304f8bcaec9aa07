"""A study: what was asked, the runs that it is made of, and the folder it is kept in."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from troupe.checkpoints import replace_file
from troupe.config import Config
from troupe.errors import ConfigError, RunDirError
from troupe.resolve import check_pairs, resolve
from troupe.rundir import RunDir, checked_name, machine, package_versions, runs_root, toml_text
from troupe.types import Scalar

MARK: Final = "troupe_study"  # the field of study.toml that makes a folder a study of ours
SCHEMA: Final = 1
FILE: Final = "study.toml"
ALONE: Final = "local"  # the scheme that is one process, whatever the number of workers
_LETTERS: Final = {"algo": "", "scheme": "", "workers": "w", "seed": "s"}  # before the value, in a cell's name


@dataclass(frozen=True)
class Cell:
    """One run of a study: the options that it varies, and their values in this run."""

    values: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """a3c-local-w1-s1."""
        return "-".join(f"{_LETTERS.get(option, option)}{value}" for option, value in self.values.items())

    @property
    def group(self) -> tuple[tuple[str, Scalar], ...]:
        """What runs that differ by their seed alone have in common."""
        return tuple((option, value) for option, value in self.values.items() if option != "seed")


@dataclass(frozen=True)
class Plan:
    """What was asked: every combination of what is varied, with the other options held fixed."""

    env: str
    vary: Mapping[str, Sequence[Scalar]]  # option -> its values
    options: Mapping[str, str]  # held fixed, as words of the command line
    given: Mapping[str, Any] = field(default_factory=dict)  # the same as values, those of a config file among them
    envs_per_worker: int = 0  # 0: the number of environments does not depend on the workers

    def cells(self) -> list[Cell]:
        """Seed by seed, so that a machine that grows slower or faster meanwhile does so for all alike."""
        names = ["seed", *(name for name in self.vary if name != "seed")]
        every = (dict(zip(names, values, strict=True)) for values in itertools.product(*(self.vary[n] for n in names)))
        cells = [Cell({name: values[name] for name in self.vary}) for values in map(_alone, every)]
        return list({cell.name: cell for cell in cells}.values())

    @property
    def more(self) -> list[str]:
        """What is varied besides algorithms, schemes, workers and seeds."""
        return [name for name in self.vary if name not in _LETTERS]

    def left_out(self) -> str:
        """A sentence on the combinations that are no cells, or nothing."""
        if ALONE in self.vary.get("scheme", ()) and any(int(n) > 1 for n in self.vary.get("workers", ())):
            return f"scheme {ALONE} is one process: it has runs with one worker only"
        return ""

    def changes(self, cell: Cell) -> dict[str, Scalar]:
        """What this cell sets besides the fixed options."""
        envs = {"envs": self.envs_per_worker * int(cell.values["workers"])} if self.envs_per_worker else {}
        return {**cell.values, **envs}

    def config(self, cell: Cell) -> Config:
        """The whole config of this cell's run. ConfigError for an option that is not one, or a wrong value."""
        return resolve({**self.given, "env": self.env, **self.changes(cell)}, strict=False)

    def refusal(self, cell: Cell) -> str:
        """Why this combination makes no sense, in a sentence; nothing where it does."""
        config = self.config(cell)
        try:
            check_pairs(config)
        except ConfigError as e:
            return str(e)
        return ""

    def command(self, cell: Cell) -> list[str]:
        """What trains this cell, always from the start: a run that was interrupted has no time worth comparing."""
        options = {**self.options, **self.changes(cell), "name": cell.name}
        words = [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
        return [sys.executable, "-m", "troupe", "train", self.env, *words, "--fresh", "--quiet"]

    def asked(self) -> dict[str, Any]:
        """What two studies must agree in to be the same."""
        fixed = {name: value for name, value in self.given.items() if name not in ("env", "config")}
        asked = {"env": self.env, "envs_per_worker": self.envs_per_worker, "vary": dict(self.vary), "options": fixed}
        plain: dict[str, Any] = tomllib.loads(toml_text(asked))
        return plain


def _alone(values: dict[str, Scalar]) -> dict[str, Scalar]:
    return {**values, "workers": 1} if values.get("scheme") == ALONE and "workers" in values else values


class StudyDir:
    """The folder of a study, below the runs folder; its runs lie in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"

    def metrics(self, cell: Cell) -> Path:
        """The journal of a cell's run."""
        return self.path / cell.name / "metrics.jsonl"

    def asked(self) -> dict[str, Any] | None:
        """What the study that is here was asked; None where there is none."""
        try:
            stored = tomllib.loads((self.path / FILE).read_text())
        except (OSError, ValueError):
            return None
        if MARK not in stored:
            return None
        return {key: value for key, value in stored.items() if key not in (MARK, "made_with")}

    @contextmanager
    def held(self, plan: Plan, *, fresh: bool) -> Iterator[None]:
        """Be the one process that runs this study; RunDirError where the folder is somebody else's."""
        asked = plan.asked()
        before = self._check(asked, fresh=fresh)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirError(f"the study {self.path} is being run by another process: wait for it") from None
            if fresh:
                self._empty()
            if fresh or before is None:
                made_with = {**package_versions(), **machine()}
                text = toml_text({MARK: SCHEMA, **asked, "made_with": made_with})
                replace_file(self.path / FILE, text.encode())
            self.logs.mkdir(exist_ok=True)
            yield
        finally:
            os.close(fd)

    def _check(self, asked: Mapping[str, Any], *, fresh: bool) -> dict[str, Any] | None:
        before = self.asked()
        there = {entry.name for entry in os.scandir(self.path)} if self.path.is_dir() else set()
        if before is None and (there - {"lock"} or self.path.is_symlink() or self.path.is_file()):
            raise RunDirError(f"{self.path} is in the way and is no study: take another --name")
        if before is not None and before != asked and not fresh:
            other = ", ".join(sorted(_differences(before, asked)))
            raise ConfigError(
                f"the study {self.path} was asked with other options ({other}): repeat its command to go on, take "
                "another --name, or --fresh to start it again"
            )
        return before

    def _empty(self) -> None:
        """Remove the runs of an earlier study and nothing else; what it left in our files is written over."""
        for entry in list(os.scandir(self.path)):
            if entry.is_dir(follow_symlinks=False) and (Path(entry.path) / "manifest.json").exists():
                with RunDir.open(os.path.abspath(entry.path)):  # refused while somebody trains in it
                    shutil.rmtree(entry.path)
            elif entry.name.endswith((".png", ".csv")):
                os.unlink(entry.path)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new)
        elif old != new:
            yield key.replace("_", "-")


def study_dir(name: str, plan: Plan) -> StudyDir:
    """The folder for `name`; without a name, that of this very study if there is one, else the first that is free."""
    if name:
        return StudyDir(runs_root() / checked_name(name))
    stem = "compare-" + "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in plan.env.lower())
    for number in itertools.count(1):
        folder = StudyDir(runs_root() / f"{stem[:100]}-{number}")
        if not folder.path.exists() or folder.asked() == plan.asked():
            return folder
    raise AssertionError("counting never ends")
