"""One GPU, one JSON: what a round costs at the shape of Llama-3.1-8B, and which settings change it.

    python examples/h200.py --output h200.json                  # ten minutes; again with the same file: goes on
    python examples/h200.py --output /tmp/rehearsal.json --rehearse     # tiny shapes, on any device; no figure counts

Every figure is in the file as soon as it is known, what is worth most first. Every part has a process and a limit of
its own; one that fails or runs out of time says so, and the next one goes on. `docs/gpu.md` says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h200_parts import CHAIN, FULL, NO_GPU, NODES, PARTS, REHEARSAL, read, write  # in this folder

from eagle3_jax.bench.environment import sha256_of_code
from eagle3_jax.cli._compiled import default_directory

SCHEMA = 2
BUDGET = 570  # seconds of a command
LEAST = 20  # seconds in which a part can measure anything
ROOM = 10  # seconds that a part keeps before it is cut off
REHEARSED = 4  # times the limit: a rehearsal may be on a slow machine
KEPT = "compilation, "  # the parts that share a cache directory of their own
AIMS = (
    ("the shipped pair writes the same text with its head and without", "same text", ">=", 1),
    ("a plain step reads at least 85 % of what a copy moves", "plain share of copy", ">=", 0.85),
    (f"a verification of {NODES} costs at most 1.1 plain steps", "verify in plain steps", "<=", 1.1),
    ("at most 5 % of a round lie outside target and head", "share outside", "<=", 0.05),
)


def main() -> None:
    """Measure what is missing, write it, read it out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("h200.json"))
    parser.add_argument(
        "--budget-seconds", type=float, default=BUDGET, help=f"For all parts together; {BUDGET} if left out."
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"Of: {', '.join(PARTS)}.")
    parser.add_argument("--again", action="store_true", help="Measure parts that are done already, too.")
    parser.add_argument("--rehearse", action="store_true", help="Tiny shapes, on any device.")
    parser.add_argument("--compilation-cache", type=Path, default=default_directory(), metavar="DIR")
    given = parser.parse_args()
    end = time.monotonic() + given.budget_seconds
    result = started(given.output, rehearse=given.rehearse)
    with own_cache() as own:
        for name in given.only or PARTS:
            old = result["parts"].get(name, {})
            if old.get("status") == "done" and not given.again:
                continue
            kept = {} if given.again or name.startswith(KEPT) else old.get("figures", {})
            result["parts"][name] = {"status": "under way", "reason": "it was cut off", "figures": kept}
            write(given.output, result)
            cache = own if name.startswith(KEPT) else given.compilation_cache
            ending = measured(name, given.output, end, cache=cache, rehearse=given.rehearse)
            result = read(given.output)
            result["parts"][name] |= ending
            result["reading"] = reading(result["parts"])
            write(given.output, result)
    print(shown(result))


def started(output: Path, *, rehearse: bool) -> dict[str, Any]:
    """What an earlier run of the same code wrote, or nothing yet."""
    setting = REHEARSAL if rehearse else FULL
    new = {"schema": SCHEMA, "rehearsal": rehearse, "shape": setting.shape, "code": sha256_of_code(), "parts": {}}
    if not output.exists():
        return new | {"reading": reading({})}
    try:
        old = read(output)
    except ValueError:
        raise SystemExit(f"error: {output} is no JSON; give another --output, or remove it") from None
    other = [key for key in new if key != "parts" and (not isinstance(old, dict) or old.get(key) != new[key])]
    if other:
        raise SystemExit(
            f"error: {output} holds a run of another {', '.join(other)}; give another --output, or remove it"
        )
    return old


@contextlib.contextmanager
def own_cache() -> Iterator[Path]:
    """An empty cache directory."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def measured(name: str, output: Path, end: float, *, cache: Path | None, rehearse: bool) -> dict[str, Any]:
    """Run a part in a process of its own, until its limit or the end of the budget; how that ended."""
    limit = min(PARTS[name][0] * (REHEARSED if rehearse else 1), end - time.monotonic())
    if limit < LEAST:
        return {"status": "not run", "reason": "the budget was spent; run the command again", "seconds": 0.0}
    if name == "compilation, autotuning kept" and cache is not None:
        for program in cache.glob("*-cache"):
            program.unlink()
    surroundings = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)  # of a checkout that is not installed
    surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, (root, surroundings.get("PYTHONPATH"))))
    if cache is not None:
        surroundings |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    print(f"{name}, at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory, "said")
        command = [sys.executable, str(Path(__file__).with_name("h200_parts.py")), name, str(output)]
        command += ["--seconds", f"{limit - ROOM:.0f}", *(["--rehearse"] if rehearse else [])]
        with said.open("w") as complaints:
            process = subprocess.Popen(command, env=surroundings, stderr=complaints)
            try:
                code = process.wait(timeout=limit)
                status, reason = (
                    ("done", None) if code == 0 else ("failed", last_line(said) or f"it ended with code {code}")
                )
            except subprocess.TimeoutExpired:
                code, status, reason = None, "out of time", f"cut off after {limit:.0f} s; run the command again"
            finally:
                process.kill()
                process.wait()
    if code == NO_GPU:
        raise SystemExit(f"error: {reason}")
    if status == "done":
        figures = read(output)["parts"][name]["figures"].values()
        left_out = sum(isinstance(figure, dict) and "skipped" in figure for figure in figures)
        if left_out:
            status, reason = "in part", f"no time was left for {left_out} of its figures; run the command again"
    return {"status": status, "reason": reason, "seconds": round(time.monotonic() - start, 1)}


def last_line(file: Path) -> str:
    """What an error says, without where it was raised."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# ---------------------------------------------------------------- what the figures say


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


if __name__ == "__main__":
    main()
