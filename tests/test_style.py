"""Style as failing tests: ruff, mypy --strict, and the sizes that keep a file and a function readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES = 400
FUNCTION_LINES = 60
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FILES = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"


def test_the_files_were_found() -> None:
    assert len(SOURCES) > 30


def test_ruff() -> None:
    run("ruff", "check", "src", "tests", "bench")


@pytest.mark.timeout(300)  # without a cache mypy reads torch's stubs once
def test_mypy_strict() -> None:
    run("mypy", "--strict", "src", "tests")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_says_in_its_first_line_what_it_is_for(file: Path) -> None:
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    assert len(first.split()) >= 3, f"{file}: no first line that says what it is for"
    assert file.read_text().startswith(('"""', "#!"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_and_its_functions_are_short(file: Path) -> None:
    text = file.read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES, f"{file} has {lines} lines: give one of its subjects a file of its own"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{file}:{node.lineno} {node.name} has {length} lines"
