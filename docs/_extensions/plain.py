"""The site for readers that are programs: llms.txt at its root, and every page as Markdown beside its HTML."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from links import rewritten
from sphinx.application import Sphinx

_OBJECT = re.compile(r"^\.\. auto(?:class|function|module|data|method):: (\S+)\n(?:[ \t]+:.*\n?)*", re.MULTILINE)
_HEADING = re.compile(r"^#\s+(.+)$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, Any]:
    """Write when the HTML stands."""
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True}


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    out, sections = Path(app.outdir), _sections(app)
    for docname in app.env.all_docs:
        place = out / f"{docname}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_within(docname, _markdown(app, docname)), encoding="utf-8")
    lines = [
        "# eagle3-jax",
        "",
        "> EAGLE-3 speculative decoding in JAX and Flax: exact, compiled into one program, small enough to read.",
        "",
        "Every page of this site is Markdown, too: addresses below.",
    ]
    for caption, docnames in sections:
        lines += ["", f"## {caption}", ""]
        lines += [f"- [{_title(app, docname)}]({docname}.md){_about(app, docname)}" for docname in docnames]
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(app: Sphinx) -> list[tuple[str, list[str]]]:
    """The pages by the captions of the table of contents; what stands in none comes last."""
    from sphinx import addnodes

    sections, seen = [], {app.config.root_doc}
    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        pages: list[str] = []
        pending = list(reversed(tree["includefiles"]))
        while pending:
            docname = pending.pop()
            if docname in seen or docname not in app.env.titles:
                continue
            seen.add(docname)
            pages.append(docname)
            pending += reversed(app.env.toctree_includes.get(docname, []))
        sections.append((tree.get("caption") or "Pages", pages))
    rest = sorted(set(app.env.all_docs) - seen)
    return [*sections, ("Optional", rest)] if rest else sections


def _title(app: Sphinx, docname: str) -> str:
    return app.env.titles[docname].astext()


def _about(app: Sphinx, docname: str) -> str:
    """The first sentence of a page's prose."""
    text = _markdown(app, docname)
    for part in text.split("\n\n"):
        words = " ".join(part.split())
        if words and not words.startswith(("#", "`", "|", "-", ":", "!", "<", "(", "*")):
            first = re.split(r"(?<=\.)\s", words)[0]
            return ": " + re.sub(r"\]\([^)]*\)", "", first).replace("[", "")
    return ""


def _markdown(app: Sphinx, docname: str) -> str:
    source = Path(app.env.doc2path(docname)).read_text(encoding="utf-8")
    if docname.startswith("notebooks/"):
        return _of_notebook(json.loads(source))
    text = re.sub(
        r"```\{eval-rst\}\n(.*?)```\n", lambda block: _OBJECT.sub(_documented, block[1]), source, flags=re.DOTALL
    )
    text = re.sub(r"```\{toctree\}\n.*?```\n", "", text, flags=re.DOTALL)
    return re.sub(
        r"```\{literalinclude\} (\S+)\n(.*?)```", _included(Path(app.env.doc2path(docname))), text, flags=re.DOTALL
    )


def _within(docname: str, text: str) -> str:
    """Links to pages as Markdown, those to sources as they are on the site."""
    shown = rewritten(text, docname, warn=lambda what: None)
    up = "../" * docname.count("/")
    shown = re.sub(r"((?:\]\(|\]: ))repository:([^)\s#]+)", rf"\1{up}source/\2.html", shown)
    return re.sub(r"(\]\(notebooks/[^)\s]+)\.ipynb", r"\1.md", shown)


def _included(page: Path) -> Any:
    def shown(match: re.Match[str]) -> str:
        lines = (page.parent / match[1]).resolve().read_text(encoding="utf-8").splitlines()
        options = dict(re.findall(r"^:([\w-]+):[ \t]*(.*)$", match[2], re.MULTILINE))
        start = next((i for i, line in enumerate(lines) if options.get("start-at", "") in line), 0)
        end = len(lines)
        if "pyobject" in options:
            from sphinx.pycode import ModuleAnalyzer

            (_, first, last) = ModuleAnalyzer.for_file(str((page.parent / match[1]).resolve()), "").find_tags()[
                options["pyobject"]
            ]
            return "\n".join(["```python", *lines[first - 1 : last], "```"])
        if "end-before" in options:
            end = next(i for i in range(start + 1, len(lines)) if options["end-before"] in lines[i])
        if "end-at" in options:
            end = 1 + next(i for i in range(start, len(lines)) if options["end-at"] in lines[i])
        return "\n".join(["```python", *lines[start:end], "```"])

    return shown


def _documented(match: re.Match[str]) -> str:
    found, name = _named(match[1]), match[1]
    if not inspect.ismodule(found):
        return _one(found, name)
    parts = [f"\n## {name}\n\n{inspect.getdoc(found) or ''}\n"]
    if ":no-members:" not in match[0]:
        own = {key: value for key, value in vars(found).items() if getattr(value, "__module__", None) == name}
        parts += [
            _one(value, f"{name}.{key}")
            for key, value in own.items()
            if not key.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        ]
    return "".join(parts)


def _named(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def _one(found: Any, name: str) -> str:
    text = [f"\n### {name}\n\n```python\n{_signature(found, name)}\n```\n\n{inspect.getdoc(found) or ''}\n"]
    if inspect.isclass(found):
        for key, value in vars(found).items():
            value = getattr(value, "__func__", value)
            if key.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
                continue
            if said := inspect.getdoc(value):
                shown = _signature(value, key) if inspect.isfunction(value) else key
                text.append(f"\n#### {key}\n\n```python\n{shown}\n```\n\n{said}\n")
    return "".join(text)


def _signature(found: Any, name: str) -> str:
    try:
        arguments = str(inspect.signature(found)) if callable(found) else ""
    except (TypeError, ValueError):
        arguments = ""
    return name.rpartition(".")[2] + arguments.replace("'", "")


def _of_notebook(notebook: dict[str, Any]) -> str:
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(text)
        elif text:
            parts.append(f"```python\n{text}\n```")
            printed = "".join(
                "".join(one.get("text", "")) for one in cell.get("outputs", []) if one["output_type"] == "stream"
            )
            if printed.strip():
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
