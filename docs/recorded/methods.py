"""Tables of docs/methods/index.md, from methods.toml."""

from __future__ import annotations

import tomllib

from page_tables import HERE, Row, table

from eagle3_jax.conversion.heads import HEADS


def facts() -> list[Row]:
    """Reads the methods of methods.toml."""
    return tomllib.loads((HERE / "methods.toml").read_text(encoding="utf-8"))["method"]


def what_they_are() -> str:
    """Writes papers, needs and shapes."""
    rows = []
    for method in facts():
        name = f"[{method['label']}]({method['page']})" if "page" in method else method["label"]
        papers = ", ".join(f"[{paper}]({address})" for paper, address in method.get("papers", ()))
        lossless = method.get("lossless", "yes")
        rows.append([name, papers, method["needs"], method["drafts"], method["sampled"], lossless])
    return table(["method", "paper", "needs", "drafts", "sampled drafts", "lossless"], rows)


def files_and_proof() -> str:
    """Writes formats, training and what each method was compared with."""
    rows = []
    for method in facts():
        layouts = (
            [f"`{name}`" for name in (*HEADS[method["heads"]].layouts, "jax")]
            if "heads" in method
            else []
        )
        written = method.get("written", ", ".join(layouts))
        recipe = f"`{method['recipe']}`" if "recipe" in method else ""
        rows.append([method["label"], method["formats"], written, recipe, method["checked"]])
    return table(["method", "comes in as", "goes out as", "`--method`", "checked against"], rows)
