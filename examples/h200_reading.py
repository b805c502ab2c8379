"""What the figures of `h200.py` say: the aims, and tables for people."""

from __future__ import annotations

from typing import Any

from h200_setting import CHAIN, NODES  # beside this file

KEPT = "compilation, "  # the parts that fill, or look into, a cache directory of their own
AIMS = (
    ("the shipped pair writes the same text with its head and without", "same text", ">=", 1),
    ("a plain step reads at least 85 % of what a copy moves", "plain share of copy", ">=", 0.85),
    (f"a verification of {NODES} costs at most 1.1 plain steps", "verify in plain steps", "<=", 1.1),
    ("at most 5 % of a round lie outside target and head", "share outside", "<=", 0.05),
)


def reading(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The aims: what was wanted, what was found (``None`` where it was not measured), and whether that meets it."""
    found: dict[str, float | None] = dict.fromkeys(key for _, key, _, _ in AIMS)
    streamed = figures_of(parts, "device").get("bytes_per_second", {})
    one = figures_of(parts, "round")
    plain = middle(one, "plain step", "seconds_per_round")
    if plain and streamed and "step_bytes" in one:
        found["plain share of copy"] = one["step_bytes"] / plain / streamed["copy"]
    several = middle(one, f"verify {NODES}", "seconds_per_round")
    if plain and several:
        found["verify in plain steps"] = several / plain
    if "same text" in figures_of(parts, "text"):
        found["same text"] = float(figures_of(parts, "text")["same text"])
    found["share outside"] = one.get("share outside target and head", {}).get("median")
    rows = []
    for aim, key, sign, wanted in AIMS:
        value = found[key]
        met = None if value is None else value >= wanted if sign == ">=" else value <= wanted
        rows.append({"aim": aim, "wanted": f"{sign} {wanted:g}", "found": value, "met": met})
    return rows


def figures_of(parts: dict[str, Any], name: str) -> dict[str, Any]:
    return parts.get(name, {}).get("figures", {})


def middle(figures: dict[str, Any], name: str, kind: str = "") -> float | None:
    """A median, where it was measured."""
    one = figures.get(name, {})
    return (one.get(kind, {}) if kind else one).get("median")


def shown(result: dict[str, Any]) -> str:
    """The result for people."""
    parts = result["parts"]
    lines = [
        "",
        f"{result['shape']}, random weights, bfloat16" + (", a REHEARSAL: nothing counts" * result["rehearsal"]),
    ]
    for row in result["reading"]:
        verdict = {True: "met", False: "missed", None: "not measured"}[row["met"]]
        value = "" if row["found"] is None else f": {row['found']:.3f}"
        lines.append(f"  {row['aim']}{value} ({verdict})")
    step = figures_of(parts, "round").get("draft step in plain steps")
    if step:
        lines.append(f"  a draft step costs {ratio(step)} plain steps, and a chain of {CHAIN} has {CHAIN} of them")
    floor = middle(figures_of(parts, "floor"), "1 rows")
    if floor:
        lines.append(f"  the products of a plain step alone, by cuBLAS in a CUDA graph: {1e3 * floor:.3f} ms")
    for name in ("round", "verify", "variants", "batches", "contexts"):
        rows = {
            key: one
            for key, one in figures_of(parts, name).items()
            if isinstance(one, dict) and {"seconds_per_round", "failed", "skipped"} & one.keys()
        }
        if rows:
            lines += [
                "",
                f"{name}: ms a round, in rounds of the base, tokens/s in those of the base, calls of the target",
            ]
        for key, one in rows.items():
            if "seconds_per_round" not in one:
                lines.append(f"  {key:46} {one.get('skipped') or 'failed: ' + one['failed'][:100]}")
                continue
            ms = 1e3 * one["seconds_per_round"]["median"]
            ratios = [ratio(one[kind]) if kind in one else "-" for kind in ("round_in_bases", "speed_in_bases")]
            lines.append(f"  {key:46} {ms:9.3f}  {ratios[0]:22} {ratios[1]:22} {one['rounds']}")
    if figures_of(parts, "batches"):
        lines.append(
            "  A tree pays against the chain where its τ is longer by more than its round is: real heads decide."
        )
    for key, one in figures_of(parts, "attention").items():
        if key != "clocks":
            times = [f"{kernel} {1e3 * spread['median']:.2f} ms" if "median" in spread else f"{kernel} failed"
                     for kernel, spread in one.items() if isinstance(spread, dict)]  # fmt: skip
            lines.append(f"attention of all layers, {key}: {', '.join(times)}")
    for draft in ("plain", "chain"):
        one = figures_of(parts, "profile").get(draft, {})
        if one.get("kernels_per_round"):
            busy, whole = 1e3 * one["kernel_seconds_per_round"], 1e3 * one["seconds_per_round"]
            lines.append(
                f"profile, {draft}: {one['kernels_per_round']:.0f} kernels of {busy:.3f} ms in rounds of {whole:.3f} ms"
            )
    for name in parts:
        if name.startswith(KEPT) and "compile_seconds" in figures_of(parts, name):
            lines.append(f"{name}: {figures_of(parts, name)['compile_seconds']:.1f} s")
    lines += [f"{name}: {one['status']}, {one['reason']}" for name, one in parts.items() if one["status"] != "done"]
    return "\n".join(lines)


def ratio(one: dict[str, Any]) -> str:
    """Middle and quartiles."""
    return f"{one['median']:.3f} ({one['low']:.3f}-{one['high']:.3f})"
