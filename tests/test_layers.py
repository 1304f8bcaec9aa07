"""Imports point one way: three branches that cannot see each other and meet only above them; and no code from data."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "troupe"

# Lowest first: a module may see the rows above its own, and nothing beside it.
FOUNDATION = (
    "types errors",
    "seeding parameters nets returns transitions episodes region config journal checkpoints",
    "ports envs pulse goal rundir replay plain commons",
)
# The branches: what of the foundation each may see, besides itself. `schemes` is the one that stands on another branch.
BRANCHES = {
    "algos": "types errors seeding parameters nets returns transitions episodes replay plain",  # no role, no scheme
    "roles": "types errors seeding ports envs",  # loops: are handed an algorithm and a mailbox already built
    "schemes": "types errors parameters ports config commons roles",
    "transports": "types errors ports region",  # carry messages, whatever is in them
    "forkwire": "",
    "forkserver": "errors forkwire",
    "deaths": "forkwire",
    "supervisor": "errors pulse deaths forkwire forkserver",  # keeps processes alive, whatever they do
    "broker": "errors",  # a node of RabbitMQ, for whoever connects to it
    "presets": "",
}
# The house, where the branches meet; lowest first, and each row sees everything below it.
HOUSE = (
    "resolve build average books panel eventfiles watchdog warmup signals balance",
    "reviews parts task addresses prepare",
    "cast guests",
    "front",
    "launch join",
    "api",
    "video doctor catalogue figures study",
    "tables",
    "charts",
    "compare",
    "commands",
    "cli",
    "__main__",
)
PACKAGE_FRONT = {"api"}  # what `import troupe` itself may bring, and only on demand

BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "multiprocessing"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_LOADS = {"torch.load", "torch.save", "np.load", "np.save", "numpy.load", "torch.hub.load"}


def rows(table: tuple[str, ...]) -> list[set[str]]:
    return [set(row.split()) for row in table]


def visible() -> dict[str, set[str]]:
    """Module, or package, of troupe -> those it may see."""
    seen: dict[str, set[str]] = {}
    below: set[str] = set()
    for row in rows(FOUNDATION):
        seen |= {name: set(below) for name in row}
        below |= row
    for name, foundation in BRANCHES.items():
        seen[name] = {name, *foundation.split()}
    below |= set(BRANCHES)
    for row in rows(HOUSE):
        seen |= {name: set(below) for name in row}
        below |= row
    return seen


def modules() -> dict[str, ast.Module]:
    """`algos.ppo` -> its syntax tree."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 30, "the source was found"
    return {".".join(f.relative_to(PACKAGE).with_suffix("").parts): ast.parse(f.read_text()) for f in files}


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, wherever in the file; of `from x import y`, both x and x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are written out in full, not relative"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> set[tuple[str, str]]:
    """(importer, imported) among the top modules and packages of troupe."""
    found = set()
    trees = modules()
    tops = {name.split(".")[0] for name in trees}
    for name, tree in trees.items():
        for imported in imports(name, tree):
            parts = imported.split(".")
            if parts[0] == "troupe" and len(parts) > 1 and parts[1] in tops:
                found.add((name.split(".")[0], parts[1]))
    return found


def test_every_module_has_a_place_in_the_layers() -> None:
    placed = set(visible())
    there = {name.split(".")[0] for name in modules()} - {"__init__"}
    assert there - placed == set(), "give a new module its place in the table above"
    assert placed - there == set(), "the table names what is not there"


def test_imports_point_one_way() -> None:
    allowed = visible()
    wrong = {(a, b) for a, b in arrows() if a != "__init__" and b not in allowed[a]}
    assert wrong == set(), f"arrows that the design does not have: {sorted(f'{a} -> {b}' for a, b in wrong)}"


def test_the_branches_cannot_see_each_other() -> None:
    """Said once more without the table, since it is the design: a scheme may stand on roles, all else is apart."""
    branches = ("algos", "roles", "schemes", "transports")
    across = {(a, b) for a, b in arrows() if a in branches and b in branches and a != b}
    assert across <= {("schemes", "roles")}


def test_the_front_of_the_package_brings_only_the_api() -> None:
    assert {b for a, b in arrows() if a == "__init__"} <= PACKAGE_FRONT


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_turns_data_into_code(name: str) -> None:
    tree = modules()[name]
    brought = {imported.split(".")[0] for imported in imports(name, tree)}
    assert brought & BANNED_MODULES == set(), f"{name} imports {brought & BANNED_MODULES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in BANNED_CALLS | BANNED_LOADS, f"{name}:{node.lineno} calls {called}"
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, f"{name}:{node.lineno}"


@pytest.mark.parametrize("heavy", ["torch", "gymnasium", "rich"])
def test_the_command_line_starts_without_what_is_slow_to_import(heavy: str) -> None:
    """`troupe --help` and a typing error are answered at once."""
    code = f"import sys, troupe.cli; print({heavy!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
