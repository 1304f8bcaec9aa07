"""Checkpoints that are whole or absent: written beside, synced, renamed; verified byte for byte before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import safetensors
import safetensors.numpy

from troupe.errors import RunDirError, TroupeError
from troupe.types import Array, Json, State

SCHEMA: Final = 1
KEEP: Final = 3  # one is being read, one is the last good, one is spare
ARRAYS: Final = "arrays.safetensors"
VALUES: Final = "values.json"
MANIFEST: Final = "manifest.json"
TEMPORARY: Final = ".tmp-"
SET_ASIDE: Final = "set-aside-"
MANIFEST_BYTES: Final = 1 << 20  # far above any honest manifest: what is larger is not read into memory

_NAME = re.compile(r"(\d{12,})-(\d+)(?:\.(\d+))?")  # <steps>-<version>, and .<n> where that name was taken
_WEIGHTS = "weights"
_STATE = "state/"

Fields = dict[str, Json]
Migration = Callable[[Fields, dict[str, Array], Fields], None]


class SaveFailed(TroupeError):
    """The disk did not take a checkpoint; the older ones stand as they were, and training can go on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One verified checkpoint."""

    path: Path
    steps: int  # environment steps played so far, summed over all workers
    version: int  # of the weights
    state: State
    weights: Array
    info: Mapping[str, Json] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)  # newer ones passed over: name -> reason


def _from_0(manifest: Fields, arrays: dict[str, Array], values: Fields) -> None:
    """Schema 0 called the environment steps `step`."""
    if "step" in manifest:
        manifest["steps"] = manifest.pop("step")


# Changes manifest, arrays and values of schema n, in place, into those of schema n + 1. Only `schema`, `files` and the
# seal are the same for ever, so that any version can verify any older one before it interprets it.
MIGRATIONS: dict[int, Migration] = {0: _from_0}


class Checkpoints:
    """A folder of the last `keep` checkpoints. One process saves (it holds the run's lock); any may load."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self.folder = folder
        self._keep = keep
        self._unusable: set[str] = set()  # found unusable by load_latest, set aside once a newer one is safe

    def save(
        self, steps: int, version: int, state: State, weights: Array, info: Mapping[str, Json] | None = None
    ) -> Path:
        """Keep this state for good, then drop what is older than the last few. `info` is small and JSON.

        Raises SaveFailed when the disk refuses; every older checkpoint is intact then.
        """
        steps, version = int(steps), int(version)
        files = {ARRAYS: _pack(state.arrays, weights), VALUES: json.dumps(state.values, default=_plain).encode()}
        entries = {n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in files.items()}
        info = json.loads(json.dumps(dict(info or {}), default=_plain))  # as it will be read: keys are text then
        manifest = {"schema": SCHEMA, "steps": steps, "version": version, "info": info, "files": entries}
        # A new folder for each attempt: after a failed fsync the kernel may call unwritten pages clean, so writing or
        # syncing the same file again could report a success that is not on the disk.
        temporary = self.folder / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            temporary.mkdir(mode=0o700)
            for name, data in (files | {MANIFEST: _sealed(manifest)}).items():
                write_synced(temporary / name, data)
            sync_folder(temporary)
            path = self._free_name(steps, version)
            temporary.rename(path)
            sync_folder(self.folder)
        except OSError as e:
            shutil.rmtree(temporary, ignore_errors=True)
            raise SaveFailed(
                f"the checkpoint of step {steps} was not saved in {self.folder}: {e.strerror or e}; "
                "the older ones are intact, free some space or check the disk"
            ) from e
        with contextlib.suppress(OSError):  # the new one is safe; what could not be dropped now is dropped next time
            self._prune(path.name)
        return path

    def load_latest(self, expect: Mapping[str, Json] | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies, naming the newer ones it passed over; None where none was ever saved.

        `expect` names fields of `info` and their values: a checkpoint that says otherwise belongs to something else.
        Raises RunDirError for that, and when there are checkpoints but none is usable: starting anew unasked would
        throw the run away.
        """
        skipped: dict[str, str] = {}
        names = self.names()
        for _ in range(5):
            skipped = {}
            for name in names:
                try:
                    found = read_checkpoint(self.folder / name)
                except RunDirError as e:
                    skipped[name] = str(e)
                    continue
                _check_expected(found, expect or {})
                self._unusable |= set(skipped)
                return Checkpoint(
                    found.path, found.steps, found.version, found.state, found.weights, found.info, skipped
                )
            before, names = names, self.names()
            if names == before:  # else another process saved and pruned while this one read
                break
        if not skipped:
            return None
        raise RunDirError(
            f"no checkpoint in {self.folder} is usable: {'; '.join(skipped.values())}; start again with --fresh"
        )

    def names(self) -> list[str]:
        """Checkpoints by name, newest first, not yet verified."""
        try:
            return self._listed()
        except FileNotFoundError:
            return []
        except OSError as e:
            raise RunDirError(f"cannot list {self.folder}: {e.strerror or e}; check the path and its rights") from e

    def clean(self) -> None:
        """Remove what a killed save left. Only for the holder of the run's lock."""
        remove_temporaries(self.folder)

    def _listed(self) -> list[str]:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return sorted(filter(_NAME.fullmatch, os.listdir(folder)), key=_order, reverse=True)
        finally:
            os.close(folder)

    def _free_name(self, steps: int, version: int) -> Path:
        # Replacing a folder is not atomic, so the same step saved again gets a name of its own that sorts as newer.
        name = f"{steps:012d}-{version}"
        taken = [_order(n)[2] for n in self._listed() if n.split(".")[0] == name]
        return self.folder / (f"{name}.{max(taken) + 1}" if taken else name)

    def _prune(self, saved: str) -> None:
        for name in self._unusable & set(self._listed()):
            (self.folder / name).rename(self.folder / f"{SET_ASIDE}{name}")  # evidence, and no longer a candidate
        self._unusable.clear()
        for name in [name for name in self._listed() if name != saved][self._keep - 1 :]:
            # Under a temporary name first, so that a kill half-way through leaves no half checkpoint.
            doomed = self.folder / f"{TEMPORARY}{secrets.token_hex(8)}"
            (self.folder / name).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify and read one. Raises RunDirError naming what is wrong with it; never returns a part of it."""
    try:
        manifest, arrays, values = _read_verified(path)
    except OSError as e:
        raise _flaw(path, f"{Path(e.filename).name if e.filename else path.name}: {e.strerror or e}") from e
    schema: int = manifest["schema"]
    try:
        for older in range(schema, SCHEMA):
            MIGRATIONS[older](manifest, arrays, values)
    except (KeyError, TypeError, ValueError) as e:
        raise _flaw(path, f"schema {schema} could not be brought to {SCHEMA}: {e!r}") from e
    steps, version, info = (manifest.get(name) for name in ("steps", "version", "info"))
    for name, value in (("steps", steps), ("version", version)):
        if type(value) is not int or value < 0:
            raise _flaw(path, f"{name} is {value!r}, not a count")
    if not isinstance(info, dict):
        raise _flaw(path, "info is not an object")
    if schema == SCHEMA and (steps, version) != _order(path.name)[:2]:
        raise _flaw(path, f"steps and version say {steps}-{version}, which is not its name")
    if _WEIGHTS not in arrays:
        raise _flaw(path, f"{ARRAYS} holds no weights")
    weights = arrays.pop(_WEIGHTS)
    state = State({name.removeprefix(_STATE): array for name, array in arrays.items()}, values)
    assert isinstance(steps, int) and isinstance(version, int)
    return Checkpoint(path, steps, version, state, weights, info)


def _read_verified(path: Path) -> tuple[Fields, dict[str, Array], Fields]:
    """Manifest, arrays and values whose lengths, digests and types are right; OSError or RunDirError otherwise."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        manifest = _read_manifest(path, _read_file(path, folder, MANIFEST, None))
        files = manifest.get("files")
        if not isinstance(files, dict) or set(files) != {ARRAYS, VALUES}:
            raise _flaw(path, f"{MANIFEST}: files does not list {ARRAYS} and {VALUES}")
        contents: dict[str, bytes] = {}
        for name, entry in files.items():
            if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
                raise _flaw(path, f"{MANIFEST}: files has no length of {name}")
            contents[name] = _read_file(path, folder, name, entry["bytes"])
            if hashlib.sha256(contents[name]).hexdigest() != entry.get("sha256"):
                raise _flaw(path, f"{name} does not match its SHA-256")
    finally:
        os.close(folder)
    try:
        arrays = safetensors.numpy.load(contents[ARRAYS])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as e:
        raise _flaw(path, f"{ARRAYS} is not readable as safetensors ({e})") from e
    return manifest, arrays, _object(path, VALUES, contents[VALUES])


def _read_manifest(path: Path, data: bytes) -> Fields:
    manifest = _object(path, MANIFEST, data)
    schema = manifest.get("schema")
    if type(schema) is not int or schema < 0:
        raise _flaw(path, f"schema is {schema!r}, not a version")
    if schema > SCHEMA:
        raise _flaw(path, f"schema is {schema}, newer than {SCHEMA} which this troupe reads: update troupe")
    manifest.pop("sha256", None)
    if _sealed(manifest) != data:
        raise _flaw(path, f"{MANIFEST} does not match its own SHA-256")
    return manifest


def _read_file(path: Path, folder: int, name: str, size: int | None) -> bytes:
    # O_NONBLOCK: opening a planted FIFO must not hang; it is refused below like anything that is not a plain file.
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _flaw(path, f"{name} is not a plain file")
        if size is None and found.st_size > MANIFEST_BYTES:
            raise _flaw(path, f"{name} has {found.st_size} bytes, more than {MANIFEST_BYTES}")
        if size is not None and found.st_size != size:  # before reading: no memory for what is wrong anyway
            raise _flaw(path, f"{name} has {found.st_size} bytes, not {size}")
        return file.read()


def _object(path: Path, name: str, data: bytes) -> Fields:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise _flaw(path, f"{name} is not readable as JSON") from e
    if not isinstance(value, dict):
        raise _flaw(path, f"{name} is not an object")
    return value


def _check_expected(found: Checkpoint, expect: Mapping[str, Json]) -> None:
    for name, value in expect.items():
        if found.info.get(name) != value:
            raise RunDirError(
                f"checkpoint {found.path} has {name} {found.info.get(name)!r}, but this run has {value!r}: "
                "resume with the run's own config, or take another run name"
            )


def _flaw(path: Path, reason: str) -> RunDirError:
    return RunDirError(f"checkpoint {path.name}: {reason}")


def _order(name: str) -> tuple[int, int, int]:
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (-1, -1, -1)


def _pack(arrays: Mapping[str, Array], weights: Array) -> bytes:
    named = {_WEIGHTS: weights} | {f"{_STATE}{name}": array for name, array in arrays.items()}
    try:
        return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in named.items()})
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as e:
        types = ", ".join(sorted({str(np.asarray(array).dtype) for array in named.values()}))
        raise RunDirError(f"a checkpoint cannot hold these arrays ({types}): {e}; use numbers or bools") from e


def _plain(value: object) -> Json:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint's values must be plain JSON, not {type(value).__name__}: put arrays in State.arrays")


def _canonical(fields: Fields) -> bytes:
    return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


def _sealed(fields: Fields) -> bytes:
    """The one text of a manifest with its own digest in it; any other byte anywhere is damage."""
    return _canonical(fields | {"sha256": hashlib.sha256(_canonical(fields)).hexdigest()})


def write_synced(path: Path, data: bytes) -> None:
    """Create `path`, which must not exist, with `data` on the disk when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on the disk: without it a rename may be undone by a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a small file: a reader, or a start after a crash, finds the old one or the new one."""
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        write_synced(temporary, data)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed writer left in `folder`."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(TEMPORARY):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
