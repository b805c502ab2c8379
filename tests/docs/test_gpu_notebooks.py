"""What the notebooks for GPUs share: their configuration, and the banner that says what is real."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import jax
import machine
import pytest
import report
from machine import VARIABLES, Configuration, Machine

from validation.subject import Setting, choose

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks" / "gpu"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"EAGLE3_TARGE": "t"}, "EAGLE3_TARGE is not known"),
        ({"EAGLE3_TARGET": "t"}, "set EAGLE3_DRAFTER"),
        ({"EAGLE3_DRAFTER": "d"}, "set EAGLE3_TARGET"),
        ({"EAGLE3_PROMPTS": "/nowhere.jsonl"}, "no file"),
        ({"EAGLE3_DTYPE": "fp8"}, "expected one of"),
        ({"EAGLE3_VLLM_PYTHON": "/nowhere/python"}, "no file"),
        ({"EAGLE3_VLLM_URL": "localhost:8000"}, "expected the address"),
        ({"EAGLE3_VLLM_PLAIN_URL": "http://"}, "expected the address"),
        ({"EAGLE3_VLLM_PYTHON": __file__, "EAGLE3_VLLM_URL": "http://a"}, "two vLLMs"),
        ({"EAGLE3_VLLM_MEMORY": "1"}, "a share between 0 and 1"),
        ({"EAGLE3_PRICE_PER_HOUR": "0"}, "a price above 0"),
        ({"EAGLE3_PRICE_PER_HOUR": "nan"}, "a price above 0"),
        ({"EAGLE3_PRICE_PER_HOUR": "three"}, "a price above 0"),
        ({"EAGLE3_PRICE_PER_HOUR": "inf"}, "a price above 0"),
        ({"EAGLE3_TARGET": "/nowhere/target", "EAGLE3_DRAFTER": "/nowhere/head"}, "/nowhere/target"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(environ: dict[str, str], said: str) -> None:
    with pytest.raises(SystemExit) as refused:
        machine.start(environ)
    message = str(refused.value)
    assert message.startswith("error: ") and said in message and "\n" not in message


def _machine(*, on_gpu: bool = False, has_gpu: bool = False, **given: object) -> Machine:
    subject = choose(Setting())
    return Machine(Configuration(**given), subject, on_gpu, has_gpu)


def test_without_anything_every_part_has_a_stand_in_and_says_which() -> None:
    banner = _machine().banner("vLLM", "price")
    assert [part.name for part in banner.missing] == ["device", "pair", "vLLM", "price"]
    text = html.unescape(banner._repr_html_())
    for said in ("no GPU: CPU: ", "the shipped pair", "committed record of 20", "EAGLE3_PRICE_PER_HOUR", "stand-in"):
        assert said in text
    assert "Do not quote their numbers" in banner.headline


def test_a_gpu_that_this_jax_cannot_use_ends_a_notebook_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless JAX was told to keep from it; then the banner says so."""
    monkeypatch.setattr("eagle3_jax.bench.gpu.has_gpu", lambda: True)
    monkeypatch.setattr("machine.has_gpu", lambda: True)
    monkeypatch.setattr("machine.share_memory", lambda: None)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        with pytest.raises(
            SystemExit, match=r"^error: .* an NVIDIA GPU is here; .*pip install 'jax\[cuda13\]=="
        ) as ended:
            machine.start({})
        assert "\n" not in str(ended.value)
        jax.config.update("jax_platforms", "cpu")
        (device, _) = machine.start({}).banner().parts
    finally:
        jax.config.update("jax_platforms", before)
    assert not device.real and "JAX_PLATFORMS keeps jax from the NVIDIA GPU" in device.text


def test_text_of_a_banner_cannot_become_markup() -> None:
    here = _machine()
    here.subject = dataclasses.replace(here.subject, name="<script>")
    assert "<script>" not in here.banner()._repr_html_()


def test_every_variable_is_documented_and_no_other() -> None:
    named = set(re.findall(r"EAGLE3_[A-Z_]+", (NOTEBOOKS / "README.md").read_text("utf-8")))
    assert named == set(VARIABLES)


def test_the_report_starts_with_the_verdicts(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    results = [_machine().verdict("greedy", "no <b> disagreement"), _machine().verdict("cost", "half", needs="price")]
    cells = [nbformat.v4.new_markdown_cell("# 01 \u00b7 A notebook, see [02](02_other.ipynb)")]
    for result in (_machine().banner(), *results):
        output = nbformat.v4.new_output("display_data", {"text/html": result._repr_html_()})
        cells.append(nbformat.v4.new_code_cell("show_me()", outputs=[output]))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_one.ipynb")
    text = report.page(tmp_path, expected=["01_one", "02_other"])
    table = text.index("no &lt;b&gt; disagreement")
    assert text.count("rehearsal with stand-ins") == 4, "in the table of verdicts, and where they were found"
    assert table < text.index("2 of 2 parts are stand-ins") < text.index("show_me")
    assert text.count("no result: see notebook") == 5, "verdicts that no notebook found"
    assert "02_other: not executed" in text and "not(:has(#code:checked))" in text
    with pytest.raises(ValueError, match="no executed notebook"):
        report.page(tmp_path / "nothing")
