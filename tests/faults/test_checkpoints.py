"""Checkpoints under kills, full and failing disks, damage and foreign formats: old or new, never something between."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from troupe import checkpoints
from troupe.checkpoints import ARRAYS, MANIFEST, TEMPORARY, VALUES, Checkpoint, Checkpoints, SaveFailed, read_checkpoint
from troupe.errors import RunDirError
from troupe.types import Array, Json, State

WRITING = ("mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir", "close")  # the syscalls of a save
FAILING = ("mkdir", "openat", "write", "fsync", "rename", "unlinkat", "rmdir")

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)"
)


class Saved(NamedTuple):
    steps: int
    version: int
    state: State
    weights: Array


def make(steps: int, floats: int = 64) -> Saved:
    rng = np.random.default_rng(steps)
    arrays: dict[str, Array] = {
        "adam/m": rng.normal(size=floats).astype(np.float32),
        "replay/actions": rng.integers(0, 9, (4, 3)),
        "replay/done": rng.random(5) < 0.5,
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "empty": np.zeros((0, 4), np.uint8),
        "scalar": np.array(steps, np.float64),
    }
    values = {"rng": rng.bit_generator.state, "steps": steps, "loss": float("nan"), "name": 'é"\n'}
    return Saved(steps, steps // 10, State(arrays, values), rng.normal(size=floats).astype(np.float32))


def assert_is(found: Checkpoint | None, saved: Saved) -> None:
    assert found is not None
    assert (found.steps, found.version) == (saved.steps, saved.version)
    assert json.dumps(found.state.values) == json.dumps(saved.state.values)
    assert found.state.arrays.keys() == saved.state.arrays.keys()
    for name, array in (saved.state.arrays | {"weights": saved.weights}).items():
        read = found.weights if name == "weights" else found.state.arrays[name]
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(TEMPORARY)]


# --- T33, T34: a forked child saves under strace, which kills it or fails it at the n-th syscall of one kind


def run_traced(body: Callable[[], int], inject: str) -> tuple[int, bool]:
    """Run `body` in a child with strace's `inject`; its wait status, and whether the injection was hit."""
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest beyond this point
        code = 99
        try:
            os.read(go_read, 1)
            code = body()
        finally:
            os._exit(code)
    os.close(go_read)
    calls = inject.partition(":")[0]
    command = ["strace", "-p", str(child), "-e", f"trace={calls}", "-e", f"inject={inject}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        first = tracer.stderr.readline()
        if "attached" not in first:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.skip(f"strace may not attach to a process here: {first.strip()}")
        os.write(go_write, b"g")
        os.close(go_write)
        _, status = os.waitpid(child, 0)
        log = tracer.stderr.read()
    return status, "INJECTED" in log or os.WIFSIGNALED(status)


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints, so that the next save also drops one."""
    folder = tmp_path_factory.mktemp("three")
    for steps in (10, 20, 30):
        Checkpoints(folder).save(*make(steps))
    return folder


@needs_strace
@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", WRITING)
def test_a_kill_at_any_syscall_of_a_save_leaves_the_old_or_the_new(
    call: str, three_saved: Path, tmp_path: Path
) -> None:
    old, new, outcomes, hits = make(30), make(40), set(), 0
    while True:
        folder = tmp_path / str(hits)
        shutil.copytree(three_saved, folder)

        def body(folder: Path = folder) -> int:
            Checkpoints(folder).save(*new)
            return 0

        status, hit = run_traced(body, f"{call}:signal=KILL:when={hits + 1}")
        found = Checkpoints(folder).load_latest()
        assert found is not None
        for name in Checkpoints(folder).names():  # a kill leaves nothing that only looks like a checkpoint
            read_checkpoint(folder / name)
        assert_is(found, new if found.steps == 40 else old)
        outcomes.add(found.steps)
        Checkpoints(folder).clean()
        assert leftovers(folder) == []
        Checkpoints(folder).save(*make(50))
        assert_is(Checkpoints(folder).load_latest(), make(50))
        if not hit:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        hits += 1
        assert hits < 100
    assert hits > 0, f"a save makes no {call}: drop it from the list"
    assert 40 in outcomes


@needs_strace
@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("call", FAILING)
def test_a_disk_error_at_any_syscall_costs_one_save_at_most(
    call: str, error: str, three_saved: Path, tmp_path: Path
) -> None:
    old, new, hits, failed = make(30), make(40), 0, 0
    while True:
        folder = tmp_path / str(hits)
        shutil.copytree(three_saved, folder)

        def body(folder: Path = folder) -> int:
            try:
                Checkpoints(folder).save(*new)
            except SaveFailed:
                return 1
            return 0

        status, hit = run_traced(body, f"{call}:error={error}:when={hits + 1}")
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 1), f"{call} number {hits + 1} raised something else than SaveFailed"
        kept = Checkpoints(folder)
        found = kept.load_latest()
        assert found is not None
        assert found.skipped == {}
        assert_is(found, new if found.steps == 40 else old)
        kept.save(*make(50))
        assert_is(kept.load_latest(), make(50))
        failed += code
        if not hit:
            break
        hits += 1
        assert hits < 100
    assert failed or call in ("unlinkat", "rmdir")  # those only drop what is old


def test_after_a_failed_fsync_the_same_file_is_never_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def failing_once(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(synced) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing_once)
    kept = Checkpoints(tmp_path)
    with pytest.raises(SaveFailed, match="Input/output error"):
        kept.save(*make(10))
    assert leftovers(tmp_path) == []
    kept.save(*make(10))
    assert len(set(synced)) == len(synced) and len(synced) > 5
    assert_is(kept.load_latest(), make(10))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted (needs root): {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_really_full_disk_costs_saves_but_nothing_saved(small_disk: Path) -> None:
    kept = Checkpoints(small_disk / "checkpoints")
    kept.save(*make(10, floats=10_000))
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space"), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for steps in (20, 30):
        with pytest.raises(SaveFailed, match="No space left"):
            kept.save(*make(steps, floats=10_000))
        assert_is(kept.load_latest(), make(10, floats=10_000))
    ballast.unlink()
    kept.save(*make(40, floats=10_000))
    assert_is(kept.load_latest(), make(40, floats=10_000))
    assert leftovers(kept.folder) == []


# --- T35: damage


@pytest.fixture
def two_saved(tmp_path: Path) -> Checkpoints:
    kept = Checkpoints(tmp_path / "checkpoints")
    kept.save(*make(10))
    kept.save(*make(20))
    return kept


def test_every_cut_and_every_bit_flip_is_detected(two_saved: Checkpoints) -> None:
    newest = two_saved.folder / two_saved.names()[0]
    contents = {name: (newest / name).read_bytes() for name in (ARRAYS, VALUES, MANIFEST)}
    total = sum(map(len, contents.values()))
    rng = random.Random(0)

    def locate(offset: int) -> tuple[str, int]:
        for name, data in contents.items():
            if offset < len(data):
                return name, offset
            offset -= len(data)
        raise AssertionError

    def assert_detected(name: str, damaged: bytes) -> None:
        (newest / name).write_bytes(damaged)
        found = two_saved.load_latest()
        assert_is(found, make(10))
        assert found is not None and list(found.skipped) == [newest.name]
        assert found.skipped[newest.name].startswith(f"checkpoint {newest.name}: ")
        (newest / name).write_bytes(contents[name])

    for offset in range(0, total, total // 100):
        name, at = locate(offset)
        assert_detected(name, contents[name][:at])
    for bit in rng.sample(range(total * 8), 1000):
        name, at = locate(bit // 8)
        flipped = bytearray(contents[name])
        flipped[at] ^= 1 << bit % 8
        assert_detected(name, bytes(flipped))
    for name, data in contents.items():
        assert_detected(name, data + b"\n")
    assert_is(two_saved.load_latest(), make(20))  # all of it was the damage


def no_manifest(newest: Path) -> None:
    (newest / MANIFEST).unlink()


def unfinished(newest: Path) -> None:
    for file in newest.iterdir():
        file.unlink()


def linked_folder(newest: Path) -> None:
    newest.rename(newest.parent / "elsewhere")
    newest.symlink_to(newest.parent / "elsewhere")


def linked_file(newest: Path) -> None:
    (newest / ARRAYS).rename(newest.parent / "elsewhere")
    (newest / ARRAYS).symlink_to(newest.parent / "elsewhere")


def fifo(newest: Path) -> None:
    (newest / ARRAYS).unlink()
    os.mkfifo(newest / ARRAYS)


def renamed(newest: Path) -> None:
    newest.rename(newest.parent / "000000000099-2")


def plain_file(newest: Path) -> None:
    shutil.rmtree(newest)
    newest.write_text("x")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("damage", [no_manifest, unfinished, linked_folder, linked_file, fifo, renamed, plain_file])
def test_what_is_not_a_whole_plain_checkpoint_is_skipped_by_name(
    two_saved: Checkpoints, damage: Callable[[Path], None]
) -> None:
    damage(two_saved.folder / two_saved.names()[0])
    found = two_saved.load_latest()
    assert_is(found, make(10))
    assert found is not None and list(found.skipped) == [two_saved.names()[0]]


@pytest.mark.timeout(10)
def test_a_manifest_that_is_no_file_is_not_read(two_saved: Checkpoints) -> None:
    newest = two_saved.folder / two_saved.names()[0]
    (newest / MANIFEST).unlink()
    os.mkfifo(newest / MANIFEST)
    with pytest.raises(RunDirError, match=r"manifest\.json is not a plain file"):
        read_checkpoint(newest)


def test_going_on_from_an_older_one_sets_the_damaged_aside(two_saved: Checkpoints) -> None:
    no_manifest(two_saved.folder / "000000000020-2")
    two_saved.load_latest()
    for steps in (12, 14, 16, 18):
        two_saved.save(*make(steps))
    assert two_saved.names() == [f"0000000000{steps}-1" for steps in (18, 16, 14)]
    assert (two_saved.folder / "set-aside-000000000020-2").is_dir()


def test_all_damaged_is_refused_and_none_saved_is_none(two_saved: Checkpoints, tmp_path: Path) -> None:
    for name in two_saved.names():
        no_manifest(two_saved.folder / name)
    with pytest.raises(RunDirError, match=r"000000000020-2: manifest.json.*000000000010-1: manifest.json.*--fresh"):
        two_saved.load_latest()
    assert Checkpoints(tmp_path / "nothing").load_latest() is None


# --- T37: other formats


def reseal(path: Path, change: Callable[[dict[str, Json]], None]) -> None:
    fields = json.loads((path / MANIFEST).read_bytes())
    fields.pop("sha256")
    change(fields)
    (path / MANIFEST).write_bytes(checkpoints._sealed(fields))


# A checkpoint as schema 0 wrote it, when `steps` was called `step`.
VERSION_0 = {
    ARRAYS: base64.b64decode(
        "gAAAAAAAAAB7InN0YXRlL20iOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzNdLCJkYXRhX29mZnNldHMiOlswLDEyXX0sIndlaWdo"
        "dHMiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzNdLCJkYXRhX29mZnNldHMiOlsxMiwyNF19fSAgICAgIAAAgEAAAKBAAADAQAAA"
        "gD8AAABAAABAQA=="
    ),
    VALUES: b'{"epoch": 2}',
    MANIFEST: b"""{
 "files": {
  "arrays.safetensors": {
   "bytes": 160,
   "sha256": "1258ea3a552e7d45ad05b869455fec8de3ee151c7d89b90ae3c99328db6bb747"
  },
  "values.json": {
   "bytes": 12,
   "sha256": "d93f0c9cbbf4c94f73ab2bb36b32023121c9bcfcb3221e3b915f9f46f4f76648"
  }
 },
 "info": {
  "env": "CartPole-v1"
 },
 "schema": 0,
 "sha256": "4f7beec7987e9220b0653e136f0ce5a0c23dc872ffad1eeac67eb747960f8580",
 "step": 70,
 "version": 7
}
""",
}


def write_version_0(folder: Path) -> Path:
    path = folder / "000000000070-7"
    path.mkdir(parents=True)
    for name, data in VERSION_0.items():
        (path / name).write_bytes(data)
    return path


def test_a_checkpoint_of_the_oldest_format_loads(tmp_path: Path) -> None:
    write_version_0(tmp_path)
    found = Checkpoints(tmp_path).load_latest(expect={"env": "CartPole-v1"})
    weights = np.array([1, 2, 3], np.float32)
    assert_is(found, Saved(70, 7, State({"m": weights + 3}, {"epoch": 2}), weights))


def test_an_older_format_that_cannot_be_brought_up_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_version_0(tmp_path)
    monkeypatch.setitem(checkpoints.MIGRATIONS, 0, lambda manifest, arrays, values: values["lost"])
    with pytest.raises(RunDirError, match=r"schema 0 could not be brought to 1: KeyError\('lost'\)"):
        read_checkpoint(path)
    monkeypatch.setitem(checkpoints.MIGRATIONS, 0, lambda manifest, arrays, values: None)
    with pytest.raises(RunDirError, match="steps is None"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("schema", 2, "schema is 2, newer than 1"),
        ("schema", "1", "schema is '1', not a version"),
        ("schema", True, "schema is True"),
        ("schema", -1, "schema is -1"),
        ("steps", "20", "steps is '20'"),
        ("steps", 21, "steps and version say 21-2"),
        ("version", 2.0, "version is 2.0"),
        ("version", -2, "version is -2"),
        ("info", [], "info is not an object"),
        ("files", {}, "files does not list"),
        ("files", {ARRAYS: 1, VALUES: 2}, "files has no length"),
    ],
)
def test_a_foreign_manifest_is_refused_naming_the_field(
    two_saved: Checkpoints, field: str, value: Json, says: str
) -> None:
    newest = two_saved.folder / two_saved.names()[0]
    reseal(newest, lambda fields: fields.update({field: value}))
    with pytest.raises(RunDirError, match=says):
        read_checkpoint(newest)
    found = two_saved.load_latest()
    assert found is not None and found.steps == 10 and says in found.skipped[newest.name]


def test_values_or_arrays_of_another_kind_are_refused(two_saved: Checkpoints) -> None:
    newest = two_saved.folder / two_saved.names()[0]

    def replace(name: str, data: bytes) -> None:
        (newest / name).write_bytes(data)
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        reseal(newest, lambda fields: fields["files"].update({name: entry}))

    replace(VALUES, b"[1]")
    with pytest.raises(RunDirError, match=r"values.json is not an object"):
        read_checkpoint(newest)
    replace(VALUES, b"[" * 100_000)
    with pytest.raises(RunDirError, match=r"values.json is not readable"):
        read_checkpoint(newest)
    replace(VALUES, b"{}")
    replace(ARRAYS, b"no tensors")
    with pytest.raises(RunDirError, match=r"arrays.safetensors is not readable"):
        read_checkpoint(newest)
    replace(ARRAYS, safetensors.numpy.save({"other": np.zeros(3)}))
    with pytest.raises(RunDirError, match="holds no weights"):
        read_checkpoint(newest)


def test_a_checkpoint_of_something_else_is_refused_naming_the_field(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(*make(10), info={"env": "CartPole-v1", "score": np.float32(0.5), "by": {10: 1, 2: 3}})
    found = kept.load_latest(expect={"env": "CartPole-v1"})
    assert found is not None and found.info == {"env": "CartPole-v1", "score": 0.5, "by": {"10": 1, "2": 3}}
    with pytest.raises(RunDirError, match=r"has env 'CartPole-v1', but this run has 'LunarLander-v3'"):
        kept.load_latest(expect={"env": "LunarLander-v3"})


# --- keeping


def test_the_last_three_are_kept_and_the_same_step_again_is_newer(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    for steps in (10, 20, 30, 40):
        kept.save(*make(steps))
    assert kept.names() == ["000000000040-4", "000000000030-3", "000000000020-2"]
    again = make(40)._replace(weights=np.ones(3, np.float32))
    kept.save(*again)
    assert kept.names() == ["000000000040-4.1", "000000000040-4", "000000000030-3"]
    assert_is(kept.load_latest(), again)


def test_the_best_is_one_even_if_it_came_earlier(tmp_path: Path) -> None:
    best = Checkpoints(tmp_path, keep=1)
    best.save(*make(40))
    best.save(*make(20))  # resumed from before 40, and better
    assert best.names() == ["000000000020-2"]
    assert_is(best.load_latest(), make(20))


def test_a_reader_is_not_disturbed_by_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Checkpoints(tmp_path, keep=1)
    best.save(*make(10))
    names = iter([best.names()])
    best.save(*make(20))
    reader = Checkpoints(tmp_path, keep=1)
    listed = reader.names
    monkeypatch.setattr(reader, "names", lambda: next(names, None) or listed())
    assert_is(reader.load_latest(), make(20))


def test_what_cannot_be_stored_exactly_is_refused(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    with pytest.raises(RunDirError, match="cannot hold these arrays"):
        kept.save(1, 1, State({"names": np.array(["a"])}), np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"put arrays in State.arrays"):
        kept.save(1, 1, State({}, {"x": np.zeros(2)}), np.zeros(3, np.float32))
    assert os.listdir(tmp_path) == []


def test_a_save_of_a_small_agent_takes_little_processor_time(tmp_path: Path) -> None:
    weights = np.zeros(10_000, np.float32)
    state = State({"m": weights, "v": weights}, {"rng": np.random.default_rng(0).bit_generator.state})
    kept = Checkpoints(tmp_path)
    took = []
    for steps in range(10):
        start = time.process_time()
        kept.save(steps, 0, state, weights)
        took.append(time.process_time() - start)
    assert sorted(took)[5] < 0.02  # seconds; the wall time is the disk's, some milliseconds for each fsync
