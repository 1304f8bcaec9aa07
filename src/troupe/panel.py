"""The terminal view of a run: a live panel on a terminal, a few plain lines anywhere else. It never ends a training."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:  # rich costs 100 ms to import: only a panel that is really drawn pays it
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

REFRESH_S: Final = 0.25
PROGRESS_LINE_S: Final = 10.0
EVENTS_SHOWN: Final = 3
ROLES_SHOWN: Final = 8
JOIN_S: Final = 5.0

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
# Each part has a shade of its own too, for a terminal without colours.
_PARTS: Final = (
    ("play", "█", "green"),
    ("learn", "▓", "magenta"),
    ("send", "▒", "blue"),
    ("wait", "░", "yellow"),
    ("exchange", "▚", "cyan"),
    ("parse", "▞", "red"),
)


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation on the reference environment."""

    steps: int  # environment steps trained when it began
    mean: float
    sd: float
    episodes: int
    low: float  # 95 % interval of the mean
    high: float


@dataclass(frozen=True)
class Division:
    """What one process did with its time, as fractions of it."""

    play: float = 0.0
    wait: float = 0.0
    learn: float = 0.0
    send: float = 0.0
    exchange: float = 0.0
    parse: float = 0.0


@dataclass(frozen=True)
class Status:
    """All that the panel shows, at one moment."""

    run: str
    algo: str
    scheme: str
    env: str
    workers: int
    steps: int  # environment steps, summed over all workers
    goal: str = ""  # "return ≥ 475", "1 M steps"
    progress: float | None = None  # towards the goal, 0 to 1
    return_mean: float | None = None  # of the last 100 training episodes
    return_windows: Sequence[float] = ()  # means of recent windows, oldest first
    evaluation: Evaluation | None = None
    steps_per_s: float | None = None
    waiting_on: str = ""  # what limits the speed: "environment", "learning"...
    divisions: dict[str, Division] = field(default_factory=dict)  # by role: "learner", "worker 1"...
    lag_median: float | None = None  # versions between the weights that acted and those that learned from it
    lag_p95: float | None = None
    events: Sequence[str] = ()  # the last ones, oldest first
    elapsed_s: float = 0.0


class Panel:
    """Shows `status()` while the block runs: 4 times a second on a terminal, else in lines when something happens."""

    def __init__(self, status: Callable[[], Status], *, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._status = status
        self._stream = stream if stream is not None else sys.stdout
        self._live = _can_draw(self._stream) if live is None else live
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="panel", daemon=True)

    def __enter__(self) -> Panel:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)  # a terminal that takes no more output must not hold the training's end

    def _run(self) -> None:
        try:
            (self._draw if self._live else self._print)()
        except BrokenPipeError:
            _silence(self._stream)
        except Exception:  # a closed stream, an odd status: the view ends, the training must not
            return

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        live = Live(console=console, auto_refresh=False)
        with live:
            while True:
                last = self._stop.wait(REFRESH_S)
                self._refresh(live, console.width)
                if last:
                    return

    def _refresh(self, live: Live, width: int) -> None:
        status = self._now()
        if status is not None:
            live.update(draw(status, width), refresh=True)

    def _print(self) -> None:
        lines = PlainLines()
        while True:
            last = self._stop.wait(REFRESH_S)
            status = self._now()
            for line in lines.since(status, time.monotonic()) if status is not None else ():
                self._write(line)
            if last:
                return

    def _write(self, line: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:  # a log file on a full disk: this line is lost, the next may be taken
            return

    def _now(self) -> Status | None:
        try:
            return self._status()
        except Exception:  # the view is not worth the run: the next refresh asks again
            return None


class PlainLines:
    """What to print next where there is no terminal: a start line, evaluations and events, progress now and then."""

    def __init__(self, progress_s: float = PROGRESS_LINE_S) -> None:
        self._progress_s = progress_s
        self._last_progress: float | None = None
        self._evaluation: Evaluation | None = None
        self._events: list[str] = []

    def since(self, status: Status, now_s: float) -> list[str]:
        """The lines that are due."""
        lines = []
        if self._last_progress is None:
            lines.append(f"{_clean(status.run)}: {' · '.join(_heading(status))}" + _after(" → ", _clean(status.goal)))
            self._last_progress = now_s
        lines += [f"{_clock(status.elapsed_s)} {_clean(event)}" for event in _new(self._events, list(status.events))]
        self._events = list(status.events)
        if status.evaluation is not None and status.evaluation != self._evaluation:
            lines.append(f"{_clock(status.elapsed_s)} eval {evaluation_text(status.evaluation)}")
            self._evaluation = status.evaluation
        if now_s - self._last_progress >= self._progress_s:
            lines.append(f"{_clock(status.elapsed_s)} {'  '.join(_numbers(status))}")
            self._last_progress = now_s
        return lines


def draw(status: Status, width: int) -> RenderableType:
    """The panel, as wide as the terminal."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel as Frame
    from rich.text import Text

    inner = max(width - 4, 20)  # the frame and a space on either side
    rows = [_progress_row(status, inner), _return_row(status, inner), _speed_row(status, inner)]
    if status.divisions:
        rows += [Text(), *_division_rows(status, inner)]
    events = [Text.assemble(("• ", "dim"), _clean(event)) for event in list(status.events)[-EVENTS_SHOWN:]]
    if events:
        rows += [Text(), *events]
    for row in rows:
        row.no_wrap = True
        row.overflow = "ellipsis"
    title = Text.assemble(
        (_clean(status.run), "bold"),
        *((f" · {part}", "cyan" if i == 0 else "") for i, part in enumerate(_heading(status))),
    )
    title.truncate(max(inner - 12, 8), overflow="ellipsis")
    title.append(f"  {_clock(status.elapsed_s)}", "dim")
    return Frame(Group(*rows), title=title, title_align="left", box=box.ROUNDED, border_style="dim", width=width)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, from the least of them to the greatest."""
    shown = [value for value in values if math.isfinite(value)][-width:] if width > 0 else []
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    if not 0 < span < math.inf:
        return _BLOCKS[3] * len(shown)
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def compact(value: float | None) -> str:
    """Three digits at most, with k, M or G: 48 k, 5.2 k, 312, 0.45."""
    if value is None or not math.isfinite(value):
        return "—"
    scaled, unit = float(value), ""
    for unit in ("", " k", " M", " G"):
        if abs(scaled) < 999.5 or unit == " G":
            break
        scaled /= 1000
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    text = f"{scaled:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if digits else text) + unit


def evaluation_text(evaluation: Evaluation) -> str:
    """471 ±22 (20 ep, 95 % 461 to 481)."""
    return (
        f"{compact(evaluation.mean)} ±{compact(evaluation.sd)} "
        f"({evaluation.episodes} ep, 95 % {compact(evaluation.low)} to {compact(evaluation.high)})"
    )


def _progress_row(status: Status, width: int) -> Text:
    from rich.text import Text

    step = f"step {compact(status.steps)}"
    goal = _clean(status.goal)
    if status.progress is None or not math.isfinite(status.progress):
        return Text.assemble((step, "bold"), (_after("  → ", goal), "dim"))
    done = min(max(status.progress, 0.0), 1.0)
    tail = f" {done:4.0%}" + _after(" of ", goal)
    room = max(width - len(step) - len(tail) - 2, 4)
    filled = round(done * room)
    style = "green" if done >= 1 else "cyan"
    return Text.assemble((step, "bold"), "  ", ("━" * filled, style), ("─" * (room - filled), "dim"), tail)


def _return_row(status: Status, width: int) -> Text:
    from rich.text import Text

    head = Text.assemble("return ", (compact(status.return_mean), "bold"), (" (100 ep) ", "dim"))
    tail = Text()
    if status.evaluation is not None:
        tail = Text.assemble("  eval ", (evaluation_text(status.evaluation), "bold green"))
    room = min(width - head.cell_len - tail.cell_len, 40)
    return head + Text(sparkline(status.return_windows, room), style="cyan") + tail


def _speed_row(status: Status, width: int) -> Text:
    from rich.text import Text

    row = Text.assemble((compact(status.steps_per_s), "bold"), " steps/s")
    if status.lag_median is not None:
        row.append(f"  lag {compact(status.lag_median)} (p95 {compact(status.lag_p95)}) versions")
    if status.waiting_on:
        row.append("  waiting on: ").append(_clean(status.waiting_on), "bold yellow")
    return row


def _division_rows(status: Status, width: int) -> list[Text]:
    from rich.text import Text

    shown = list(status.divisions.items())[:ROLES_SHOWN]
    label = min(max(len(_clean(role)) for role, _ in shown), 16)
    parts = [each for each in _PARTS if any(_fraction(division, each[0]) for _, division in shown)]
    numbers = sum(len(f"  {part} 100%") for part, _, _ in parts)
    room = width - label - 2
    bar = room - numbers if room - numbers >= 10 else room
    rows = []
    for role, division in shown:
        row = Text(f"{_clean(role)[:label]:<{label}}  ")
        total, used = 0.0, 0
        for part, block, style in parts:
            total += _fraction(division, part)
            edge = round(min(total, 1.0) * bar)  # rounding the running sum: the pieces always add up to the whole
            row.append(block * (edge - used), style)
            used = edge
        row.append(" " * (bar - used))
        for part, _, style in parts if bar < room else ():
            row.append(f"  {part} ", "dim").append(f"{_fraction(division, part):4.0%}", style)
        rows.append(row)
    if len(status.divisions) > len(shown):
        rows.append(Text(f"and {len(status.divisions) - len(shown)} more", style="dim"))
    return rows


def _fraction(division: Division, part: str) -> float:
    value = float(getattr(division, part))
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _heading(status: Status) -> list[str]:
    workers = f"{status.workers} worker{'' if status.workers == 1 else 's'}"
    return [_clean(status.algo), _clean(status.scheme), _clean(status.env), workers]


def _numbers(status: Status) -> list[str]:
    numbers = [f"step {compact(status.steps)}"]
    if status.progress is not None and math.isfinite(status.progress):
        numbers[0] += f" ({min(max(status.progress, 0.0), 1.0):.0%})"
    numbers += [f"return {compact(status.return_mean)} (100 ep)", f"{compact(status.steps_per_s)} steps/s"]
    if status.lag_median is not None:
        numbers.append(f"lag {compact(status.lag_median)} (p95 {compact(status.lag_p95)})")
    if status.waiting_on:
        numbers.append(f"waiting on: {_clean(status.waiting_on)}")
    return numbers


def _new(before: list[str], now: list[str]) -> list[str]:
    """What was added at the end of a list that loses its oldest."""
    for kept in range(min(len(before), len(now)), 0, -1):
        if before[-kept:] == now[:kept]:
            return now[kept:]
    return now


def _clock(seconds: float) -> str:
    whole = max(int(seconds), 0) if math.isfinite(seconds) else 0
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _after(word: str, text: str) -> str:
    return word + text if text else ""


def _clean(text: str) -> str:
    """On one line, and without the control characters with which a remote name could steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _can_draw(stream: TextIO) -> bool:
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    with contextlib.suppress(ValueError, OSError):
        return stream.isatty() and encoding == "utf8" and os.environ.get("TERM") != "dumb"
    return False


def _silence(stream: TextIO) -> None:
    """Nobody reads `stream` any more: let later writes, and the flush at exit, go nowhere instead of failing."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
