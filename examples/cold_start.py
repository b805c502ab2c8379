"""How long commands take from the shell's point of view, where `eagle3 generate` spends it, and what compiling takes.

    python examples/cold_start.py [--repeats 5] [--against ../another-checkout] [--only programs] [--output FILE]

Every number is the median of runs in fresh processes, with the extremes behind it; the two checkouts take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent.parent
MEASURED: dict[str, dict[str, list[float]]] = {}
GENERATE = ["-m", "eagle3_jax.cli", "generate", "def fibonacci(n):", "--max-new-tokens", "64"]
COMMANDS = {
    "import eagle3_jax": ["-c", "import eagle3_jax"],
    "eagle3 --version": ["-m", "eagle3_jax.cli", "--version"],
    "eagle3 --help": ["-m", "eagle3_jax.cli", "--help"],
    "eagle3 plan speedup": ["-m", "eagle3_jax.cli", "plan", "speedup"],
    "eagle3 plan roofline": ["-m", "eagle3_jax.cli", "plan", "roofline", "--target", "Llama-3.3-70B", "--gpu", "H200"],
}
PARTS = """
import time; marks = [("", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
import jax; mark("import jax")
import eagle3_jax as e3; e3.SpeculativeDecoder, e3.load_target
import eagle3_jax.conversion.reading; mark("import the library")
target = e3.load_target(); drafter = e3.load_drafter(target=target); mark("load weights")
from eagle3_jax import loop as loops
decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=5)
loop, batch, _ = decoder._batch([{prompt!r}], 64, None, 0); mark("prepare the batch")
capacity = decoder._capacity(batch)
lowered = loops.prefill.trace(loop, decoder.params, batch, capacity=capacity).lower(); mark("prefill: trace")
prefill = lowered.compile(); mark("prefill: compile")
state = jax.block_until_ready(prefill(decoder.params, batch)); mark("prefill: run")
lowered = loops.step.trace(loop, decoder.params, state).lower(); mark("step: trace")
step = lowered.compile(); mark("step: compile")
while bool(state.running.any()): state = step(decoder.params, state).state
mark("all rounds: run")
for (_, before), (name, after) in zip(marks, marks[1:]): print(f"{{name}}\\t{{after - before}}")
"""

DRAFTS = {
    "chain of 5": "num_speculative_tokens=5",
    "tree of 60": "tree=e3.DynamicTree(num_nodes=60, max_depth=7, top_k=10)",
}
PROGRAMS = """
import re, time
import jax
import eagle3_jax as e3
from eagle3_jax import loop as loops
target = e3.load_target(); drafter = e3.load_drafter(target=target)
decoder = e3.SpeculativeDecoder(target, drafter, {draft})
loop, batch, _ = decoder._batch(["def fibonacci(n):"], 64, None, 0)
capacity = decoder._capacity(batch)
state = jax.eval_shape(lambda params, batch: loop.prefill(params, batch, capacity), decoder.params, batch)
start = time.perf_counter(); traced = loops.{program}.trace(loop, decoder.params, {arguments})
after = time.perf_counter(); print(f"trace\t{{after - start}}")
start = time.perf_counter(); lowered = traced.lower()
after = time.perf_counter(); print(f"lower\t{{after - start}}")
start = time.perf_counter(); compiled = lowered.compile()
after = time.perf_counter(); print(f"compile\t{{after - start}}")
written = re.compile(r"^ +(?:ROOT )?%?[^ ]+ = ", re.MULTILINE)
print("instructions before XLA\t", len(written.findall(lowered.as_text("hlo"))))
print("instructions after XLA\t", len(written.findall(compiled.as_text())))
"""
ARGUMENTS = {"step": "state", "generate": "batch, capacity=capacity"}


def environment(root: Path, cache: str | None) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    if cache is not None:
        given["XDG_CACHE_HOME"] = cache
    return given


def until_end(arguments: list[str], root: Path, cache: str | None = None) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment(root, cache), check=False, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - start


def until_tokens(root: Path, cache: str | None, extra: list[str]) -> tuple[float, float]:
    """Seconds to the first character behind the prompt, and to the line that says why the text ended."""
    ours, theirs = pty.openpty()  # a terminal, as people see it
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *GENERATE, *extra], cwd=root, env={**environment(root, cache), "TERM": "dumb"}, stdout=theirs,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    seen, first, last = "", 0.0, 0.0
    while last == 0.0 and select.select([ours], [], [], 300)[0]:
        try:
            seen += os.read(ours, 4096).decode(errors="replace")
        except OSError:  # the other end of a terminal has gone
            break
        now = time.perf_counter() - start
        plain = re.sub(r"\x1b\[[0-9;]*m", "", seen)
        if not first and len(plain) > len("def fibonacci(n):"):
            first = now
        if re.search(r"\[(length|stop|capacity)\]", plain):
            last = now
    process.kill()
    process.wait()
    os.close(ours)
    return first, last


def printed_by(code: str, root: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment(root, None), check=True, capture_output=True, text=True
    )
    return {name: float(value) for name, value in (line.split("\t") for line in done.stdout.splitlines())}


def parts(root: Path) -> dict[str, float]:
    return printed_by(PARTS.format(prompt="def fibonacci(n):"), root)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(title: str, roots: list[Path], repeats: int, measure: Callable[[Path], dict[str, float]]) -> None:
    """Measure in turns, print a row for each figure, and keep what was measured."""
    found: dict[Path, list[dict[str, float]]] = {root: [] for root in roots}
    for _ in range(repeats):
        for root in roots:
            found[root].append(measure(root))
    for name in found[roots[0]][0]:
        row = [spread([run[name] for run in found[root] if name in run]) for root in roots]
        print(f"| {title}{name} | {' | '.join(row)} |", flush=True)
        MEASURED[f"{title}{name}"] = {root.name: [run[name] for run in found[root] if name in run] for root in roots}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="Another checkout; its column comes first.")
    parser.add_argument("--only", default="", help="commands, generate, cached, parts or programs.")
    parser.add_argument("--output", type=Path, help="Write every measured figure as JSON.")
    options = parser.parse_args()
    roots = [*([options.against.resolve()] if options.against else []), HERE]
    print(f"| seconds, median of {options.repeats} (extremes) | {' | '.join(root.name for root in roots)} |")
    print("|---" * (1 + len(roots)) + "|")
    if options.only in ("", "commands"):
        for name, arguments in COMMANDS.items():

            def measure(root: Path, arguments: list[str] = arguments) -> dict[str, float]:
                return {"": until_end(arguments, root)}

            report(name, roots, options.repeats, measure)
    if options.only in ("", "generate"):

        def cold(root: Path) -> dict[str, float]:
            with tempfile.TemporaryDirectory() as cache:
                first, last = until_tokens(root, cache, [])
            return {"first token": first, "last token": last}

        report("eagle3 generate, nothing cached: ", roots, options.repeats, cold)
    if options.only in ("", "cached"):
        with tempfile.TemporaryDirectory() as cache:
            until_tokens(HERE, cache, [])

            def warm(root: Path) -> dict[str, float]:
                first, last = until_tokens(root, cache, [])
                return {"first token": first, "last token": last}

            report("eagle3 generate, compiled before: ", [HERE], options.repeats, warm)
    if options.only in ("", "parts"):
        report("", roots, options.repeats, parts)
    if options.only in ("", "programs"):
        for draft, asked in DRAFTS.items():
            for program, arguments in ARGUMENTS.items():
                code = PROGRAMS.format(draft=asked, program=program, arguments=arguments)
                report(
                    f"`{program}`, {draft}: ", roots, options.repeats, lambda root, code=code: printed_by(code, root)
                )
    if options.output:
        options.output.write_text(json.dumps({"load": os.getloadavg(), "seconds": MEASURED}, indent=1) + "\n")


if __name__ == "__main__":
    main()
