"""A study: its arithmetic on journals small enough to do by hand, what is run and what is not, and one real one."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from troupe import charts, cli, compare, tables
from troupe.errors import ConfigError, MissingExtra, RunDirError
from troupe.figures import Figures, Spread, quantile, read_figures, spread, time_shares
from troupe.signals import Signals
from troupe.study import Cell, Plan, StudyDir
from troupe.tables import Result

TINY = [
    "--backend=gymnasium", "--envs=8", "--rollout-steps=32", "--minibatch=64", "--epochs=1", "--net=8",
    "--eval-episodes=2",
]  # fmt: skip
ASKED = ["CartPole-v1", "--algo", "ppo", "--until", "solved,minutes=1", "--name", "study", *TINY]
SMALL = [*ASKED, "--schemes", "local,actor-learner", "--workers", "1,2", "--seeds", "2"]  # 2 + 4 runs


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
    return tmp_path / "runs"


def journal(seconds: float, *, reason: str = "solved", episodes: int = 4, steps: int = 1000) -> str:
    """A run's journal in a few lines."""
    shares = {"play": 0.5, "wait": 0.25, "learn": 0.25, "send": 0.0, "steps": steps}
    lines: list[dict[str, Any]] = [
        {"t": 0.0, "kind": "start", "life": 0, "steps": 0},
        {"t": 0.1, "kind": "episodes", "worker": "actor-0", "returns": [1.0] * episodes, "lengths": [9] * episodes},
        {
            "t": 1.0,
            "kind": "progress",
            "return_mean": 20.0,
            "lag_median": 2.0,
            "lag_p95": 4.0,
            "workers": {"a": shares},
        },
        {"t": seconds, "kind": "eval", "mean": 480.0, "sd": 12.5},
        {"t": seconds, "kind": "end", "reason": reason, "steps": steps, "seconds": seconds, "exit_code": 0},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


class Stage:
    """Stands in for the processes that train: writes the journal a run would leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []  # names of the runs, in order
        self.seconds: dict[str, float] = {}
        self.ends: dict[str, str] = {}  # run -> another reason than solved; "" for no end
        self.stop_at = ""
        monkeypatch.setattr(compare, "perform", self.perform)

    def perform(self, command: Sequence[str], runs: Path, log: Path, signals: Signals) -> int:
        name = next(word for word in command if word.startswith("--name=")).removeprefix("--name=")
        assert "--fresh" in command
        self.asked.append(name)
        reason = self.ends.get(name, "solved")
        text = journal(self.seconds.get(name, 10.0), reason=reason)
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "manifest.json").write_text(json.dumps({"troupe_run": name, "schema": 1}))
        (runs / name / "metrics.jsonl").write_text(text if reason else text.rpartition('{"t"')[0])
        log.write_text("" if reason else "Traceback\ntroupe: no floor under it; build one\n")
        if name == self.stop_at:
            signals.number = signal.SIGINT
            return 130
        return 0 if reason else 2


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(charts, "draw", lambda *_: [])
    return Stage(monkeypatch)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def figures(seconds: float, reason: str = "solved", **more: Any) -> Figures:
    known = {
        "steps": 1000, "episodes": 10, "score": 480.0, "score_sd": 9.0, "lag_median": 1.0, "lag_p95": 2.0, "shares": {},
    }  # fmt: skip
    return Figures(reason, seconds, **{**known, **more})


def ended(seconds: Sequence[float], reason: str = "solved", **values: Any) -> list[Result]:
    return [Result(Cell({**values, "seed": s}), "ended", figures=figures(t, reason)) for s, t in enumerate(seconds, 1)]


# The figures of one run ----------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_are_those_of_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(journal(20.0, episodes=5, steps=800) + '{"t": 21.0, "kind": "progr')
    found = read_figures(path)
    assert found is not None
    assert (found.seconds, found.steps, found.episodes) == (20.0, 800, 5)
    assert (found.score, found.score_sd) == (480.0, 12.5)
    assert (found.steps_per_s, found.episode_s) == (40.0, 4.0)
    assert (found.lag_median, found.lag_p95) == (2.0, 4.0)
    assert found.shares == {"play": 0.5, "wait": 0.25, "learn": 0.25, "send": 0.0}
    assert found.curve == [(1.0, 20.0)]


def test_only_an_end_that_was_meant_ends_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_figures(path) is None
    for reason in ("interrupted by SIGINT", "CartPole-v1 did not return from step within 60 s"):
        path.write_text(journal(9.0, reason=reason))
        assert read_figures(path) is None
    path.write_text(journal(9.0, reason="limit"))
    assert read_figures(path) is not None
    path.write_text(journal(9.0) + '{"t": 9.5, "kind": "start", "life": 1}\n')  # resumed by hand, and still at it
    assert read_figures(path) is None
    path.write_text("".join(journal(9.0).splitlines(keepends=True)[:-1]))
    assert read_figures(path) is None


def test_shares_of_time_take_whatever_parts_there_are() -> None:
    workers = {
        "a": {"play": 0.5, "lock": 0.5, "steps": 7},
        "b": {"play": 1.0, "steps": 9},
        "silent": {"play": 0.0, "steps": 0},
    }
    assert time_shares(workers) == {"play": 0.75, "lock": 0.25}
    assert time_shares({}) == {}


# Spread over seeds ---------------------------------------------------------------------------------------------------


def test_few_runs_have_a_range_and_five_have_quartiles() -> None:
    assert spread([]) is None
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 1.0, 5.0, (2.0, 4.0))
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert quantile([1.0, math.inf], 0.5) == math.inf
    assert quantile([math.inf, math.inf], 0.5) == math.inf


def test_a_run_cut_off_by_its_limit_counts_as_longer_than_all_that_solved() -> None:
    assert spread([10.0, 60.0, 30.0], [False, True, False]) == Spread(30.0, 10.0, 60.0, high_open=True)
    cut = spread([10.0, 60.0, 60.0], [False, True, True])
    assert cut == Spread(60.0, 10.0, 60.0, bound=">", high_open=True)
    assert tables.text(cut, 1) == "> 60.0 (10.0 to > 60.0)"
    early = spread([50.0, 20.0, 30.0], [False, True, True])  # a limit in steps: those cut off may have been quick
    assert early is not None
    assert (early.median, early.bound) == (30.0, ">")
    assert spread([1.0, 2.0, 3.0, 4.0, 4.0], [False, False, False, True, True]) == Spread(3.0, 1.0, 4.0, high_open=True)


def test_a_speed_up_is_a_ratio_of_medians_and_says_when_it_is_a_bound() -> None:
    one, two = Spread(12.0, 10.0, 15.0), Spread(6.0, 4.0, 8.0, (5.0, 7.5))
    assert one.speed_up(one) == Spread(1.0, 0.8, 1.2)
    assert one.speed_up(two) == Spread(2.0, 1.5, 3.0, (1.6, 2.4))
    slow = Spread(60.0, 60.0, 60.0, bound=">", high_open=True)
    faster, slower = slow.speed_up(one), one.speed_up(slow)
    assert faster is not None and slower is not None
    assert (faster.median, faster.bound) == (5.0, ">")
    assert (slower.median, slower.bound) == (0.2, "<")
    assert slow.speed_up(slow) is None


# The table -----------------------------------------------------------------------------------------------------------


def test_the_table_is_the_arithmetic_of_its_runs() -> None:
    results = [
        *ended([16.0, 20.0, 24.0], algo="a3c", scheme="hogwild", workers=1),
        *ended([8.0, 5.0, 10.0], algo="a3c", scheme="hogwild", workers=2),
        *ended([40.0, 30.0, 50.0], algo="a3c", scheme="local", workers=1),
        *ended([7.0], algo="ppo", scheme="local", workers=1),
    ]
    table = tables.rows(results, goal=True)
    assert [tuple(row.values.values()) for row in table] == [
        ("a3c", "local", 1), ("a3c", "hogwild", 1), ("a3c", "hogwild", 2), ("ppo", "local", 1),
    ]  # fmt: skip
    two = table[2].spreads
    assert two["train_s"] == Spread(8.0, 5.0, 10.0)
    assert two["speed_up"] == Spread(2.5, 2.0, 4.0)
    assert two["speed_up_local"] == Spread(5.0, 4.0, 8.0)
    assert two["episode_s"] == Spread(0.8, 0.5, 1.0)
    assert two["episodes"] == Spread(10.0, 10.0, 10.0)
    assert two["steps_per_s"] == Spread(125.0, 100.0, 200.0)
    line = tables.table_md("t", table, []).splitlines()[6]
    assert line.startswith("| a3c | hogwild | 2 | 3 of 3 | 8.0 (5.0 to 10.0) | 8.0 (5.0 to 10.0) | 10 | 0.8000 (0.5")
    assert "| 2.50 (2.00 to 4.00) | 5.00 (4.00 to 8.00) |" in line


def test_not_solved_is_kept_apart() -> None:
    results = [*ended([10.0], algo="ppo", scheme="local", workers=1)]
    results += [
        Result(Cell({**results[0].cell.values, "seed": s}), "ended", figures=figures(60.0, "limit")) for s in (2, 3)
    ]
    (row,) = tables.rows(results, goal=True)
    assert (row.solved, len(row.ended)) == (1, 3)
    assert "| 1 of 3 | > 60.0 (10.0 to > 60.0) | 10.0 |" in tables.table_md("t", [row], [])
    (line,) = csv.DictReader(tables.table_csv([row]).splitlines())
    assert (line["train_s_median"], line["train_s_bound"], line["train_s_of_solved_median"]) == ("60", ">", "10")


def test_where_there_is_no_score_to_reach_the_budget_is_the_training() -> None:
    (row,) = tables.rows(ended([10.0, 12.0], "limit", algo="ppo", scheme="local", workers=1), goal=False)
    assert row.spreads["train_s"] == Spread(11.0, 10.0, 12.0)
    assert "solved" not in tables.table_md("t", [row], [])


def test_where_there_is_no_score_to_reach_a_speed_up_is_one_of_steps() -> None:
    def lasting(steps: int, workers: int) -> Result:
        cell = Cell({"algo": "a3c", "scheme": "hogwild", "workers": workers, "seed": 1})
        return Result(cell, "ended", figures=figures(30.0, "limit", steps=steps))

    _, two = tables.rows([lasting(3000, 1), lasting(5400, 2)], goal=False)
    found = two.spreads["speed_up"]
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((1.8, 1.8, 1.8))


def test_what_has_no_figures_says_why() -> None:
    def cells(state: str, why: str, **values: Any) -> list[Result]:
        return [Result(Cell({**values, "seed": seed}), state, why) for seed in (1, 2)]

    table = tables.rows(
        [
            *cells("refused", "hogwild moves the weights", algo="ppo", scheme="hogwild", workers=1),
            *cells("failed", "killed by SIGKILL", algo="a3c", scheme="hogwild", workers=1),
            *cells("not run", "", algo="a3c", scheme="local", workers=1),
        ],
        goal=True,
    )
    page = tables.table_md("t", table, ["a note"])
    assert "- ppo hogwild 1 worker: refused: hogwild moves the weights\n" in page
    assert "- a3c hogwild 1 worker: failed: 2 of 2 (killed by SIGKILL)\n" in page
    assert "- a3c local 1 worker: 2 of 2 not run yet\n" in page
    assert page.endswith("\n\na note\n")
    assert "refused: hogwild" in tables.table_csv(table)


# What is asked, and what is run --------------------------------------------------------------------------------------


def plan(*words: str) -> Plan:
    from troupe.commands import parsed

    env, options = cli.parse_options("compare", list(words))
    return compare.plan(env, options, parsed(options))


def test_a_study_is_every_combination_and_local_once() -> None:
    asked = plan(
        "CartPole-v1", "--algo", "a3c,ppo", "--schemes", "local,actor-learner", "--workers", "2,4", "--seeds", "2"
    )
    names = [cell.name for cell in asked.cells()]
    one = [
        "a3c-local-w1", "a3c-actor-learner-w2", "a3c-actor-learner-w4", "ppo-local-w1", "ppo-actor-learner-w2",
        "ppo-actor-learner-w4",
    ]  # fmt: skip
    assert names == [f"{name}-s{seed}" for seed in (1, 2) for name in one]
    assert asked.left_out() == "scheme local is one process: it has runs with one worker only"


def test_each_cell_is_an_ordinary_run() -> None:
    asked = plan("CartPole-v1", "--algo", "a3c", "--schemes", "actor-learner", "--workers", "2", "--seeds", "1",
                 "--until", "steps=9", "--env-delay-ms", "2", "--envs-per-worker", "3", "--no-overlap")  # fmt: skip
    (cell,) = asked.cells()
    command = asked.command(cell)
    assert command[1:5] == ["-m", "troupe", "train", "CartPole-v1"]
    assert sorted(command[5:]) == sorted([
        "--until=steps=9", "--env-delay-ms=2", "--overlap=false", "--algo=a3c", "--scheme=actor-learner", "--workers=2",
        "--seed=1", "--envs=6", "--name=a3c-actor-learner-w2-s1", "--fresh", "--quiet",
    ])  # fmt: skip
    config = asked.config(cell)
    assert (config.envs, config.env_delay_ms, config.overlap, config.algo) == (6, 2.0, False, "a3c")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--algo ppo", "no environment was named: troupe compare ENV"),
        ("CartPole-v1 --schemes locl", "there is no scheme 'locl'; did you mean local?"),
        ("CartPole-v1 --algo pppo", "there is no algorithm 'pppo'; did you mean ppo?"),
        ("CartPole-v1 --scheme local", "give --schemes instead of --scheme"),
        ("CartPole-v1 --seed 3", "give --seeds instead of --seed"),
        ("CartPole-v1 --workers 1,x", "--workers x is wrong: give 1 or more"),
        ("CartPole-v1 --seeds 0", "--seeds 0 is wrong: give 1 or more"),
        ("CartPole-v1 --envs 4 --envs-per-worker 1", "give one of them"),
        ("CartPole-v1 --gama 0.9", "'gama' is not an option of troupe train with ppo; did you mean gamma?"),
        ("CartPole-v1 --until solved", "--until solved has no limit"),
        ("CartPole-v1 --schemes actor-learner --workers 3 --envs 4", "every combination is refused: --envs 4 cannot"),
        ("CartPol-v1 --until minutes=1", "there is no environment 'CartPol-v1': did you mean CartPole-v1?"),
        ("CartPole-v1 --name ../x", "cannot be a run's name"),
        ("CartPole-v1 --env-delay-ms 60000", "--env-delay-ms 60000 is not below --step-timeout-s 60"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert cli.main(["compare", *words.split()]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert not runs.exists()


def test_any_option_that_is_given_several_values_is_varied(stage: Stage, runs: Path) -> None:
    words = [*ASKED, "--schemes", "local,actor-learner", "--workers", "1", "--seeds", "1", "--gamma", "0.9,0.99",
             "--rollout-steps", "16,32", "--overlap=true,false", "--observation-scale", "1,1,1,1"]  # fmt: skip
    asked = plan(*words)
    assert sorted(asked.more) == ["gamma", "overlap", "rollout_steps"]
    assert "gamma" not in asked.options and asked.options["observation_scale"] == "1,1,1,1"
    assert len(asked.cells()) == 2 * 2 * 2 * 2
    config = asked.config(asked.cells()[-1])
    assert (config.hyper["gamma"], config.hyper["rollout_steps"], config.overlap) == (0.99, 32, False)
    assert cli.main(["compare", *words]) == 0
    assert stage.asked[0] == "ppo-local-w1-rollout_steps16-gamma0.9-overlaptrue-s1"
    lines = read_csv(runs / "study" / "table.csv")
    assert {(line["gamma"], line["rollout_steps"]) for line in lines} == {
        ("0.9", "16"), ("0.9", "32"), ("0.99", "16"), ("0.99", "32"),
    }  # fmt: skip
    assert "| rollout_steps | gamma | overlap |" in (runs / "study" / "table.md").read_text()


def test_several_values_where_one_is_wrong_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *ASKED, "--gamma", "0.9,1.5"]) == 2
    assert "gamma '1.5' is wrong" in capsys.readouterr().err


def test_a_cell_that_ended_is_not_run_again(stage: Stage, runs: Path) -> None:
    assert cli.main(["compare", *SMALL]) == 0
    assert len(stage.asked) == len(set(stage.asked)) == 6
    assert cli.main(["compare", *SMALL]) == 0
    assert len(stage.asked) == 6
    path = runs / "study" / stage.asked[3] / "metrics.jsonl"
    path.write_text(path.read_text().rpartition('{"t"')[0])  # as if it had been killed before its end
    assert cli.main(["compare", *SMALL]) == 0
    assert stage.asked[6:] == [stage.asked[3]]
    assert cli.main(["compare", *SMALL, "--fresh"]) == 0
    assert stage.asked[7:] == stage.asked[:6]


def test_ctrl_c_keeps_what_there_is_and_the_same_command_goes_on(
    stage: Stage, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "ppo-actor-learner-w1-s1"
    stage.stop_at, stage.ends[first] = first, ""
    assert cli.main(["compare", *SMALL]) == 130
    assert stage.asked == ["ppo-local-w1-s1", first]
    states = {line["run"]: line["state"] for line in read_csv(runs / "study" / "cells.csv")}
    assert [states["ppo-local-w1-s1"], states[first], states["ppo-local-w1-s2"]] == ["ended", "interrupted", "not run"]
    assert "not run yet" in (runs / "study" / "table.md").read_text()
    stage.stop_at, stage.ends = "", {}
    capsys.readouterr()
    assert cli.main(["compare", *SMALL]) == 0
    assert f"begun anew for the sake of an honest time: {first}" in capsys.readouterr().out
    assert len(stage.asked) == 2 + 5


def test_a_failure_is_told_and_the_study_goes_on(stage: Stage, runs: Path) -> None:
    failing = "ppo-actor-learner-w2-s1"
    stage.ends[failing] = ""
    assert cli.main(["compare", *SMALL]) == 1
    assert len(stage.asked) == 6
    line = next(line for line in read_csv(runs / "study" / "cells.csv") if line["run"] == failing)
    assert (line["state"], line["why"]) == ("failed", "no floor under it; build one")
    page = (runs / "study" / "table.md").read_text()
    assert "- ppo actor-learner 2 workers: failed: 1 of 2 (no floor under it; build one)" in page
    stage.ends = {}
    assert cli.main(["compare", *SMALL]) == 0
    assert stage.asked[6:] == [failing]


def test_a_pair_that_is_refused_is_a_row_and_is_not_run(stage: Stage, runs: Path) -> None:
    words = [*ASKED, "--schemes", "local,actor-learner", "--workers", "1,3", "--seeds", "1"]  # 8 environments
    assert cli.main(["compare", *words]) == 0
    assert stage.asked == ["ppo-local-w1-s1", "ppo-actor-learner-w1-s1"]
    lines = read_csv(runs / "study" / "table.csv")
    assert lines[2]["workers"] == "3"
    assert lines[2]["note"].startswith("refused: --envs 8 cannot be spread evenly over --workers 3")
    assert "refused: --envs 8 cannot" in (runs / "study" / "table.md").read_text()


def test_a_study_of_other_options_is_refused_unless_fresh(
    stage: Stage, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *SMALL]) == 0
    capsys.readouterr()
    assert cli.main(["compare", *SMALL, "--gamma", "0.9", "--seeds", "3"]) == 2
    said = capsys.readouterr().err
    assert "was asked with other options (gamma, seed): repeat its command to go on" in said
    assert said.count("\n") == 1
    assert len(stage.asked) == 6
    (runs / "study" / "mine.txt").write_text("kept")
    assert cli.main(["compare", *SMALL, "--gamma", "0.9", "--seeds", "1", "--fresh"]) == 0
    assert len(stage.asked) == 6 + 3
    assert not (runs / "study" / "ppo-local-w1-s2").exists()
    assert (runs / "study" / "mine.txt").read_text() == "kept"
    asked = tomllib.loads((runs / "study" / "study.toml").read_text())
    assert asked["vary"]["seed"] == [1]
    assert asked["options"]["gamma"] == "0.9"


def test_without_a_name_the_same_command_finds_its_study(stage: Stage, runs: Path) -> None:
    words = [word for word in SMALL if word not in ("--name", "study")]
    for extra in ([], [], ["--gamma", "0.9"], []):
        assert cli.main(["compare", *words, *extra]) == 0
    assert sorted(path.name for path in runs.iterdir()) == ["compare-cartpole-v1-1", "compare-cartpole-v1-2"]
    assert len(stage.asked) == 12


def test_a_folder_of_somebody_elses_or_in_use_is_left_alone(
    stage: Stage, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "study").mkdir(parents=True)
    (runs / "study" / "thesis.tex").write_text("x")
    for words in (SMALL, [*SMALL, "--fresh"]):
        assert cli.main(["compare", *words]) == 2
        assert "is in the way and is no study: take another --name" in capsys.readouterr().err
    assert [path.name for path in (runs / "study").iterdir()] == ["thesis.tex"]
    asked = plan(*SMALL)
    with (
        StudyDir(runs / "other").held(asked, fresh=False),
        pytest.raises(RunDirError, match="is being run by another process: wait for it"),
        StudyDir(runs / "other").held(asked, fresh=False),
    ):
        pass
    assert stage.asked == []


def test_options_of_a_config_file_count_as_asked(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('env = "CartPole-v1"\nseed = 9\nname = "x"\nuntil = "minutes=1"\n\n[hyper]\ngamma = 0.9\n')
    words = ["--config", str(file), "--algo", "ppo", "--schemes", "local", "--workers", "1", "--name", "study"]
    assert cli.main(["compare", *words]) == 0
    assert stage.asked == [f"ppo-local-w1-s{seed}" for seed in (1, 2, 3)]
    file.write_text(file.read_text().replace("0.9", "0.8"))
    assert cli.main(["compare", *words]) == 2
    with pytest.raises(ConfigError, match="'gama'"):
        asked = plan("CartPole-v1", "--gama", "1")
        asked.config(asked.cells()[0])


# Processes -----------------------------------------------------------------------------------------------------------

SLEEPER = "import os,signal,time; print(os.getpid(), os.environ['TROUPE_RUNS'], flush=True); time.sleep(60)"


def test_a_signal_is_passed_on_once_and_what_was_said_is_kept(tmp_path: Path) -> None:
    signals, log = Signals(), tmp_path / "x.log"
    command = [sys.executable, "-c", SLEEPER]
    threading.Timer(0.5, lambda: setattr(signals, "number", signal.SIGTERM)).start()
    begin = time.monotonic()
    assert compare.perform(command, tmp_path, log, signals) == -signal.SIGTERM
    assert time.monotonic() - begin < 20
    assert log.read_text().split()[1] == str(tmp_path.resolve())
    assert compare._reason(-9, log).startswith("killed by SIGKILL: ")
    log.write_text("warning\ntroupe: it is so; do that\nafterwards\n")
    assert compare._reason(2, log) == "it is so; do that"
    log.write_text("")
    assert compare._reason(1, log) == "exit code 1"


def test_a_run_does_not_outlive_a_study_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom troupe.compare import perform\nfrom troupe.signals import Signals\n"
        f"perform([sys.executable, '-c', {SLEEPER!r}], Path('.'), Path('x.log'), Signals())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as study:
        deadline = time.monotonic() + 60
        while not (tmp_path / "x.log").exists() or not (tmp_path / "x.log").read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        study.kill()
    pid = int((tmp_path / "x.log").read_text().split()[0])
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Charts --------------------------------------------------------------------------------------------------------------


def test_charts_are_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        *ended([10.0, 12.0], algo="ppo", scheme="local", workers=1),
        *ended([60.0, 60.0], "limit", algo="ppo", scheme="actor-learner", workers=1),
        *ended([6.0, 5.0], algo="ppo", scheme="actor-learner", workers=2),
        Result(Cell({"algo": "a3c", "scheme": "local", "workers": 1, "seed": 1}), "failed", "x"),
    ]
    files = charts.draw(tmp_path, "CartPole-v1", tables.rows(results, goal=True))
    assert [file.name for file in files] == ["study-ppo.png", "learning.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_without_matplotlib_there_are_tables_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    Stage(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra):
        charts.draw(runs, "CartPole-v1", [])
    assert cli.main(["compare", *ASKED, "--schemes", "local", "--seeds", "1"]) == 0
    assert "no charts: matplotlib, which draws charts, is not installed" in capsys.readouterr().out
    assert (runs / "study" / "table.md").exists()


# A real one ----------------------------------------------------------------------------------------------------------


def test_a_small_study_from_the_command_line(runs: Path) -> None:
    words = [
        "CartPole-v1", "--algo", "ppo", "--schemes", "local,actor-learner", "--workers", "1", "--seeds", "1",
        "--until", "steps=2000", "--name", "study", *TINY,
    ]  # fmt: skip
    command = [sys.executable, "-m", "troupe", "compare", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    folder = runs / "study"
    lines = read_csv(folder / "cells.csv")
    assert [line["run"] for line in lines] == ["ppo-local-w1-s1", "ppo-actor-learner-w1-s1"]
    for line in lines:
        assert (line["state"], line["reason"]) == ("ended", "limit")
        assert 2000 <= int(line["steps"]) < 3000
        assert float(line["train_s"]) > 0
        assert int(line["episodes"]) > 10
        assert (folder / line["run"] / "checkpoints").is_dir()  # an ordinary run, to be played and evaluated
    assert {path.name for path in folder.iterdir()} >= {"study.toml", "table.csv", "table.md", "logs"}
    written = [(folder / line["run"] / "manifest.json").stat().st_mtime_ns for line in lines]
    assert cli.main(["compare", *words, "--quiet"]) == 0
    assert [(folder / line["run"] / "manifest.json").stat().st_mtime_ns for line in lines] == written
