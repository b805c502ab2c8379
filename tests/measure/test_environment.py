"""What a report says of machine, models and prompts: all that matters, and nothing private."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax import __version__
from eagle3_jax.measure.environment import committable, environment, sha256_of, sha256_of_prompts

ROOT = Path(__file__).parent.parent.parent


def test_the_environment_has_versions_and_hashes_and_nothing_private(tmp_path: Path) -> None:
    secret = tmp_path / "weights"
    secret.mkdir()
    (secret / "config.json").write_text("{}")

    facts = environment(target=str(secret), drafter="org/head")
    assert facts["versions"]["numpy"] == np.__version__
    assert facts["versions"]["eagle3_jax"] == __version__
    assert facts["target"] == {"name": "weights", "sha256": sha256_of(secret)}
    assert facts["drafter"] == {"name": "org/head", "sha256": None}
    assert len(facts["prompts"]["sha256"]) == 64

    text = json.dumps(facts)
    for private in (str(tmp_path), str(Path.home()) + "/", str(ROOT), sys.prefix):
        assert private not in text


def test_a_hash_changes_with_any_content_and_any_name(tmp_path: Path) -> None:
    hashes = []
    for name, text in (
        ("model.safetensors", "weights"),
        ("model.safetensors", "weightz"),
        ("other.bin", "weightz"),
    ):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / name).write_text(text)
        hashes.append(sha256_of(folder))
        (folder / "README.md").write_text("does not count")
        assert sha256_of(folder) == hashes[-1]

    assert len(set(hashes)) == 3
    with pytest.raises(ValueError, match="holds no"):
        sha256_of(tmp_path)


def test_prompts_with_different_borders_have_different_hashes() -> None:
    lists = ([[1, 2], [3]], [[1], [2, 3]], [[12], [3]], ["1,2", "3"], [[3], [1, 2]])
    assert len({sha256_of_prompts(prompts) for prompts in lists}) == len(lists)
    assert sha256_of_prompts([np.array([1, 2])]) == sha256_of_prompts([[1, 2]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytest validation --target /home/me/models/head-3", "pytest validation --target head-3"),
        ("--target=~/models/x -k 'a or b'", "--target=x -k 'a or b'"),
        ("No such file: '/root/x/y.json'", "No such file: 'y.json'"),
        ("http://secret.example:8000/v1 refused", "http://HOST/v1 refused"),
        ("http://localhost:8000/v1 refused", "http://localhost:8000/v1 refused"),
        ("373 tokens/s, org/name, 3/4 of 5 /s", "373 tokens/s, org/name, 3/4 of 5 /s"),
    ],
)
def test_text_of_a_report_names_no_directory_and_no_host(text: str, expected: str) -> None:
    assert committable(text) == expected
