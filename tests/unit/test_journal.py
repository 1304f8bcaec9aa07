"""The journal keeps whole lines through crashes, resumes and full disks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe import journal
from troupe.errors import RunDirError
from troupe.journal import Journal


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def lines(path: Path) -> list[dict[str, object]]:
    return list(Journal.read(path))


def test_a_line_has_its_time_its_kind_and_its_fields(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "metrics.jsonl"
    with Journal(path, clock=clock) as written:
        clock.s += 1.5
        written.write("eval", mean=471.0, text='"é"\n\x1b\udce9', t=99)
    assert lines(path) == [{"t": 1.5, "kind": "eval", "mean": 471.0, "text": '"é"\n\x1b\udce9'}]
    assert path.read_bytes().count(b"\n") == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_numpy_and_what_is_not_finite_become_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as written:
        written.write(
            "odd",
            half=np.float32(0.5),
            count=np.int64(3),
            yes=np.bool_(True),
            pair=np.array([1.5, np.nan]),
            none=float("nan"),
            much=np.float32(np.inf),
            deep={"a": [np.float64("-inf"), (1, 2)], 3: None},
            path=Path("x"),
        )
    (line,) = lines(path)
    del line["t"]
    assert line == {
        "kind": "odd",
        "half": 0.5,
        "count": 3,
        "yes": True,
        "pair": [1.5, None],
        "none": None,
        "much": None,
        "deep": {"a": [None, [1, 2]], "3": None},
        "path": "x",
    }
    for word in (b"NaN", b"Infinity"):
        assert word not in path.read_bytes()


def test_lines_wait_half_a_second_at_most_while_there_is_activity(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "j"
    with Journal(path, clock=clock) as written:
        written.write("a")
        assert lines(path) == []
        clock.s += 0.5
        written.write("b")
        assert [line["kind"] for line in lines(path)] == ["a", "b"]
        written.write("c")
        written.flush()
        assert len(lines(path)) == 3


def test_time_goes_on_over_a_resume_without_the_pause(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "j"
    with Journal(path, clock=clock) as first:
        clock.s += 10
        first.write("a")
    with open(path, "ab") as file:
        file.write(b'{"t":99.0,"ki')  # torn by a crash
    clock.s = 5.0  # another boot
    with Journal(path, clock=clock) as second:
        clock.s += 2
        second.write("b")
    read = Journal.read(path)
    assert [(line["t"], line["kind"]) for line in read] == [(10.0, "a"), (12.0, "b")]
    assert read.skipped == 1


def test_a_very_long_last_line_does_not_hide_the_time(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps({"t": 3.0}) + "\n" + json.dumps({"t": 7.0, "x": "y" * 2 * journal.TAIL_BYTES}) + "\n")
    with Journal(path) as written:
        assert written.now() == pytest.approx(7.0, abs=1.0)


@given(
    cut=st.integers(0, 200), end=st.sampled_from([b"", b"\n", b"null\n", b"[1]\n", b"\xff\xfe\n", b"{" * 5000 + b"\n"])
)
def test_a_cut_anywhere_costs_one_line_at_most(tmp_path_factory: pytest.TempPathFactory, cut: int, end: bytes) -> None:
    path = tmp_path_factory.mktemp("cut") / "j"
    with Journal(path) as written:
        for number in range(5):
            written.write("n", number=number)
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole + end)
    read = Journal.read(path)
    assert len([*read]) >= whole.count(b"\n")
    assert read.skipped <= 1 + bool(end)
    with Journal(path) as written:
        written.write("after")
    assert lines(path)[-1]["kind"] == "after"


def test_a_full_disk_never_raises_and_loses_nothing_that_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    path = tmp_path / "j"
    write = os.write
    room = [30]  # bytes the disk still takes, so that the first line is cut short

    def full(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(fd, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", full)
    written = Journal(path, clock=clock, held_lines=4)
    for number in range(6):
        clock.s += 1
        written.write("n", number=number)
    assert written.failing
    assert written.failures == 6
    assert written.lost == 2
    room[0] = 10_000
    written.write("n", number=6)  # within the half second: not tried yet
    assert written.failing
    clock.s += 1
    written.write("n", number=7)
    assert not written.failing
    written.close()
    read = Journal.read(path)
    assert [line["number"] for line in read] == [3, 4, 5, 6, 7]
    assert read.skipped == 1
    assert written.lost == 3


def test_a_burst_is_written_and_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path, clock=Clock(), held_lines=4) as written:
        for number in range(100):
            written.write("n", number=number)
    assert [line["number"] for line in Journal.read(path)] == list(range(100))
    assert written.lost == 0


def test_a_device_that_is_always_full_is_counted(tmp_path: Path) -> None:
    written = Journal(Path("/dev/full"), flush_s=0.0)
    for _ in range(3):
        written.write("n")
    written.close()
    written.close()
    assert written.failing
    assert written.failures == 4
    assert written.lost == 3
    written.write("after the close")  # a late thread: nothing happens
    written.flush()


def test_several_writers_keep_lines_whole(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journals = [Journal(path, flush_s=0.0) for _ in range(2)]

    def work(number: int) -> None:
        for _ in range(200):
            journals[number % 2].write("n", text="x" * 300)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in journals:
        each.close()
    read = Journal.read(path)
    assert len([*read]) == 800
    assert read.skipped == 0


def test_a_kill_costs_a_moment_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    code = "import sys; from troupe.journal import Journal; from pathlib import Path\n"
    code += "j = Journal(Path(sys.argv[1]))\nn = 0\nwhile True:\n j.write('n', number=n); n += 1\n"
    code += " if n % 5000 == 0: print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=_env()) as child:
        assert child.stdout is not None
        while not path.exists() or path.stat().st_size == 0:
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    read = Journal.read(path)
    numbers = [line["number"] for line in read]
    assert numbers == list(range(len(numbers)))
    assert read.skipped <= 1


def test_a_missing_journal_reads_as_empty_and_a_link_is_refused(tmp_path: Path) -> None:
    assert lines(tmp_path / "none") == []
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="cannot open the journal"):
        Journal(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def _env() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
