"""``eagle3 oracle``: our verdicts keep the definitions, and its program finds injected errors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.cli import run
from eagle3_jax.oracle import write_oracle

CHECK = Path(__file__).parent.parent.parent / "eagle3_jax" / "oracle" / "check.py"
SOURCE = CHECK.read_text(encoding="utf-8")
# For each error: a case that must show it, and the statement of `check.py` that makes an engine
# have it.
_COMMITTED_ONLY = ("z, texts[n], prompt)", "z, texts[0], prompt)")
_FIRST_FAILURE = "np.argmin([True, *passes[1:], False]) - 1"
_ACCEPTED = 'if row["accept"][node] * row["q"][node][token] < target[token]'
FAULTS = {
    "everything is accepted": ("temperature", (_ACCEPTED, "if True")),
    "the residual is not reduced": (
        "siblings",
        ('np.maximum(target - row["q"][node], 0)', "target"),
    ),
    "q is taken for a point mass": ("top_p", ('if "q" in case else', 'if "Q" in case else')),
    "a rejected draft stays in the cache": (
        "eagle3_greedy",
        ('out["length"] - 1', 'out["length"]'),
    ),
    "a penalty is counted once a round": ("penalties", _COMMITTED_ONLY),
    "the mask of the root is used for all nodes": ("grammar", _COMMITTED_ONLY),
    "min-p is dropped": ("min_p", ('z.max() + np.log(case["min_p"])', "-np.inf")),
    "top-p keeps a token too many": (
        "top_p",
        ("before >= top_p", "before - weights[order] >= top_p"),
    ),
    "the block ends at the first failure": ("block", ("*np.flatnonzero(passes)", _FIRST_FAILURE)),
    "log-probabilities are of changed logits": (
        "repetition",
        ("scores = logits", "scores = np.log(row['p'])"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "out"
    assert run(["oracle", str(out)]) == 0
    return out


def check(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", folder / "check.py", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def verdicts(
    folder: Path, name: str, statement: tuple[str, str] = ("", "")
) -> dict[str, np.ndarray]:
    """Returns the results of an engine that has a statement replaced."""
    engine = engine_of(statement)
    with np.errstate(all="ignore"):
        results = engine.expected(dict(np.load(folder / "cases" / f"{name}.npz")))
    return {f"{name}.{array}": values for array, values in results.items()}


def engine_of(statement: tuple[str, str] = ("", "")) -> types.ModuleType:
    assert statement[0] in SOURCE
    engine = types.ModuleType("engine")
    exec(SOURCE.replace(*statement) if statement[0] else SOURCE, vars(engine))
    return engine


def test_our_verdicts_keep_the_definitions(folder: Path, tmp_path: Path) -> None:
    done = check(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(list((folder / "cases").iterdir()))
    assert all(line.endswith(": agrees") for line in lines)
    np.savez(tmp_path / "mine.npz", **verdicts(folder, "siblings"))
    done = check(folder, "--verdicts", tmp_path / "mine.npz")
    # Of the other cases nothing was compared.
    assert (done.returncode, done.stdout) == (0, "siblings: agrees\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_error_is_found_and_its_case_named(
    folder: Path, tmp_path: Path, fault: str
) -> None:
    name, statement = FAULTS[fault]
    np.savez(tmp_path / "mine.npz", **verdicts(folder, name, statement))
    done = check(folder, "--verdicts", tmp_path / "mine.npz")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: {name}.") and len(done.stdout.splitlines()) == 1


def test_an_array_of_no_case_is_refused(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", **{"nothing.path": np.zeros(3), "top_k.nothing": np.zeros(3)})
    done = check(folder, "--verdicts", tmp_path / "mine.npz")
    assert done.returncode == 1
    assert "nothing.path: no such case" in done.stdout
    assert "top_k: top_k.nothing has another name or shape" in done.stdout


@pytest.mark.parametrize("arguments", [["."], ["oracle", "--verdicts", "nothing.npz"]])
def test_nothing_to_compare_is_no_agreement(
    folder: Path, tmp_path: Path, arguments: list[str]
) -> None:
    np.savez(tmp_path / "nothing.npz")
    (tmp_path / "oracle").symlink_to(folder)
    command = [sys.executable, CHECK, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "nothing to compare\n")


@pytest.mark.parametrize(
    "arguments", [[], ["--verdict", "mine.npz"], ["--verdicts"], ["--verdicts", "nowhere"]]
)
def test_other_arguments_are_refused(folder: Path, arguments: list[str]) -> None:
    command = [sys.executable, CHECK, *([folder, *arguments] if arguments else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "") and "--verdicts MINE.npz" in done.stderr


def test_every_array_is_listed_in_its_file_and_defined_on_the_page(folder: Path) -> None:
    page = (folder / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    defined = {name.strip("` ") for row in rows for name in row.split(",")}
    written = set()
    for path in (folder / "cases").iterdir():
        case = np.load(path)
        about = json.loads(str(case["about"]))
        assert {"about", *about["arrays"]} == {*case}, path.stem
        written |= {*case}
    assert written == defined


def test_drafts_are_accepted_and_rejected_and_no_decision_is_near_a_tie(folder: Path) -> None:
    engine = engine_of()
    for path in (folder / "cases").iterdir():
        case = dict(np.load(path))
        assert 0 < case["num_accepted"].sum() < case["path"].size, path.stem

        for offset in (-1e-5, 1e-5):
            shifted = {name: case[name] + offset for name in ("accept", "choose")}
            results = engine.expected({**case, **shifted})
            assert np.array_equal(results["path"], case["path"]), path.stem
            assert np.array_equal(results["next_token"], case["next_token"]), path.stem


def test_the_program_needs_numpy_alone_and_is_short() -> None:
    assert len(SOURCE.splitlines()) < 180
    modules = set()
    for node in ast.walk(ast.parse(SOURCE)):
        modules |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        modules |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert {name.split(".")[0] for name in modules} - sys.stdlib_module_names == {"numpy"}


def test_the_folder_is_small_and_two_runs_write_the_same_bytes(
    folder: Path, tmp_path: Path
) -> None:
    write_oracle(tmp_path / "again")
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sum((folder / path).stat().st_size for path in files) < 5_000_000
    assert [
        path
        for path in files
        if (folder / path).read_bytes() != (tmp_path / "again" / path).read_bytes()
    ] == []


def test_a_directory_that_exists_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["oracle", str(folder)]) == 2
    assert "exists already; give a new directory" in capsys.readouterr().err
