"""The command line: quick to help, and one sentence with exit code 2 for whatever cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from troupe import cli, commands
from troupe.checkpoints import replace_file
from troupe.config import Config
from troupe.journal import Journal
from troupe.resolve import presets, resolve
from troupe.types import Array

HERE = __name__
TROUPE = [sys.executable, "-m", "troupe"]
HELP_S = 0.3
TINY = [
    "--scheme=local", "--via=memory", "--backend=gymnasium", "--envs=8", "--rollout-steps=32", "--minibatch=64",
    "--epochs=1", "--net=8", "--eval-episodes=2", "--eval-from=1e9", "--until=steps=256", "--quiet",
]  # fmt: skip
RESUME = ["resume", "a", "--via=memory", "--quiet"]


class Broken(gymnasium.Env[Array, np.int64]):
    """Of a kind that the agents cannot act in, or one that fails, as it is asked."""

    def __init__(self, fault: str = "") -> None:
        if fault == "make":
            raise RuntimeError("no licence")
        self.observation_space = spaces.Dict({}) if fault == "observation" else spaces.Box(-1, 1, (2,), np.float32)  # type: ignore[assignment]
        self.action_space = spaces.MultiBinary(3) if fault == "action" else spaces.Discrete(2)  # type: ignore[assignment]
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        if self.fault == "reset":
            raise ValueError("several\nlines")
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        if self.fault == "step":
            raise ValueError("no floor")
        return np.full(2, np.nan if self.fault == "nan" else 0.0, np.float32), 1.0, False, False, {}


def needs_a_library() -> gymnasium.Env[Any, Any]:
    raise gymnasium.error.DependencyNotInstalled("MuJoCo is not installed")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the current folder
    return tmp_path / "runs"


class Told:
    """Runs a command in this process that must be refused, and gives its one sentence."""

    def __init__(self, capsys: pytest.CaptureFixture[str], runs: Path) -> None:
        self.capsys, self.runs = capsys, runs

    def __call__(self, *arguments: str) -> str:
        before = sorted(self.runs.rglob("*"))
        self.capsys.readouterr()
        assert cli.main(arguments) == 2
        said = self.capsys.readouterr()
        assert said.err.count("\n") == 1, said.err
        assert said.err.startswith("troupe: ")
        assert "Traceback" not in said.err
        assert said.out == ""
        assert sorted(self.runs.rglob("*")) == before  # nothing is left behind
        return said.err


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], runs: Path) -> Told:
    return Told(capsys, runs)


def train(*arguments: str) -> int:
    return cli.main(["train", "CartPole-v1", *TINY, *arguments])


# Help --------------------------------------------------------------------------------------------------------------


def test_help_is_quick() -> None:
    took = []
    for _ in range(12):  # other work on the machine only ever adds to it
        begin = time.perf_counter()
        done = subprocess.run([*TROUPE, "--help"], capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - begin)
        if took[-1] < HELP_S:
            break
    assert min(took) < HELP_S
    assert "troupe train LunarLander-v3" in done.stdout
    assert "exit codes: 0 the goal was met, 2 " in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["eval", "--help"], []])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom troupe import cli\n"
        f"try: cli.main({arguments!r})\nexcept SystemExit: pass\n"
        "assert not {'torch', 'gymnasium', 'rich', 'envpool'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_of_train_names_every_option_with_the_presets_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "LunarLander-v3", "--help"]) == 0
    text = capsys.readouterr().out
    config = resolve({"env": "LunarLander-v3"})
    for name in (*Config.__struct_fields__, *config.hyper):
        if name not in ("env", "hyper"):
            assert name.replace("_", "-") in text
    assert f"(default {json.dumps(config.hyper['learning_rate'])})" in text
    assert "--[no-]overlap" in text
    assert cli.main(["train", "--algo", "impala", "--help"]) == 0
    assert "options of impala:" in capsys.readouterr().out
    assert cli.main(["resume", "--help"]) == 0
    assert "usage: troupe resume RUN" in capsys.readouterr().out


# Reading the words -------------------------------------------------------------------------------------------------


def test_options_are_read_in_every_form() -> None:
    words = "CartPole-v1 --workers 2 --no-overlap --net=64x64 --tensorboard --until solved --fresh --eval-from=-3"
    subject, options = cli.parse_options("train", words.split(" "))
    assert subject == "CartPole-v1"
    assert options == {
        "workers": "2", "overlap": "false", "net": "64x64", "tensorboard": "true", "until": "solved", "fresh": True,
        "eval_from": "-3",
    }  # fmt: skip
    assert cli.parse_options("train", ["--eval-from", "-3", "E"]) == ("E", {"eval_from": "-3"})
    flags = ["E", "--algo", "dqn", "--dueling", "--no-double", "--gamma", "0.9", "--with-replacement=false"]
    assert cli.parse_options("train", flags) == (
        "E", {"algo": "dqn", "dueling": "true", "double": "false", "gamma": "0.9", "with_replacement": "false"},
    )  # fmt: skip


def test_texts_become_tables_and_lists() -> None:
    options = {"env_options": "a=1,b=0.5,c=True,d=text,e=", "observation_scale": "1,0.5", "seed": "3"}
    assert commands.parsed(options) == {
        "env_options": {"a": 1, "b": 0.5, "c": True, "d": "text", "e": ""},
        "observation_scale": ["1", "0.5"],
        "seed": "3",
    }


# What cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("CartPol-v1", "there is no environment 'CartPol-v1': did you mean CartPole-v1?"),
        ("no.module:Env", "there is no module 'no' to import here"),
        ("CartPole-v1 --algo pppo", "there is no algorithm 'pppo'; did you mean ppo?"),
        ("CartPole-v1 --scheme actor-lerner", "there is no scheme 'actor-lerner'; did you mean actor-learner?"),
        ("CartPole-v1 --via memry", "there is no transport 'memry'; did you mean memory?"),
        ("CartPole-v1 --wrkers 2", "'wrkers' is not an option of troupe train with ppo; did you mean workers?"),
        ("CartPole-v1 --gama 0.9", "'gama' is not an option of troupe train with ppo; did you mean gamma?"),
        ("CartPole-v1 --wrkers", "'wrkers' is not an option of troupe train with ppo; did you mean workers?"),
        ("CartPole-v1 --workers", "--workers needs a value"),
        ("CartPole-v1 --workers --fresh", "--workers needs a value"),
        ("CartPole-v1 LunarLander-v3", "'LunarLander-v3' is one word too many after 'CartPole-v1'"),
        ("--workers 2", "no environment was named"),
        ("CartPole-v1 --workers 0", "--workers 0: nobody would play; give 1 or more"),
        ("CartPole-v1 --workers -1", "workers '-1' is wrong: expected `int` >= 0"),
        ("CartPole-v1 --workers many", "workers 'many' is wrong: expected `int`"),
        ("CartPole-v1 --scheme local --workers 2", "--workers 2 makes no sense: use --scheme actor-learner"),
        ("CartPole-v1 --workers 3 --scheme actor-learner --envs 32", "evenly over --workers 3: take --envs 30"),
        ("CartPole-v1 --until solvd", "that is no goal; did you mean solved?"),
        ("CartPole-v1 --until steps=inf", "'inf' is not a number"),
        ("MountainCarContinuous-v0 --until solvd", "that is no goal"),
        ("CartPole-v1 --net 64*64", "give widths such as 64x64"),
        ("CartPole-v1 --net os:path", "--net os:path cannot be used: TypeError: 'module' object is not callable"),
        ("CartPole-v1 --minibatch 999999", "--minibatch 999999 is more than the"),
        ("CartPole-v1 --name ../x", "cannot be a run's name"),
        ("CartPole-v1 --config /no/such.toml", "cannot read the config file /no/such.toml"),
        ("Blackjack-v1", "observation space Tuple is not supported"),
        (f"{HERE}:Broken --env-options fault=observation", "observation space Dict is not supported"),
        (f"{HERE}:Broken --env-options fault=action", "action space MultiBinary(3) is not supported"),
        (f"{HERE}:Broken --env-options fault=make", f"{HERE}:Broken could not be made: RuntimeError: no licence"),
        (f"{HERE}:Broken --env-options fault=reset", f"{HERE}:Broken raised in reset: ValueError: lines"),
        (f"{HERE}:Broken --env-options fault=step", f"{HERE}:Broken raised in step: ValueError: no floor"),
        (f"{HERE}:Broken --env-options fault=nan", f"{HERE}:Broken returned nan in an observation of step"),
        (f"{HERE}:needs_a_library", "install it with  pip install 'troupe[mujoco]'"),
    ],
)  # fmt: skip
def test_train_refuses_in_one_sentence(told: Told, arguments: str, sentence: str) -> None:
    extra = [] if "--via" in arguments else ["--via=memory"]  # no processes for what never begins
    assert sentence in told("train", *extra, "--quiet", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("trian CartPole-v1", "invalid choice: 'trian' (choose from "),
        ("eval", "the following arguments are required: run"),
        ("eval nothing", "there is no run nothing in"),
        ("play nothing", "there is no run nothing in"),
        ("resume nothing --via memory", "there is no run nothing in"),
        ("resume --via memory", "which run? troupe resume RUN"),
        ("resume nothing --via memory --fresh", "to start again: troupe train ENV --name RUN --fresh"),
        ("eval nothing --episodes 0", "0 is not a count: give 1 or more"),
        ("eval nothing --which worst", "invalid choice: 'worst'"),
        ("list --jsn", "unrecognized arguments: --jsn"),
    ],
)
def test_the_other_commands_do_too(told: Told, arguments: str, sentence: str) -> None:
    assert sentence in told(*arguments.split())


def test_a_refusal_ends_the_process_with_code_two_and_leaves_nothing(runs: Path) -> None:
    """With the default transport, whose processes are being started by then."""
    done = subprocess.run([*TROUPE, "train", "CartPol-v1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "troupe: there is no environment 'CartPol-v1': did you mean CartPole-v1?\n"
    assert not runs.exists()


def test_many_workers_are_warned_of_and_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(workers: int, **more: Any) -> str:
        commands.warn(resolve({"env": "CartPole-v1", "workers": workers, **more}))
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == (told.err != "")
        return told.err

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(commands, "available_bytes", lambda: 4 << 30)
    assert said(2) == said(8) == ""
    assert said(9) == "troupe: 9 workers on 2 cores will mostly wait for each other: --workers 2 is likely faster\n"
    assert said(32, env_delay_ms=10.0) == "", "they wait for their environments, and need no core for that"
    assert said(500, env_delay_ms=10.0) == (
        "troupe: 500 workers take about 48.8 GiB, where 4.0 GiB of memory are free: --workers 40 would fit\n"
    )


# Runs folders and run directories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file/runs", "file", "/proc/troupe-runs"])
def test_a_runs_folder_that_cannot_be_written(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    root = tmp_path / where  # /proc stays /proc, where nothing can be made whoever asks
    monkeypatch.setenv("TROUPE_RUNS", str(root))
    sentence = told("train", "CartPole-v1", *TINY)
    assert "cannot create the run" in sentence
    assert str(root) in sentence
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("writes", range(4))
def test_a_disk_that_is_full_after_so_many_writes(
    told: Told, runs: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/runs/a/x")

    def replace_until_full(path: Path, data: bytes) -> None:
        nonlocal writes
        writes -= 1
        if writes < 0:
            full()
        replace_file(path, data)

    runs.mkdir()
    monkeypatch.setattr("troupe.rundir.replace_file", replace_until_full)
    monkeypatch.setattr("troupe.rundir.Journal", full)
    assert "No space left on device" in told("train", "CartPole-v1", *TINY)


def test_a_folder_that_is_no_run(told: Told, runs: Path) -> None:
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / "thesis.tex").write_text("x")
    named = ["train", "CartPole-v1", *TINY, "--name", "mine"]
    for arguments in (["eval", "mine"], ["resume", "mine", "--via", "memory"], named, [*named, "--fresh"]):
        assert "mine is not a run directory" in told(*arguments)


def test_a_run_of_another_environment_or_network(told: Told) -> None:
    assert train("--name", "a") == 0
    another = ["train", "Acrobot-v1", *TINY, "--name", "a"]
    assert "the run a was made with env = 'CartPole-v1': it cannot go on with 'Acrobot-v1'" in told(*another)
    wider = ["train", "CartPole-v1", *TINY, "--net", "16", "--name", "a"]
    assert "made with net = '8': it cannot go on with '16'" in told(*wider)
    assert "made with algo = 'ppo': it cannot go on with 'a3c'" in told(*RESUME, "--algo", "a3c")
    assert "made with activation = " in told(*RESUME, "--activation", "elu")
    assert "'gama' is not an option" in told(*RESUME, "--gama", "1")


def checkpoints(run: Path) -> list[Path]:
    return sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir())


def spoil(path: Path) -> None:
    file = path / "arrays.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_skipped_by_name_for_the_newest_valid_one(runs: Path) -> None:
    assert train("--name", "a") == 0
    assert cli.main([*RESUME, "--until", "steps=512"]) == 0
    valid, damaged = checkpoints(runs / "a")
    spoil(damaged)
    assert cli.main([*RESUME, "--until", "steps=768"]) == 0
    records = list(Journal.read(runs / "a" / "metrics.jsonl"))
    texts = [record["text"] for record in records if record["kind"] == "event"]
    assert any(f"checkpoint {damaged.name} was skipped: " in text for text in texts)
    assert any("resumed at 256 steps" in text for text in texts)
    assert [record["steps"] for record in records if record["kind"] == "start"] == [0, 256, 256]
    assert valid in checkpoints(runs / "a")


def test_a_run_without_one_valid_checkpoint_does_not_start_again_unasked(told: Told, runs: Path) -> None:
    assert train("--name", "a") == 0
    shutil.rmtree(runs / "a" / "best")
    (runs / "a" / "best").mkdir()
    for path in checkpoints(runs / "a"):
        spoil(path)
    for arguments in (RESUME, ["eval", "a"]):
        sentence = told(*arguments)
        assert "no checkpoint in" in sentence
        assert "start again with --fresh" in sentence
    assert train("--name", "a", "--fresh") == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("env = ", "is not valid TOML"), ('env = "E"\nworkerz = 3', "'workerz' is not an option"), (None, "cannot read")],
)
def test_a_run_whose_config_is_damaged(told: Told, runs: Path, text: str | None, sentence: str) -> None:
    assert train("--name", "a") == 0
    file = runs / "a" / "config.toml"
    file.unlink()
    if text is not None:
        file.write_text(text)
    for arguments in (RESUME, ["eval", "a"]):
        assert sentence in told(*arguments)


# What can be -------------------------------------------------------------------------------------------------------


def test_train_resume_and_eval_from_the_command_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--name", "a") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "goal reached: eval " in said.out
    assert f"run {runs / 'a'} · play it: troupe play {runs / 'a'}" in said.out
    assert train("--name", "a", "--until", "steps=512") == 0  # the same name resumes
    assert cli.main(["eval", "a", "--episodes", "3", "--json", "--which", "latest"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["env"], figures["episodes"], figures["steps"], figures["greedy"]) == ("CartPole-v1", 3, 512, True)
    assert cli.main(["eval", "a", "--episodes", "2", "--sampled"]) == 0
    assert "CartPole-v1 reference, sampled, weights of step" in capsys.readouterr().out
    assert len((runs / "a" / "eval" / "evaluations.jsonl").read_text().splitlines()) == 2
    assert sorted(path.name for path in runs.iterdir()) == ["a"]


def test_a_budget_that_runs_out_before_the_goal_is_exit_code_three(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--until", "score=1000,steps=256") == 3
    assert "budget spent before the goal was met" in capsys.readouterr().out
    assert train("--until", "score=1,steps=256") == 0


def test_a_runs_own_config_file_makes_the_same_run(runs: Path, tmp_path: Path) -> None:
    assert train("--name", "a") == 0
    file = tmp_path / "mine.toml"
    shutil.copy(runs / "a" / "config.toml", file)
    assert cli.main(["train", "--config", str(file), "--name", "b", "--via=memory", "--quiet"]) == 0
    first, second = ((runs / name / "config.toml").read_text() for name in "ab")
    assert first.replace('name = "a"', 'name = "b"') == second


def test_presets_are_what_train_uses(capsys: pytest.CaptureFixture[str]) -> None:
    for env, table in presets().items():
        assert cli.main(["train", env, "--help"]) == 0
        assert f"(default {json.dumps(table['until'])})" in capsys.readouterr().out
