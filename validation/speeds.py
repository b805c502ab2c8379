"""How speeds are kept in the report, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_jax import DynamicTree, SpeculativeDecoder
from eagle3_jax.bench.contenders import Contender, DecoderContender
from eagle3_jax.bench.results import Report, Row
from eagle3_jax.bench.run import measure
from eagle3_jax.bench.transformers import TransformersContender
from eagle3_jax.measure.memory import is_out_of_memory
from eagle3_jax.theory.cost import cost_per_million_tokens
from eagle3_jax.verifiers.simulated import SimulatedAcceptance
from validation.runs import Check
from validation.subject import CONTEXT, SHIPPED, Pair, Setting, Subject

COLUMNS = [
    "method", "precision", "batch", "tokens/s", "quartiles", "over plain", "quartiles", "τ",
    "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms",
    "% of bandwidth", "cost of 1M tokens", "not run because",
]  # fmt: skip


def is_quoted(subject: Subject, setting: Setting) -> bool:
    """Whether the pair's speed is worth a number: that of the shipped one is not, on a GPU."""
    return not (setting.gpu and subject.name == SHIPPED)


def shared_dtype(dtype: str) -> str:
    """The nearest precision that transformers and vLLM have too; they have no mixed one."""
    return "float32" if dtype == "mixed" else dtype


def transformers_or_why_not(
    subject: Subject, batch: int, setting: Setting, missing: list[list[Any]]
) -> list[TransformersContender]:
    """``generate``, and its assisted generation by prompt lookup, or why they are not there."""
    dtype = shared_dtype(subject.dtypes[0])
    try:
        return TransformersContender.load(
            subject.target_directory, dtype=dtype, on_gpu=setting.on_gpu
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        missing.append(not_run("transformers generate", dtype, batch, str(error).splitlines()[0]))
        return []


def not_run(name: str, dtype: str, batch: int, reason: str) -> list[Any]:
    return [name, dtype, batch, *[""] * (len(COLUMNS) - 4), reason]


def measure_and_keep(
    check: Check,
    contenders: list[Contender],
    prompts: list[list[int]],
    *,
    batch: int,
    baseline: str,
    price: float | None,
    title: str = "",
    quoted: bool = True,
    missing: Sequence[list[Any]] = (),
    cost_rounds: int = 0,
    **amounts: int,
) -> None:
    """Measure all in turn, keep everything, then judge."""
    report = measure(
        contenders,
        prompts[: len(prompts) // batch * batch],
        baselines=[baseline],
        batch_size=batch,
        cost_rounds=cost_rounds,
        streams=0,
        **amounts,  # type: ignore[arg-type]
    )

    dtypes = {contender.name: contender.dtype for contender in contenders}
    absent = [
        not_run(contender.name, dtypes[contender.name], batch, contender.reason)
        for contender in report.not_measured
    ]

    title = title if quoted else "No claim, for on a GPU the shipped pair waits for launches: "
    title += (
        f"Speed at batch {batch}, {report.num_prompts} prompts of {CONTEXT} tokens,"
        f" {report.max_new_tokens} new"
    )
    check.table(
        title, COLUMNS, [*(_cells(row, report, price) for row in report.rows), *missing, *absent]
    )

    if quoted:
        speeds = {
            f"tokens/s {row.name}, batch {batch}": row.decode_tokens_per_second.median
            for row in report.rows
        }
        check.number(
            **{f"bandwidth GB/s, batch {batch}": (report.bytes_per_second or 0.0) / 1e9}, **speeds
        )
    else:
        check.number(note="the shipped pair's speed on a GPU is not a claim")

    assert not faults(report), "; ".join(faults(report))
    ours = {contender.name for contender in contenders if isinstance(contender, DecoderContender)}
    for row in report.rows:
        assert row.repeatable or row.name not in ours, (
            f"{row.name} wrote other tokens in another repeat"
        )


def _cells(row: Row, report: Report, price: float | None) -> list[Any]:
    speed = row.decode_tokens_per_second
    ratio = row.ratio
    share = row.bandwidth_share
    acceptance = row.acceptance
    tau = 1.0 if acceptance is None else acceptance.mean_acceptance_length

    cost = (
        "" if price is None else cost_per_million_tokens(row.total_tokens_per_second.median, price)
    )
    latencies = [
        1e3 * value
        for latency in (row.first_token, row.per_token)
        for value in (latency.p50, latency.p99)
    ]
    return [
        row.name, row.dtype, report.batch_size,
        speed.median, f"{speed.low:.4g} to {speed.high:.4g}",
        ratio.median, f"{ratio.low:.2f} to {ratio.high:.2f}", tau, *latencies,
        "" if share is None else 100 * share, cost, "",
    ]  # fmt: skip


def chain(
    pair: Pair, dtype: str, length: int, simulated: SimulatedAcceptance | None = None
) -> DecoderContender:
    """Our decoder; length 0 is plain decoding."""
    if length == 0:
        return DecoderContender(
            f"plain {dtype}", dtype, SpeculativeDecoder(pair[0], stop_tokens=())
        )
    decoder = SpeculativeDecoder(
        *pair, num_speculative_tokens=length, stop_tokens=(), verifier=simulated
    )
    return DecoderContender(f"chain K={length}", dtype, decoder)


def tree(
    pair: Pair, dtype: str, shape: DynamicTree, simulated: SimulatedAcceptance | None = None
) -> DecoderContender:
    """Our decoder with a tree."""
    decoder = SpeculativeDecoder(*pair, tree=shape, stop_tokens=(), verifier=simulated)
    return DecoderContender(f"tree N={shape.num_nodes} G={shape.max_depth}", dtype, decoder)


def faults(report: Report) -> list[str]:
    """Why the figures of a report would not be worth reading; empty where they are.

    Nothing here asks who is faster.
    """
    problems = []
    too_fast = {row.name: row.bandwidth_share for row in report.too_fast}
    if too_fast:
        most = report.bytes_per_second or 0.0
        problems.append(
            f"faster than {most / 1e9:.0f} GB/s can feed: {too_fast}; the clock or the tokens are"
            " wrong"
        )

    if report.programs_after_warm_up:
        problems.append(
            f"{report.programs_after_warm_up} programs were compiled while times were taken"
        )
    return problems
