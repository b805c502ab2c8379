"""What is fetched of a checkpoint that is named by its id on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_jax.conversion.files import TOKENIZER_FILES
from eagle3_jax.sources import locate


def test_all_that_is_read_of_a_checkpoint_is_fetched_and_no_more(tmp_path: Path, monkeypatch) -> None:
    """The hub's own filter decides; the chat template is a file of its own in what newer transformers write."""
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    weights = ("model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    read = {*TOKENIZER_FILES, *weights, "config.json", "generation_config.json", "model.safetensors.index.json"}
    other = {"README.md", "optimizer.pt", "model.gguf", "consolidated.00.pth", "tf_model.h5", "original/params.pth"}
    fetched: set[str] = set()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "org/name"
        fetched.update(filter_repo_objects(read | other, allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert locate("org/name", "target") == tmp_path
    assert "chat_template.jinja" in read and fetched == read
