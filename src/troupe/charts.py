"""The charts of a study as PNG files: four panels against the number of workers, and the learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from troupe.errors import MissingExtra
from troupe.study import ALONE
from troupe.tables import Row
from troupe.types import Scalar

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: Final = (
    ("episodes", "episodes to train", "episodes"),
    ("train_s", "total time to train", "seconds"),
    ("episode_s", "time per episode", "seconds"),
    ("speed_up", "speed-up over one worker", "times as fast"),
)
# Okabe and Ito's colours, which the colour-blind can tell apart; each with a marker of its own.
LOOKS: Final = (
    ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"),
    ("#8C6D1F", "X"),
)  # fmt: skip
GREY: Final = "#555555"
DPI: Final = 130
SHIFT: Final = 1.035  # between two schemes at the same number of workers, so that their bars do not hide each other


def draw(folder: Path, env: str, table: Sequence[Row]) -> list[Path]:
    """Draw all charts into `folder`; their files. MissingExtra without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401 - whether it is there
    except ImportError as e:
        raise MissingExtra("matplotlib, which draws charts,", "plots") from e
    shown = [row for row in table if row.ended]
    looks = _looks(shown)
    files = []
    for algo in _distinct(shown, "algo"):
        figure = _study(f"{env}, {algo}", [row for row in shown if row.values["algo"] == algo], looks)
        files.append(_save(figure, folder / f"study-{algo}.png"))
    files.append(_save(_learning(env, shown, looks), folder / "learning.png"))
    return files


def _looks(table: Sequence[Row]) -> dict[Scalar, tuple[str, str]]:
    """Colour and marker of each scheme, the same in every chart; the reference is black."""
    schemes = [scheme for scheme in _distinct(table, "scheme") if scheme != ALONE]
    return {ALONE: ("#000000", "*"), **{name: LOOKS[i % len(LOOKS)] for i, name in enumerate(schemes)}}


def _distinct(table: Sequence[Row], option: str) -> list[Scalar]:
    return list(dict.fromkeys(row.values[option] for row in table))


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI, facecolor="white")
    return path


# Four panels against the number of workers ----------------------------------------------------------------------------


def _study(title: str, table: Sequence[Row], looks: Mapping[Scalar, tuple[str, str]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.2), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    workers = sorted({int(row.values["workers"]) for row in table})
    for axes, (name, heading, unit) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _panel(axes, name, table, looks)
        _workers_axis(axes, workers)
        axes.set_title(heading, loc="left", fontsize=11)
        axes.set_ylabel(unit)
        if name == "speed_up":
            axes.plot(workers, workers, color=GREY, linestyle=":", linewidth=1.2, label="ideal", zorder=1)
            axes.set_yscale("log", base=2)  # so that the ideal is a straight line
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
    seeds = max(len(row.results) for row in table)
    note = f"Marks: median of {seeds} seed{'s'[: seeds > 1]}; bars: lowest to highest."
    if any(spread is not None and spread.bound for row in table for spread in row.spreads.values()):
        note += " Hollow marks: a median run spent its budget first, so the true value lies beyond."
    entries = _entries(figure.axes)
    figure.legend(*entries, loc="outside lower center", ncols=8, frameon=False, title=note, title_fontsize=9)
    return figure


def _panel(axes: Axes, name: str, table: Sequence[Row], looks: Mapping[Scalar, tuple[str, str]]) -> None:
    schemes = _distinct(table, "scheme")
    for scheme in schemes:
        colour, marker = looks[scheme]
        rows = [row for row in table if row.values["scheme"] == scheme and row.spreads[name] is not None]
        found = [spread for row in rows if (spread := row.spreads[name]) is not None]
        if not found or (scheme == ALONE and name == "speed_up"):
            continue
        others = [s for s in schemes if s != ALONE]
        shift = 1.0 if scheme == ALONE else SHIFT ** (others.index(scheme) - (len(others) - 1) / 2)
        x = [int(row.values["workers"]) * shift for row in rows]
        y = [spread.median for spread in found]
        # of two runs the median lies between, and rounding must not make a bar of negative length
        bars = [[max(0.0, s.median - s.low) for s in found], [max(0.0, s.high - s.median) for s in found]]
        axes.errorbar(x, y, yerr=bars, color=colour, linewidth=1.8, elinewidth=1.1, capsize=3, zorder=3)
        line = "--" if scheme == ALONE else "-"
        axes.plot([], [], line, color=colour, marker=marker, linewidth=1.8, markersize=7, label=str(scheme))
        for spread, at in zip(found, x, strict=True):
            face = "white" if spread.bound else colour
            axes.plot(at, spread.median, marker, color=colour, markerfacecolor=face, markersize=7, zorder=4)
        if scheme == ALONE:
            axes.axhline(y[0], color=colour, linestyle="--", linewidth=0.9, alpha=0.6, zorder=1)


def _workers_axis(axes: Axes, workers: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(workers)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(workers), [str(n) for n in workers])
    axes.set_xlim(workers[0] / 1.2, workers[-1] * 1.2)
    axes.set_xlabel("workers")
    _calm(axes)


def _calm(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _entries(every: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Handles and labels for one legend of several panels, each label once."""
    found: dict[str, Artist] = {}
    for axes in every:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), handle)
    return list(found.values()), list(found)


# Learning curves ------------------------------------------------------------------------------------------------------


def _learning(env: str, table: Sequence[Row], looks: Mapping[Scalar, tuple[str, str]]) -> Figure:
    """One row of panels an algorithm, one column a number of workers, one thin line a seed."""
    from matplotlib.figure import Figure

    algos, workers = _distinct(table, "algo"), sorted({int(row.values["workers"]) for row in table})
    size = (2.2 + 3.1 * len(workers), 1.3 + 2.9 * len(algos))
    figure = Figure(figsize=(max(6.4, size[0]), size[1]), layout="constrained")
    figure.suptitle(f"{env}: return while training", fontsize=14, fontweight="bold", x=0.01, ha="left")
    grid = figure.subplots(len(algos), len(workers), squeeze=False, sharex="row", sharey=True)
    for row in table:
        axes = grid[algos.index(row.values["algo"])][workers.index(int(row.values["workers"]))]
        colour = looks[row.values["scheme"]][0]
        for i, figures in enumerate(row.ended):
            if figures.curve:
                x, y = zip(*figures.curve, strict=True)
                label = str(row.values["scheme"]) if i == 0 else "_"
                axes.plot(x, y, color=colour, linewidth=1.0, alpha=0.8, label=label)
    for i, algo in enumerate(algos):
        for j, count in enumerate(workers):
            axes = grid[i][j]
            _calm(axes)
            axes.set_title(f"{algo}, {count} worker{'s'[: count > 1]}", loc="left", fontsize=10)
            if i == len(algos) - 1:
                axes.set_xlabel("seconds of training")
        grid[i][0].set_ylabel("mean return of 100 episodes")
    figure.legend(*_entries(figure.axes), loc="outside lower center", ncols=5, frameon=False)
    return figure
