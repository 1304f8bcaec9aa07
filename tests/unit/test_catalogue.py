"""`troupe list` names what there is, and refuses what `troupe train` refuses, in the same words."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from troupe import api, catalogue, cli
from troupe.algos import ALGORITHMS
from troupe.errors import ConfigError
from troupe.resolve import presets
from troupe.schemes import SCHEMES
from troupe.transports import TRANSPORTS


def test_everything_is_named_with_a_few_words() -> None:
    known = catalogue.everything()
    for what, table in (("algorithms", ALGORITHMS), ("schemes", SCHEMES), ("transports", TRANSPORTS)):
        assert set(known[what]) == set(table)
        assert all(len(words) > 10 for words in known[what].values())
    assert known["presets"] == presets()
    text = catalogue.text()
    for name in (*ALGORITHMS, *SCHEMES, *TRANSPORTS, *presets(), *known["refused"].values()):
        assert name in text


def test_pairs_refused_for_one_reason_share_a_line_where_it_says_no_more_than_they_do() -> None:
    assert catalogue.together(["a · x", "a · y", "b · x", "b · y"]) == ["a, b · x, y"]
    assert catalogue.together(["a · x", "b · y"]) == ["a · x", "b · y"]
    refused = catalogue.everything()["refused"]
    told = set()
    for line in catalogue.text().partition("refused, and why:")[2].splitlines():
        if line.startswith("      "):
            columns = [column.split(", ") for column in line.strip().split(" · ")]
            told |= {" · ".join(pair) for pair in itertools.product(*columns)}
    assert told == set(refused)


def test_what_is_refused_is_what_train_refuses_word_for_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(api, "launch", lambda config, run, **_: run.name)  # train as far as the curtain
    refused = dict(catalogue.everything()["refused"])
    tried = 0
    for algo in ALGORITHMS:
        for scheme in SCHEMES:
            for via in TRANSPORTS:
                for workers in (1, 2):
                    tried += 1
                    pair = f"{algo} · {scheme} · {via} · {workers} worker{'s' if workers > 1 else ''}"
                    try:
                        api.train("CartPole-v1", algo=algo, scheme=scheme, via=via, workers=workers, envs=64)
                        said = None
                    except ConfigError as e:
                        said = str(e)
                    assert said == refused.pop(pair, None), pair
    assert tried == len(ALGORITHMS) * len(SCHEMES) * len(TRANSPORTS) * 2
    assert not refused
    assert any("local" in pair for pair in catalogue.everything()["refused"])


def test_the_list_is_one_json_object_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == catalogue.everything()
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == catalogue.text().rstrip("\n")
