"""The panel fits its terminal, says what happened once in plain lines, and never ends the training."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from troupe.panel import Division, Evaluation, Panel, PlainLines, Status, compact, draw, sparkline

EVALUATION = Evaluation(steps=40_000, mean=471.2, sd=22.1, episodes=20, low=461.0, high=481.4)
STATUS = Status(
    run="cartpole-ppo-1",
    algo="ppo",
    scheme="actor-learner",
    env="CartPole-v1",
    workers=2,
    steps=48_123,
    goal="return ≥ 475",
    progress=0.66,
    return_mean=312.4,
    return_windows=[20, 80, 150, 230, 312],
    evaluation=EVALUATION,
    steps_per_s=5234.0,
    waiting_on="environment",
    divisions={"learner": Division(wait=0.48, learn=0.5, send=0.02), "worker 1": Division(play=0.93, wait=0.07)},
    lag_median=1,
    lag_p95=3,
    events=["one", "two", "three", "four"],
    elapsed_s=42.0,
)
EMPTY = Status(run="r", algo="ppo", scheme="local", env="E", workers=1, steps=0)
UGLY = replace(
    STATUS,
    run="r" * 200,
    env="[red]x\x1b[2J\n",
    events=["\x1b]0;owned\x07" + "long " * 100],
    steps=10**18,
    progress=float("nan"),
    return_mean=float("inf"),
    return_windows=[float("nan"), 1e308, -1e308],
    divisions={f"worker {i} {'x' * 50}": Division(play=2.0, wait=float("nan"), learn=-1.0) for i in range(40)},
    elapsed_s=float("nan"),
)


def rendered(status: Status, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(draw(status, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text.splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_shown_at_the_usual_widths(width: int) -> None:
    lines = rendered(STATUS, width)
    assert all(cell_len(line) == width for line in lines)
    text = "\n".join(lines)
    for part in (
        "cartpole-ppo-1 · ppo · actor-learner · CartPole-v1 · 2 workers  0:42",
        "step 48.1 k  ━━━",
        "66% of return ≥ 475",
        "return 312 (100 ep) ▁▂▄▆█",
        "eval 471 ±22.1 (20 ep, 95 % 461 to 481)",
        "5.23 k steps/s",
        "lag 1 (p95 3) versions",
        "waiting on: environment",
        "learner   ▓",
        "play   0%  learn  50%  send   2%  wait  48% │",
        "worker 1  █",
        "• four",
    ):
        assert part in text
    assert "one" not in text  # the last three events only
    assert "…" not in text


def test_only_what_time_went_into_is_named() -> None:
    """Where nobody waits at a lock or for a server, a column of zeros would say that somebody could."""
    assert "exchange" not in "\n".join(rendered(STATUS, 120))
    with_others = replace(STATUS, divisions={"worker 1": Division(play=0.5, learn=0.3, exchange=0.2)})
    text = "\n".join(rendered(with_others, 120))
    assert "exchange  20%" in text and "wait" not in text.replace("waiting", "")


def test_the_bars_are_in_proportion() -> None:
    lines = rendered(STATUS, 120)
    progress = next(line for line in lines if "━" in line)
    assert progress.count("━") / (progress.count("━") + progress.count("─")) == pytest.approx(0.66, abs=0.01)
    learner = next(line for line in lines if "learner  " in line)
    learn, send, wait = (learner.count(block) for block in "▓▒░")
    assert learn / (learn + send + wait) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("status", [EMPTY, STATUS, UGLY, replace(STATUS, progress=7.0)])
def test_no_status_breaks_the_frame_or_reaches_the_terminal(status: Status, width: int) -> None:
    lines = rendered(status, width)
    assert len(lines) <= 20
    assert {cell_len(line) for line in lines} <= {max(width, 20)}
    assert all(character.isprintable() for line in lines for character in line)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.45, "0.45"), (5.2, "5.2"), (99.96, "100"), (312.4, "312"), (999.6, "1 k"), (48_123, "48.1 k")),
        *((5234, "5.23 k"), (1_250_000, "1.25 M"), (-21.04, "-21"), (3e12, "3000 G"), (None, "—"), (float("nan"), "—")),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert compact(value) == text


def test_the_sparkline_goes_from_least_to_greatest() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([9, 9, 1, 8], 2) == "▁█"
    assert sparkline([3, 3, float("nan")], 5) == "▄▄"
    assert sparkline([], 5) == sparkline([1, 2], 0) == ""


def test_plain_lines_are_few_and_each_is_said_once() -> None:
    lines = PlainLines()
    first = replace(STATUS, events=[], evaluation=None)
    assert lines.since(first, 0.0) == ["cartpole-ppo-1: ppo · actor-learner · CartPole-v1 · 2 workers → return ≥ 475"]
    assert lines.since(first, 1.0) == []
    second = replace(first, events=["a\n", "b"], evaluation=EVALUATION)
    assert lines.since(second, 2.0) == ["0:42 a�", "0:42 b", "0:42 eval 471 ±22.1 (20 ep, 95 % 461 to 481)"]
    assert lines.since(second, 3.0) == []
    third = replace(second, events=["b", "c"], elapsed_s=3723.0)
    assert lines.since(third, 9.9) == ["1:02:03 c"]
    assert lines.since(third, 10.0) == [
        "1:02:03 step 48.1 k (66%)  return 312 (100 ep)  5.23 k steps/s  lag 1 (p95 3)  waiting on: environment"
    ]
    assert lines.since(third, 19.9) == []
    assert len(lines.since(third, 20.0)) == 1
    assert lines.since(replace(third, evaluation=replace(EVALUATION, steps=50_000)), 21.0) != []


@pytest.mark.parametrize("live", [True, False])
def test_the_last_state_is_shown_however_short_the_run(live: bool) -> None:
    stream = io.StringIO()
    with Panel(lambda: STATUS, stream=stream, live=live):
        pass
    assert "eval 471" in stream.getvalue()
    assert "four" in stream.getvalue()


def test_a_terminal_sees_four_frames_a_second() -> None:
    calls = []

    def status() -> Status:
        calls.append(threading.current_thread().name)
        return STATUS

    start = time.monotonic()
    with Panel(status, stream=io.StringIO(), live=True):
        time.sleep(1.1)
    assert 3 <= len(calls) <= 4 * (time.monotonic() - start) + 1
    assert set(calls) == {"panel"}


@pytest.mark.parametrize("live", [True, False])
def test_a_status_that_fails_now_and_then_is_asked_again(live: bool) -> None:
    calls: Iterator[Status | Exception] = iter([RuntimeError("not yet"), STATUS])
    stream = io.StringIO()
    recovered = threading.Event()

    def status() -> Status:
        answer = next(calls, STATUS)
        if isinstance(answer, Exception):
            raise answer
        recovered.set()
        return answer

    with Panel(status, stream=stream, live=live):
        assert recovered.wait(10)
    assert "eval 471" in stream.getvalue()


@pytest.mark.parametrize("live", [True, False])
def test_a_closed_stream_or_an_odd_status_ends_the_view_only(live: bool) -> None:
    stream = io.StringIO()
    stream.close()
    with Panel(lambda: STATUS, stream=stream, live=live):
        time.sleep(0.3)
    with Panel(lambda: replace(STATUS, events=None), stream=io.StringIO(), live=live):  # type: ignore[arg-type]
        time.sleep(0.3)


@pytest.mark.parametrize("live", [True, False])
def test_a_broken_pipe_ends_neither_the_training_nor_its_exit(live: bool) -> None:
    code = f"""
import sys, time
from dataclasses import replace
from troupe.panel import Panel, Status
n = 0
def status():
    global n
    n += 1
    return Status("r", "ppo", "local", "E", 1, n, events=[str(n)])
with Panel(status, live={live}):
    time.sleep(1.0)
print("after")
sys.stdout.flush()
sys.stderr.write(f"trained {{n > 0}}")
"""
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, env=env, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "trained True")


def test_a_terminal_without_the_characters_gets_plain_ones() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Panel(lambda: STATUS, stream=stream):
        pass
    assert b"return ? 475" in raw.getvalue()


def test_importing_the_panel_does_not_import_rich() -> None:
    code = "import troupe.panel, sys; sys.exit('rich' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
