"""What a run leaves on disk, and the lock that lets one learner at a time write it."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from troupe.checkpoints import TEMPORARY, Checkpoint, Checkpoints, remove_temporaries, replace_file
from troupe.errors import RunDirError
from troupe.journal import Journal
from troupe.types import Array, Json, State

SCHEMA: Final = 1
MARK: Final = "troupe_run"  # the manifest's field that makes a directory one of ours
PACKAGES: Final = ("troupe", "torch", "numpy", "gymnasium", "envpool", "msgspec", "safetensors")
GIT_TIMEOUT_S: Final = 2.0

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_FOLDERS = ("checkpoints", "best", "eval", "video", "logs")


def runs_root() -> Path:
    """Where runs are kept: $TROUPE_RUNS, else ./runs."""
    return Path(os.environ.get("TROUPE_RUNS") or "runs")


class RunDir:
    """One run's directory: config.toml, manifest.json, metrics.jsonl, checkpoints/, best/, eval/, video/, logs/.

    Anyone may read it; only the holder of its lock (`create`, `acquire`) may write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.checkpoints = Checkpoints(path / "checkpoints")
        self.best = Checkpoints(path / "best", keep=1)
        self.metrics = path / "metrics.jsonl"
        self.eval = path / "eval"
        self.video = path / "video"
        self.logs = path / "logs"
        self._lock: int | None = None

    @classmethod
    def create(cls, name: str, *, fresh: bool, root: Path | None = None) -> RunDir:
        """A new run, locked. Where `name` exists: with `fresh` it is emptied, if it really is a run; else refused."""
        path = (root or runs_root()) / checked_name(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                return cls._create_over(path, fresh)
            run = cls(path)
            run._take_lock()
            run._fill()
        except OSError as e:
            raise RunDirError(f"cannot create the run {path}: {e.strerror or e}; check its rights and the disk") from e
        return run

    @classmethod
    def _create_over(cls, path: Path, fresh: bool) -> RunDir:
        run = cls(path)
        if path.is_symlink() or not path.is_dir():
            raise RunDirError(f"{path} is in the way and is not a directory: take another run name")
        left = {entry.name for entry in os.scandir(path) if not entry.name.startswith(TEMPORARY)}
        if left - {"lock"}:  # else: made but not yet filled when its maker died
            _check_mark(path)
            if not fresh:
                raise RunDirError(f"the run {path} exists: resume it, take another name, or start again with --fresh")
        # The directory and its lock stay, so that no second learner can slip in between removing and making.
        run._take_lock()
        run._fill(emptied=True)
        return run

    def _fill(self, emptied: bool = False) -> None:
        """Lay out an empty run; the lock, just taken, is given up again where that fails."""
        try:
            if emptied:
                self._empty()
            self._write_manifest({"started": datetime.now(UTC).isoformat(timespec="seconds")})
            for folder in _FOLDERS:
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        except BaseException:
            if not emptied:  # made by us a moment ago: nothing of anybody's is in it
                shutil.rmtree(self.path, ignore_errors=True)
            self.release()
            raise

    def _empty(self) -> None:
        for entry in list(os.scandir(self.path)):
            if entry.name in ("lock", "manifest.json"):  # the mark stays till it is replaced: a kill leaves a run
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    @classmethod
    def open(cls, name_or_path: str | os.PathLike[str], root: Path | None = None) -> RunDir:
        """An existing run, by its name under the root or by its path; not locked."""
        given = os.fspath(name_or_path)
        root = root or runs_root()
        named = [root / given] if _RUN_NAME.fullmatch(given) else []
        for path in [*named, Path(os.path.abspath(given))]:
            if given and os.path.lexists(path):
                _check_mark(path)
                return cls(path)
        raise RunDirError(f"there is no run {given} in {root}{_nearest(given, root)}")

    def acquire(self) -> None:
        """Be the one learner of this run; refused at once while another process is. Clears what a killed one left."""
        if self._lock is not None:
            return
        try:
            self._take_lock()
            for folder in _FOLDERS:
                (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        except OSError as e:
            self.release()
            raise RunDirError(f"cannot lock the run {self.path}: {e.strerror or e}; check its rights") from e
        remove_temporaries(self.path)
        self.checkpoints.clean()
        self.best.clean()

    def release(self) -> None:
        """Let another learner take the run. The system does the same when this process ends, however it ends."""
        if self._lock is not None:
            fd, self._lock = self._lock, None
            os.close(fd)

    def __enter__(self) -> RunDir:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def write_config(self, config: Mapping[str, Json]) -> None:
        """Store the resolved config, so that the run can be run again from it."""
        self._replace("config.toml", toml_text(config).encode())

    def read_config(self) -> dict[str, Json]:
        """The config this run was started with."""
        path = self.path / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise RunDirError(f"cannot read {path}: {e.strerror or e}; start the run again with --fresh") from e
        except ValueError as e:
            raise RunDirError(f"{path} is not valid TOML ({e}): correct it or start the run again with --fresh") from e

    def write_manifest(self, extra: Mapping[str, Json]) -> None:
        """Store what made this run: versions, machine, source state and `extra` (the seed, the preset...)."""
        known = _manifest(self.path)
        facts = {
            "packages": package_versions(),
            "machine": machine(),
            "git": git_state(),
            "started": known.get("started") or datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._write_manifest(facts | dict(extra))

    def read_manifest(self) -> dict[str, Json]:
        """What made this run."""
        return _check_mark(self.path)

    def begin_life(self) -> int:
        """How many processes led this run before, whether they lived to save anything or not."""
        path = self.path / "lives"
        try:
            with path.open("ab") as file:
                file.write(b".")
            return path.stat().st_size - 1
        except OSError as e:
            raise RunDirError(f"cannot write {path}: {e.strerror or e}; check its rights and the disk") from e

    def journal(self) -> Journal:
        """The run's journal, to go on writing."""
        return Journal(self.metrics)

    def save(
        self, steps: int, version: int, state: State, weights: Array, info: Mapping[str, Json] | None = None
    ) -> Path:
        """Keep a checkpoint among the last three. Raises SaveFailed, which training survives."""
        return self.checkpoints.save(steps, version, state, weights, info)

    def save_best(
        self, steps: int, version: int, state: State, weights: Array, info: Mapping[str, Json] | None = None
    ) -> Path:
        """Keep this as the best so far, in place of the last best. Raises SaveFailed."""
        return self.best.save(steps, version, state, weights, info)

    def load_latest(self, expect: Mapping[str, Json] | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies; see Checkpoints.load_latest."""
        return self.checkpoints.load_latest(expect)

    def load_best(self, expect: Mapping[str, Json] | None = None) -> Checkpoint | None:
        """The best so far, or None."""
        return self.best.load_latest(expect)

    def _take_lock(self) -> None:
        # O_CLOEXEC: a spawned worker that outlives this process must not keep the lock alive.
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)  # for the sentence below only; the lock is the flock
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise RunDirError(
                f"the run {self.path} is in use by process {holder}: wait for it, stop it, or take another run name"
            ) from None
        except OSError:
            os.close(fd)
            raise
        self._lock = fd

    def _write_manifest(self, facts: Mapping[str, Json]) -> None:
        facts = {MARK: self.name, "schema": SCHEMA} | dict(facts)
        self._replace("manifest.json", (json.dumps(facts, indent=1, default=str) + "\n").encode())

    def _replace(self, name: str, data: bytes) -> None:
        try:
            replace_file(self.path / name, data)
        except OSError as e:
            raise RunDirError(
                f"cannot write {self.path / name}: {e.strerror or e}; check its rights and the disk"
            ) from e


def package_versions() -> dict[str, str | None]:
    """What is installed, None where it is not."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def machine() -> dict[str, Json]:
    """The machine a result was measured on."""
    model = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cores": cores, "memory_bytes": memory, "cpu": model, "platform": platform.platform()}


def git_state(folder: Path | None = None) -> dict[str, Json] | None:
    """Commit of the current folder and whether its files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty)}


def toml_text(table: Mapping[str, Json]) -> str:
    """`table` as TOML: scalars, text, lists and tables within tables. None is left out, for TOML has no word for it."""
    return "".join(_toml_lines(table, ""))


def _toml_lines(table: Mapping[str, Json], path: str) -> Iterator[str]:
    tables: list[tuple[str, Mapping[str, Json]]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append((f"{path}{_toml_key(key)}", value))  # after the values, which would else belong to it
        elif value is not None:
            yield f"{_toml_key(key)} = {_toml_value(key, value)}\n"
    for name, inner in tables:
        yield f"\n[{name}]\n"
        yield from _toml_lines(inner, f"{name}.")


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_string(key)


def _toml_value(key: str, value: Json) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return repr(float(value)) if math.isfinite(value) else str(float(value))
        case str():
            return _toml_string(value)
        case list() | tuple():
            return f"[{', '.join(_toml_value(key, item) for item in value)}]"
        case Mapping():
            return f"{{{', '.join(f'{_toml_key(k)} = {_toml_value(k, v)}' for k, v in value.items())}}}"
    raise RunDirError(f"the config value {key} is a {type(value).__name__}: use a number, text, list or table")


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'


def checked_name(name: str) -> str:
    """`name`, if it can be that of a folder below the runs folder."""
    if not _RUN_NAME.fullmatch(name):
        raise RunDirError(f"{name!r} cannot be a run's name: use letters, digits, '.', '-', '_' or '+', 128 at most")
    return name


def _manifest(path: Path) -> dict[str, Json]:
    """The manifest of `path` if it is a run directory of ours, else an empty one."""
    try:
        fd = os.open(path / "manifest.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            facts = json.loads(file.read()) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) and MARK in facts else {}


def _check_mark(path: Path) -> dict[str, Json]:
    """The manifest of a real run directory; RunDirError for anything else."""
    if path.is_symlink():
        raise RunDirError(f"{path} is a symbolic link: give the run directory itself")
    facts = _manifest(path)
    if not facts:
        raise RunDirError(
            f"{path} is not a run directory: it has no manifest.json of troupe's; give a run's name or path"
        )
    schema = facts.get("schema")
    if type(schema) is not int or not 0 <= schema <= SCHEMA:
        raise RunDirError(
            f"{path}/manifest.json has schema {schema!r}, but this troupe reads up to {SCHEMA}: update it"
        )
    return facts


def _nearest(name: str, root: Path) -> str:
    runs: list[str] = []
    with contextlib.suppress(OSError):
        runs = sorted(entry.name for entry in os.scandir(root) if _manifest(Path(entry.path)))
    close = difflib.get_close_matches(Path(name).name, runs, n=1, cutoff=0.4)
    if close:
        return f": did you mean {close[0]}?"
    return f": it has {', '.join(runs[-5:])}" if runs else ": it has none yet, start one with troupe train"
