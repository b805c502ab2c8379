"""One GPU, ten minutes, one JSON: what a round costs at the shape of Llama-3.1-8B, and which settings change it.

    python examples/h200.py --output h200.json                  # again with the same file: goes on where it ended
    python examples/h200.py --output /tmp/rehearsal.json --rehearse     # tiny shapes, on any device; no figure counts

Every part has a process and a limit of its own; one that fails or runs out of time says so, keeps what it had, and the
next one goes on. `docs/gpu.md` says how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from h200_parts import CHAIN, FULL, NODES, PARTS, REHEARSAL  # beside this file

from eagle3_jax.cli._compiled import default_directory
from eagle3_jax.reporting.environment import sha256_of_code
from eagle3_jax.writing import whole_file

SCHEMA = 1
LIMITS = {"device": 60, "round": 180, "verify": 150, "variants": 200, "batches": 240, "contexts": 120, "attention": 60}
LIMIT = 90  # of all others
KEPT = "compilation, "  # the parts that fill, or look into, a cache directory of their own
AIMS = (
    ("a plain step reads at least 85 % of what a copy moves", "plain share of copy", ">=", 0.85),
    (f"a verification of {NODES} costs at most 1.1 plain steps", "verify in plain steps", "<=", 1.1),
    ("at most 5 % of a round lie outside target and head", "share outside", "<=", 0.05),
)


def main() -> None:
    """Measure what is missing, write it, read it out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("h200.json"))
    parser.add_argument("--budget-seconds", type=float, default=570, help="For all parts together; 570 if left out.")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"Of: {', '.join(PARTS)}.")
    parser.add_argument("--again", action="store_true", help="Measure parts that are done already, too.")
    parser.add_argument("--rehearse", action="store_true", help="Tiny shapes, on any device.")
    parser.add_argument("--compilation-cache", type=Path, default=default_directory(), metavar="DIR")
    given = parser.parse_args()
    end = time.monotonic() + given.budget_seconds
    result = started(given.output, rehearse=given.rehearse)
    with own_cache() as own:
        for name in given.only or PARTS:
            if result["parts"].get(name, {}).get("status") == "done" and not given.again:
                continue
            cache = own if name.startswith(KEPT) else given.compilation_cache
            result["parts"][name] = measured(name, end, cache=cache, rehearse=given.rehearse)
            result["reading"] = reading(result["parts"])
            with whole_file(given.output) as partial:
                partial.write_text(json.dumps(result, indent=1) + "\n")
    print(shown(result))


def started(output: Path, *, rehearse: bool) -> dict[str, Any]:
    """What an earlier run of the same code wrote, or nothing yet."""
    setting = REHEARSAL if rehearse else FULL
    new = {"schema": SCHEMA, "rehearsal": rehearse, "shape": setting.shape, "code": sha256_of_code(), "parts": {}}
    if not output.exists():
        return new
    try:
        old = json.loads(output.read_text())
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
    """A cache directory that nobody else fills."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def measured(name: str, end: float, *, cache: Path | None, rehearse: bool) -> dict[str, Any]:
    """Run a part in a process of its own, until its limit or the end of the budget."""
    limit = min(LIMITS.get(name, LIMIT), end - time.monotonic())
    if limit < 5:
        return {"status": "not run", "reason": "the budget was spent; run the command again", "seconds": 0.0}
    if name == "compilation, autotuning kept" and cache is not None:
        for program in cache.glob("*-cache"):
            program.unlink()
    surroundings = dict(os.environ)
    if cache is not None:
        surroundings |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    print(f"{name}, at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        file, said = Path(directory, "figures.json"), Path(directory, "said")
        command = [sys.executable, str(Path(__file__).with_name("h200_parts.py")), name, str(file)]
        with said.open("w") as complaints:
            process = subprocess.Popen(
                [*command, *(["--rehearse"] if rehearse else [])], env=surroundings, stderr=complaints
            )
            try:
                code = process.wait(timeout=limit)
                status, reason = (
                    ("done", None) if code == 0 else ("failed", last_line(said) or f"it ended with code {code}")
                )
            except subprocess.TimeoutExpired:
                status, reason = "out of time", f"cut off after {limit:.0f} s; run the command again"
            except BaseException:
                process.kill()
                raise
            finally:
                process.kill()
                process.wait()
        figures = json.loads(file.read_text()) if file.exists() else {}
    found = {"status": status, "seconds": round(time.monotonic() - start, 1), "figures": figures}
    return found if reason is None else found | {"reason": reason}


def last_line(file: Path) -> str:
    """What an error says, without where it was raised."""
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# Reading it


def reading(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The aims: what was wanted, what was found (``None`` where it was not measured), and whether that meets it."""
    found: dict[str, float | None] = dict.fromkeys(key for _, key, _, _ in AIMS)
    streamed = figures_of(parts, "device").get("bytes_per_second", {})
    one = figures_of(parts, "round")
    plain = middle(one, "plain step", "seconds")
    if plain and streamed and "step_bytes" in one:
        found["plain share of copy"] = one["step_bytes"] / plain / streamed["copy"]
    several = middle(one, f"verify {NODES}", "seconds")
    if plain and several:
        found["verify in plain steps"] = several / plain
    found["share outside"] = one.get("share outside target and head", {}).get("median")
    rows = []
    for aim, key, sign, wanted in AIMS:
        value = found[key]
        met = None if value is None else value >= wanted if sign == ">=" else value <= wanted
        rows.append({"aim": aim, "wanted": f"{sign} {wanted:g}", "found": value, "met": met})
    return rows


def figures_of(parts: dict[str, Any], name: str) -> dict[str, Any]:
    return parts.get(name, {}).get("figures", {})


def middle(figures: dict[str, Any], name: str, kind: str) -> float | None:
    """A median, where it was measured."""
    return figures.get(name, {}).get(kind, {}).get("median")


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
    for name in ("verify", "contexts", "variants", "batches"):
        rows = {key: one for key, one in figures_of(parts, name).items() if isinstance(one, dict) and key != "clocks"}
        if rows:
            lines += [
                "",
                f"{name}: ms a round, in rounds of the base, tokens/s in those of the base, calls of the target",
            ]
        for key, one in rows.items():
            if "failed" in one:
                lines.append(f"  {key:46} failed: {one['failed'][:100]}")
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
