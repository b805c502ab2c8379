"""Programs and commands of the pages run, use public names and type-check.

A block of ``bash`` runs on the bundled pair, unless its first line is ``# not run here: REASON``. A
block of ``text`` is not run. The options of every command are looked up.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer

import eagle3_jax
from eagle3_jax.cli import run
from eagle3_jax.cli._commands import app
from eagle3_jax.files.sources import bundled

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"

PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in ("_build", "notebooks", "repository")
)
PAGES += [f"../{name}README.md" for name in ("", "notebooks/", "notebooks/gpu/")]
NOT_RUN = "# not run here: "
# The number of devices, and the directory of compiled programs, are settled once in a process.
IN_A_PROCESS = {
    "mesh.md": "a mesh of model=8,data=1 does not divide 2 key/value heads: model can be 1, 2\n",
    "gpu.md": "",
    "rollouts.md": "",  # optax mixes types
}
SHOWN = {
    "drafters.md": ("14 passed, 0 failed, 0 not run",),
    "extending.md": ("0 failed", "consumed by the step before"),
}
VLLM = json.loads((DOCS / "recorded" / "vllm-0.32.0.json").read_text(encoding="utf-8"))


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[re.Match[str]]:
    return list(
        re.finditer(rf"^( *)```{language}\n(.*?)^\1```", text_of(page), re.MULTILINE | re.DOTALL)
    )


def code_of(block: re.Match[str]) -> str:
    return "".join(line.removeprefix(block[1]) for line in block[2].splitlines(keepends=True))


def commands_in(block: re.Match[str], page: str) -> Iterator[list[str]]:
    """The commands of a block as words; a quotation, or a backslash at its end, goes on."""
    pending = ""
    for line in code_of(block).replace("\\\n", " ").splitlines():
        pending += line
        with contextlib.suppress(ValueError):  # an open quotation
            if words := shlex.split(pending, comments=True):
                yield words
            pending = ""
    assert not pending, f"{page}: {pending}"


def commands_to_run(page: str) -> list[list[str]]:
    """The commands of a page's own blocks; what follows a rule is a page that a command printed."""
    end = (text_of(page) + "\n---\n\n").index("\n---\n\n")
    blocks = [
        block
        for block in blocks_of(page, "bash")
        if block.start() < end and not block[2].startswith(NOT_RUN)
    ]
    return [words for block in blocks for words in commands_in(block, page)]


def with_code() -> list[str]:
    return [page for page in PAGES if blocks_of(page, "python") or commands_to_run(page)]


@pytest.mark.parametrize("page", [page for page in with_code() if page not in IN_A_PROCESS])
def test_the_blocks_of_a_page_run_in_order(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the blocks, then the commands.

    They find a file ``mine.py`` of the blocks that begin with its name.
    """
    text = text_of(page)
    blocks = blocks_of(page, "python")
    if "from_regex" in text:
        pytest.importorskip("outlines_core")
    # Dataclasses look their module up.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))

    # Here a page writes files, and finds paths as from a checkout.
    monkeypatch.chdir(tmp_path)
    parts = [code_of(block) for block in blocks if block[2].startswith("# mine.py")]
    Path("mine.py").write_text("\n".join(parts))
    Path("eagle3_jax").symlink_to(ROOT / "eagle3_jax")
    Path("TARGET").symlink_to(bundled("target"))
    Path("HEAD").symlink_to(bundled("eagle3"))
    Path("prompts.jsonl").write_text('{"prompt": "import os", "max_new_tokens": 8}\n')

    printed = ""
    # Users run the blocks unchecked.
    with tiny.unchecked():
        for block in blocks:
            # A failure names the line of the page.
            above = text[: block.start(2)].count("\n")
            exec(compile("\n" * above + code_of(block), str(DOCS / page), "exec"), vars(module))
            out = capsys.readouterr().out
            if shown := re.match(r"\n\n```text\n(.*?)```", text[block.end() :], re.DOTALL):
                assert out == shown[1], f"{page}: what a block prints"
            printed += out

        assert all(shown in printed for shown in SHOWN.get(page, ()))

        for program, *arguments in commands_to_run(page):
            assert program == "eagle3", (
                f"{program} does not run in a test; begin its block with {NOT_RUN!r}"
            )
            assert run(arguments) == 0, shlex.join(arguments)


def test_the_front_page_has_the_command_of_its_picture() -> None:
    script = (DOCS / "pictures" / "make.py").read_text(encoding="utf-8")
    prompt, count = re.findall(r"^(?:PROMPT|NEW_TOKENS) = (.+)$", script, re.MULTILINE)
    assert f"decoder.generate([{prompt}], max_new_tokens={count})" in text_of("index.md")


def program_of(page: str) -> str:
    """The blocks of a page as one program; an error names the line of the page."""
    text = text_of(page)
    lines = [""] * text.count("\n")
    for block in blocks_of(page, "python"):
        above = text[: block.start(2)].count("\n")
        written = code_of(block).splitlines()
        lines[above : above + len(written)] = written
    return "\n".join(lines)


def test_pages_with_a_process_of_their_own_have_no_commands_to_run() -> None:
    assert [page for page in IN_A_PROCESS if commands_to_run(page)] == []


@pytest.mark.parametrize("page", IN_A_PROCESS)
def test_the_blocks_of_a_page_run_in_a_process_of_their_own(page: str, tmp_path: Path) -> None:
    program_path = tmp_path / "page.py"
    program_path.write_text(program_of(page))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, program_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == IN_A_PROCESS[page]


def everything_to_type() -> Iterator[tuple[str, list[str]]]:
    """Every command of the pages, with its page."""
    for page in PAGES:
        yield from (
            (page, words) for block in blocks_of(page, "bash") for words in commands_in(block, page)
        )

        lines = [
            line
            for block in blocks_of(page, "text")
            for line in code_of(block).replace("\\\n", " ").splitlines()
        ]

        lines += re.findall(r"`(eagle3 [^`\n]+ [^`\n]+)`", text_of(page))
        yield from (
            (page, shlex.split(line, comments=True))
            for line in lines
            if line.startswith(("eagle3 ", "make "))
        )


def test_every_command_on_the_pages_can_be_typed() -> None:
    """Nothing runs: options, targets of the Makefile and vLLM's recorded options are looked up."""
    checks = {"eagle3": wrong_with_ours, "vllm": wrong_with_vllms, "make": wrong_with_make}
    seen = 0
    wrong = []
    for page, words in everything_to_type():
        # A loop of the shell.
        if "do" in words:
            words = words[words.index("do") + 1 :]
            words = words[: words.index("&")] if "&" in words else words
        # A variable in front.
        while words and "=" in words[0] and not words[0].startswith("-"):
            words = words[1:]
        words = ["eagle3", *words[3:]] if words[:3] == ["python", "-m", "eagle3_jax"] else words

        if words and (check := checks.get(Path(words[0]).name)):
            seen += 1
            if problem := check(words[1:]):
                wrong.append(f"{page}: {shlex.join(words)}: {problem}")

    assert not wrong, "\n".join(wrong)
    assert seen > 60


def wrong_with_make(words: list[str]) -> str | None:
    names = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return next(
        (f"no target {word}" for word in words if "=" not in word and word not in names), None
    )


def wrong_with_ours(words: list[str]) -> str | None:
    command: Any = typer.main.get_command(app)
    if words in (["--help"], ["--version"]):
        return None
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return f"no command {words[:1]}; there are {', '.join(command.commands)}"
        command = command.commands[words[0]]
        words = words[1:]

    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    written = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
    required = {
        parameter.opts[0]
        for parameter in command.params
        if parameter.required and parameter.opts[0][0] == "-"
    }

    problems = [f"no option {option}" for option in written - known - {"--help", "-h"}]
    problems += [f"{option} is required" for option in required - written if words]
    return next(iter(problems), None)


def wrong_with_vllms(words: list[str]) -> str | None:
    name = "serve" if words[0] == "serve" else "bench serve"
    unknown = [word for word in words if word.startswith("-") and word not in VLLM[name]]
    if unknown:
        return f"vLLM {VLLM['version']} has no {unknown[0]}"

    data_set = words[words.index("--dataset-name") + 1] if "--dataset-name" in words else None
    if data_set is not None and data_set not in VLLM["datasets"]:
        return "no such data set"

    if "--speculative-config" in words:
        settings = json.loads(words[words.index("--speculative-config") + 1])
        strange = [key for key in settings if key not in VLLM["speculative_config"]]
        if strange:
            return f"no key {strange[0]}"
        return None if settings["method"] in VLLM["methods"] else "no such method"
    return None


def test_every_metric_and_key_of_vllm_is_one_that_it_has() -> None:
    for page in ("choosing.md", "deploying.md"):
        for name in set(re.findall(r"vllm:\w+", text_of(page))):
            assert re.sub(r"(_total|_bucket)$", "", name) in VLLM["metrics"], f"{page}: {name}"
    table = text_of("deploying.md").split("| key | default |")[1].split("\n\n")[0]
    keys = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(keys) == 6 and set(keys) <= set(VLLM["speculative_config"])


def test_the_rollout_page_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (
        words for words in commands_to_run("deploying.md") if words[1:3] == ["plan", "rollout"]
    )
    assert run(command[1:]) == 0
    plan = capsys.readouterr().out
    inside = False
    expected = []
    for line in plan.splitlines():
        inside ^= line.startswith("```")
        expected.append(line if inside or not line.startswith("#") else "#" + line)
    assert text_of("deploying.md").split("\n---\n\n")[1].rstrip() == "\n".join(expected).rstrip()


REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))


def is_public(module: str, name: str) -> bool:
    """Returns whether the reference has a name, its module or the module that defines it."""
    value = getattr(importlib.import_module(module), name, None) or importlib.import_module(
        f"{module}.{name}"
    )
    if getattr(eagle3_jax, name, None) is value:
        return name in eagle3_jax.__all__
    homes = {module, getattr(value, "__module__", module)}
    paths = [rf"{re.escape(home)}(\.{name}\b|\n(?!\s+:no-m))" for home in homes]
    return not name.startswith("_") and any(re.search(f":: {path}", REFERENCE) for path in paths)


def test_what_pages_and_notebooks_import_is_in_the_reference() -> None:
    programs = [program_of(page) for page in with_code()]
    programs += [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("[01]*.py")]

    seen = {
        (node.module, alias.name)
        for program in programs
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith("eagle3_jax.")
        for alias in node.names
    }

    assert len(seen) > 50
    assert not [f"{module}.{name}" for module, name in sorted(seen) if not is_public(module, name)]
