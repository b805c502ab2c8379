"""A record is older than its code if statements changed that it depends on, and only then."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import release

FILES = {
    "eagle3_jax/measured/run.py": '"""Prose."""\nfrom eagle3_jax import below, fields\n\nNUMBER = 1\n',
    "eagle3_jax/below.py": "async def value():\n    return 1\n",
    "eagle3_jax/other.py": "NUMBER = 1\n",
    "eagle3_jax/fields.py": "class Fields:\n    size: int\n",
    "eagle3_jax/measured/weights.bin": "1",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    for cached in (
        release.parts_since,
        release.folders_of,
        release.imported_by,
        release.statements_at,
    ):
        cached.cache_clear()
    commit(tmp_path, FILES)
    yield tmp_path
    for cached in (release.folders_of, release.imported_by):
        cached.cache_clear()


def commit(folder: Path, files: dict[str, str]) -> str:
    """Writes files and commits them; returns the commit."""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *words]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "m")
    return git("rev-parse", "HEAD")


@pytest.fixture
def reasons(repository: Path) -> Callable[..., list[str]]:
    """Why a record of the first commit is old after files have changed."""
    first = release.git("rev-parse", "HEAD")

    def call(
        files: dict[str, str], *, commit_of: str = first, dirty: bool = False, **fields: list[str]
    ) -> list[str]:
        about = {"versions": {"eagle3_jax": "1.0"}, "git": {"commit": commit_of, "dirty": dirty}}
        value = {"rows": [{"environment": about | {"date": "2026-01-02T03:04"}}], **fields}
        commit(repository, files | {"record.json": json.dumps(value)})
        record = release.Record(
            name="r", about="", files=["record.json"], command="", code=["measured", "validation/"]
        )
        assert record.stamps == [release.Stamp("2026-01-02", "1.0", commit_of, dirty)]
        return record.changes()

    return call


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"eagle3_jax/other.py": "NUMBER = 2\n"},
        {"validation/results/host-memory.json": "{}"},
        {
            "eagle3_jax/measured/run.py": "from eagle3_jax import below, fields\n\nNUMBER = 1  # a word\n"
        },
        {"eagle3_jax/below.py": 'async def value() -> int:\n    """A word."""\n    return 1\n'},
    ],
)
def test_other_packages_and_words_leave_a_record_current(
    reasons: Callable[..., list[str]], change: dict[str, str]
) -> None:
    assert reasons(change) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"eagle3_jax/measured/run.py": "NUMBER = 2\n"}, "measured changed"),
        ({"eagle3_jax/below.py": "async def value():\n    return 2\n"}, "below changed"),
        ({"eagle3_jax/fields.py": "class Fields:\n    size: float\n"}, "fields changed"),
        ({"validation/results/aot.json": "{}"}, "validation changed"),
        ({"eagle3_jax/measured/more.py": "NUMBER = 2\n"}, "measured changed"),
        ({"eagle3_jax/measured/weights.bin": "2"}, "measured changed"),
    ],
)
def test_a_statement_that_a_record_depends_on_makes_it_old(
    reasons: Callable[..., list[str]], change: dict[str, str], reason: str
) -> None:
    assert reasons(change) == [reason]


def test_a_record_of_an_unknown_or_changed_tree_is_old(reasons: Callable[..., list[str]]) -> None:
    assert reasons({}, commit_of="0" * 40) == ["0000000000 is not in the history"]
    assert "had uncommitted changes" in reasons({}, dirty=True)[0]


def test_a_record_that_lacks_measurements_is_old(reasons: Callable[..., list[str]]) -> None:
    assert reasons({}, to_measure=["4 at once"]) == ["it lacks 4 at once"]


def test_a_night_without_a_part_or_a_family_is_a_fault(repository: Path) -> None:
    results = {
        "bugs": {"verdict": "pass", "families": "all"},
        "fuzzing": {"verdict": "fail", "families": "all"},
        "contracts": {"verdict": "pass", "families": "of the day"},
    }
    files = {
        release.NIGHT: json.dumps(results),
        release.NIGHT_RUN: "PARTS = dict.fromkeys(['bugs', 'fuzzing', 'contracts', 'tunix'])",
    }
    commit(repository, files)
    assert release.faults_of_the_night() == [
        "fuzzing: fail",
        "contracts: not with FAMILIES=all",
        "tunix: not run",
    ]


def test_a_record_without_a_file_or_a_commit_is_old(repository: Path) -> None:
    record = release.Record(name="r", about="", files=["r.json"], command="", code=["measured"])
    assert record.changes() == ["there is no such file"]
    (repository / "r.json").write_text('{"rows": []}')
    assert record.changes() == ["it does not name its commit"]


def test_every_entry_names_files_and_code_that_exist() -> None:
    entries = release.records()
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        for part in entry.code:
            assert (release.ROOT / part).exists() if "/" in part else release.paths_of(part)
        assert entry.machine in ("any", "quiet", "gpu")
