"""What the notebooks for GPUs share: their configuration, and the banner that says what is real."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path

import jax
import pytest

from validation import machine
from validation.machine import VARIABLES, Configuration, Machine
from validation.runs import Report
from validation.subject import choose

NOTEBOOKS = Path(__file__).parent.parent / "notebooks" / "gpu"


def test_nothing_is_named_by_an_empty_environment() -> None:
    assert Configuration.read({}) == Configuration()
    assert Configuration.read({"EAGLE3_DTYPE": " ", "HOME": "/"}) == Configuration()


def test_every_variable_is_read(tmp_path: Path) -> None:
    prompts, python = tmp_path / "a.jsonl", tmp_path / "python"
    prompts.touch()
    python.touch()
    found = Configuration.read(
        {
            "EAGLE3_TARGET": "t",
            "EAGLE3_DRAFTER": "d",
            "EAGLE3_PROMPTS": f"{prompts}{os.pathsep}{prompts}",
            "EAGLE3_DTYPE": "bfloat16",
            "EAGLE3_VLLM_PYTHON": str(python),
            "EAGLE3_VLLM_MEMORY": "0.5",
            "EAGLE3_PRICE_PER_HOUR": "3.5",
        }
    )
    assert found == Configuration(
        target="t",
        drafter="d",
        prompt_files=(prompts, prompts),
        dtype="bfloat16",
        vllm_python=python,
        vllm_memory=0.5,
        price_per_hour=3.5,
    )
    urls = {"EAGLE3_VLLM_URL": "http://a:1", "EAGLE3_VLLM_PLAIN_URL": "http://a:2"}
    assert Configuration.read(urls).vllm_urls == ("http://a:1", "http://a:2")


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
    subject = choose(gpu=False, rehearsal=False, target=None, drafter=None, prompt_files=())
    return Machine(Configuration(**given), subject, on_gpu, has_gpu)


def test_without_anything_every_part_has_a_stand_in_and_says_which() -> None:
    banner = _machine().banner("vLLM", "price")
    assert [part.name for part in banner.missing] == ["device", "pair", "vLLM", "price"]
    text = str(banner)
    for said in ("no GPU: CPU: ", "the shipped pair", "committed record of 20", "EAGLE3_PRICE_PER_HOUR", "STAND-IN"):
        assert said in text
    assert "No number of theirs may be quoted" in banner.headline
    for part in banner.parts:
        assert part.name in banner._repr_html_()


def test_a_gpu_that_this_jax_cannot_use_ends_a_notebook_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless JAX was told to keep from it; then the banner says so."""
    monkeypatch.setattr("eagle3_jax.reporting.gpu.has_gpu", lambda: True)
    monkeypatch.setattr("validation.machine.has_gpu", lambda: True)
    monkeypatch.setattr("validation.machine.share_memory", lambda: None)
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


def test_what_is_there_is_called_real() -> None:
    here = _machine(on_gpu=True, price_per_hour=2.5)
    here.subject = dataclasses.replace(here.subject, name="a with b")
    here.vllm = _Rival({"vllm": "0.32.0", "device": "cuda"})  # type: ignore[misc]
    banner = here.banner("vLLM", "price")
    assert not banner.missing and "this machine's own" in banner.headline
    assert "2.5 an hour" in str(banner) and "a with b" in str(banner) and "vLLM 0.32.0, on cuda" in str(banner)
    here.vllm = _Rival({"vllm": "0.32.0", "device": "cpu"})  # type: ignore[misc]
    assert [part.name for part in here.banner("vLLM").missing] == ["vLLM"]


@dataclasses.dataclass
class _Rival:
    versions: dict[str, str]


def test_text_of_a_banner_cannot_become_markup() -> None:
    here = _machine()
    here.subject = dataclasses.replace(here.subject, name="<script>")
    assert "<script>" not in here.banner()._repr_html_()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("cpu", None),
        ("Tesla T4", None),
    ],
)
def test_devices_are_found_among_the_datasheets(kind: str, name: str | None) -> None:
    found = machine.datasheet_of(kind)
    assert (found and found.name) == name


def test_the_newest_report_is_the_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no report"):
        machine.newest_record(tmp_path)
    (tmp_path / "a_benchmark.json").write_text("{}")
    facts = {"cpu": {"model": "X", "cores": 2}, "jax": {"device": "cpu"}}
    for day in ("2026-01-02", "2026-01-01"):
        (tmp_path / f"{day}.json").write_text(Report(environment=facts, started=f"{day}T00:00:00").to_json())
    found = machine.newest_record(tmp_path)
    assert machine.described(found) == "2026-01-02, CPU: X, 2 cores"


def test_without_a_server_as_many_tokens_are_drafted_as_wanted() -> None:
    assert _machine().draft_tokens(5) == 5


def test_a_stand_in_measures_less() -> None:
    assert _machine().amount(cpu=1, gpu=2) == 1
    assert _machine(on_gpu=True).amount(cpu=1, gpu=2) == 2


def test_every_variable_is_documented_and_no_other() -> None:
    named = set(re.findall(r"EAGLE3_[A-Z_]+", (NOTEBOOKS / "README.md").read_text("utf-8")))
    assert named == set(VARIABLES)


@pytest.mark.parametrize("source", sorted(NOTEBOOKS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_every_notebook_begins_with_its_banner(source: Path) -> None:
    first = source.read_text("utf-8").split("# %%\n")[1]
    assert "machine.start()" in first and "here.banner(" in first


def _report() -> object:
    pytest.importorskip("nbconvert")
    spec = importlib.util.spec_from_file_location("report_of_notebooks", NOTEBOOKS.parent / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _executed(folder: Path, name: str, text: str, banner: machine.Banner, *, failed: bool = False) -> None:
    import nbformat

    shown = nbformat.v4.new_output("display_data", {"text/html": banner._repr_html_()})
    outputs = [shown, *([nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])] * failed)]
    cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell("1", outputs=outputs)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


def test_the_page_joins_notebooks_and_needs_no_network(tmp_path: Path) -> None:
    report = _report()
    here = _machine()
    text = "# 01 · One\n\nNext: [two](02_two.ipynb), [site](https://example.org), [read](../README.md)."
    _executed(tmp_path, "01_one", text, here.banner())
    _executed(tmp_path, "02_two", "# 02 · Two", here.banner("price"), failed=True)
    page = report.page(tmp_path, expected=["01_one", "02_two", "03_three"])  # type: ignore[attr-defined]
    assert 'href="#01_one"' in page and 'href="#02_two"' in page and "01 · One" in page
    assert "03_three: not executed" in page and "(stopped at an error)" in page
    assert "3 of 3 parts are stand-ins" in page, "each part is told once, whoever told it"
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=\"https?:", page), "the page asks the network"
    assert "../README.md" not in page and "https://example.org" in page


def test_a_page_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no executed notebook"):
        _report().page(tmp_path)  # type: ignore[attr-defined]
