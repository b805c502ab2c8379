"""Speed of decoding: interleaved runs with their spread, and the prediction of the cost model.

The model is ``S = τ / (v + G·c)`` (Leviathan et al., 2023, theorem 3.8, with a verification that is
not free): ``τ`` tokens per round, ``v`` the cost of a verification and ``c`` that of a draft step,
both in steps of plain decoding, and ``G`` draft steps in a round. All three are measured separately
from the speed that they predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eagle3_jax.bench.contenders import Contender, DecoderContender, Tokens
from eagle3_jax.bench.results import Measured, NotMeasured, Report, row_of
from eagle3_jax.bench.roofline import ceiling
from eagle3_jax.bench.step_costs import step_costs
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.measure.timing import CompileClock, Spread


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    repeats: int,
    baselines: Sequence[str],
    tasks: Sequence[str] = (),
    batch_size: int = 1,
    cost_rounds: int = 32,
    streams: int = 1,
    large: int = 0,
    on_progress: Callable[[str], None] = lambda step: None,
    on_result: Callable[[str], None] = lambda result: None,
) -> Report:
    """Runs all contenders in turn on all prompts, ``repeats`` times after a warm-up.

    Contenders take turns, so that a machine that slows down for a while slows all of them.

    Args:
        contenders: Contenders; one that does not take such batches is left out and named in the
            report.
        prompts: Token ids.
        max_new_tokens: New tokens per prompt; at least 2, since the prefill gives the first.
        repeats: Measured passes.
        baselines: Names of the plain contenders; the others are compared with the fastest of them.
        tasks: Task of each prompt; empty if unknown.
        batch_size: Prompts decoded at once; their number is a multiple of it.
        cost_rounds: Rounds over which the costs of a step are averaged; 0 leaves costs and
            prediction out.
        streams: Batches streamed by the host in each repeat, for the times between chunks.
        large: Number of bytes, far beyond all caches, for measuring the bandwidth; 0 leaves the
            roofline out.
        on_progress: Called with the current step before each pass of a contender.
        on_result: Called with the result after each pass.

    Returns:
        The report. Ctrl-C after the first repeat ends the measurement; the report is then of the
        completed repeats.

    Raises:
        ValueError: There is nothing to measure, or a batch would not be full.
    """
    if batch_size < 1 or len(prompts) % batch_size:
        raise ValueError(
            f"{len(prompts)} prompts do not fill batches of {batch_size}; give a multiple of it"
        )
    if not prompts or repeats < 1 or max_new_tokens < 2:
        raise ValueError("a benchmark needs at least one prompt, one repeat and two new tokens")
    if tasks and len(tasks) != len(prompts):
        raise ValueError(f"{len(tasks)} tasks for {len(prompts)} prompts; give one each, or none")

    starts = range(0, len(prompts), batch_size)
    batches = [list(prompts[start : start + batch_size]) for start in starts]
    ours = [contender for contender in contenders if isinstance(contender, DecoderContender)]
    targets = {contender.dtype: contender.decoder.target for contender in reversed(ours)}
    options = {"max_new_tokens": max_new_tokens, "cost_rounds": cost_rounds, "streams": streams}

    results = []
    for contender in contenders:
        if _fits(contender, batch_size):
            on_progress(f"compiling {contender.name}")
            # All batches, since prompts of other lengths may need other programs.
            with CompileClock() as clock:
                _measure_pass(Measured(contender, 0.0), batches, **options)
            results.append(Measured(contender, clock.seconds))
            on_result(f"{contender.name}: compiled in {clock.seconds:.1f} s")

    # Before and after the runs: a shared machine is not equally fast all the time.
    limits = [_ceiling(targets.values(), batch_size, large)]
    done = 0
    with CompileClock() as clock:
        try:
            for done in range(repeats):
                repeat = f"repeat {done + 1} of {repeats}"
                for measured in results:
                    name = measured.contender.name
                    on_progress(f"{name}, {repeat}")
                    _measure_pass(measured, batches, **options)
                    on_result(f"{name}: {measured.speeds()[-1]:.1f} tokens/s, {repeat}")
        except KeyboardInterrupt:
            if done == 0:
                raise
            repeats = done
            for measured in results:
                del measured.runs[done:], measured.costs[done:]
    limits.append(_ceiling(targets.values(), batch_size, large))

    plain = [measured for measured in results if measured.contender.name in baselines]
    baseline = max(plain, key=lambda measured: Spread.of(measured.speeds()).median)
    by_precision = {measured.contender.dtype: measured for measured in plain}
    tasks_by_batch = [tasks[start : start + batch_size] for start in starts] if tasks else []
    any_target = next(iter(targets.values()), None)
    rows = [
        row_of(
            measured,
            baseline,
            same_precision=by_precision.get(measured.contender.dtype),
            tasks=tasks_by_batch,
            most_bytes_per_second=max(limits),
            target=targets.get(measured.contender.dtype, any_target),
        )
        for measured in results
    ]

    return Report(
        rows=rows,
        baseline=baseline.contender.name,
        num_prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        batch_size=batch_size,
        programs_after_warm_up=clock.programs,
        bytes_per_second=max(limits) or None,
        not_measured=[
            NotMeasured(
                contender.name,
                f"takes {contender.largest_batch} prompt at a time, not {batch_size}",
            )
            for contender in contenders
            if not _fits(contender, batch_size)
        ],
    )


def _measure_pass(
    measured: Measured,
    batches: Sequence[Sequence[Tokens]],
    *,
    max_new_tokens: int,
    cost_rounds: int,
    streams: int,
) -> None:
    """Runs a contender on all batches once.

    Of a decoder of this library the costs and the chunks are measured too.
    """
    contender = measured.contender
    measured.runs.append([contender.run(batch, max_new_tokens) for batch in batches])

    if not isinstance(contender, DecoderContender):
        return
    for batch in batches[:streams]:
        measured.chunks += contender.chunk_seconds(batch, max_new_tokens)
    if cost_rounds:
        costs = step_costs(
            contender.decoder, batches[0], max_new_tokens=max_new_tokens, rounds=cost_rounds
        )
        measured.costs.append(costs)


def _ceiling(targets: Iterable[LoadedTarget], batch_size: int, large: int) -> float:
    """Returns the highest bandwidth for a step of any target; 0 without measuring it."""
    if not large:
        return 0.0
    return max(
        (ceiling(target, rows=batch_size, context=0, large=large) for target in targets),
        default=0.0,
    )


def _fits(contender: Contender, batch_size: int) -> bool:
    return batch_size <= (contender.largest_batch or batch_size)
