"""Speed of decoding: interleaved runs after a warm-up, with their spread and the prediction of the cost model.

The model is ``S = τ / (v + G·c)`` (Leviathan et al., 2023, theorem 3.8, with a verification that is not free): ``τ``
tokens per round, ``v`` the cost of a verification and ``c`` that of a draft step, both in steps of plain decoding, and
``G`` draft steps in a round. All three are measured separately from the speed that they predict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eagle3_jax.bench.contenders import Contender, DecoderContender, Tokens
from eagle3_jax.bench.results import Measured, NotMeasured, Report, acceptance_of, row_of
from eagle3_jax.bench.roofline import ceiling, least_bytes_per_second
from eagle3_jax.bench.step_costs import step_costs
from eagle3_jax.bench.timing import CompileClock, Spread
from eagle3_jax.decode import LoadedTarget


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
    on_progress: Callable[[str], None] = lambda what: None,
    on_result: Callable[[str], None] = lambda what: None,
) -> Report:
    """Runs all contenders in turn on all prompts, ``repeats`` times after a warm-up.

    Contenders take turns, so that a machine that slows down for a while slows all of them.

    Args:
        contenders: Contenders; one that does not take such batches is left out and named in the report.
        prompts: Token ids.
        max_new_tokens: New tokens per prompt; at least 2, since the prefill gives the first.
        repeats: Measured passes.
        baselines: Names of the plain contenders; the others are compared with the fastest of them.
        tasks: Task of each prompt; empty if unknown.
        batch_size: Prompts decoded at once; their number is a multiple of it.
        cost_rounds: Rounds over which the costs of a step are averaged; 0 leaves costs and prediction out.
        streams: Batches streamed by the host in each repeat, for the times between chunks.
        large: Number of bytes, far beyond all caches, for measuring the bandwidth; 0 leaves the roofline out.
        on_progress: Called with the current step before each pass of a contender.
        on_result: Called with the result after each pass.

    Returns:
        The report. Ctrl-C after the first repeat ends the measurement; the report is then of the completed repeats.

    Raises:
        ValueError: There is nothing to measure, or a batch would not be full.
    """
    if batch_size < 1 or len(prompts) % batch_size:
        raise ValueError(f"{len(prompts)} prompts do not fill batches of {batch_size}; give a multiple of it")
    if not prompts or repeats < 1 or max_new_tokens < 2:
        raise ValueError("a benchmark needs at least one prompt, one repeat and two new tokens")
    if tasks and len(tasks) != len(prompts):
        raise ValueError(f"{len(tasks)} tasks for {len(prompts)} prompts; give one each, or none")
    batches = [list(prompts[start : start + batch_size]) for start in range(0, len(prompts), batch_size)]
    fitting, missing = _fitting(contenders, batch_size)
    passing = _Pass(batches, max_new_tokens, cost_rounds, streams)
    measured = []
    for contender in fitting:
        on_progress(f"compiling {contender.name}")
        measured.append(Measured(contender, passing.warm_up(contender)))
        on_result(f"{contender.name}: compiled in {measured[-1].compile_seconds:.1f} s")
    limits, done = [_ceiling(fitting, batch_size, large)], 0
    with CompileClock() as clock:
        try:
            for done in range(repeats):
                for one in measured:
                    on_progress(f"{one.contender.name}, repeat {done + 1} of {repeats}")
                    passing(one)
                    on_result(
                        f"{one.contender.name}: {one.decode_speeds[-1]:.1f} tokens/s, repeat {done + 1} of {repeats}"
                    )
        except KeyboardInterrupt:
            if done == 0:
                raise
            repeats = done
            for one in measured:
                del one.runs[done:], one.costs[done:]
    limits.append(_ceiling(fitting, batch_size, large))  # a shared machine is not equally fast all the time
    named = {one.contender.name: one for one in measured}
    baseline = max((named[name] for name in baselines), key=lambda one: Spread.of(one.decode_speeds).median)
    plain_output = {named[name].contender.dtype: [run.tokens for run in named[name].runs[0]] for name in baselines}
    rows = [
        row_of(
            one,
            baseline,
            plain_output=plain_output.get(one.contender.dtype),
            tasks=[tasks[start : start + batch_size] for start in range(0, len(tasks), batch_size)],
            bandwidth_share=_bandwidth_share(one, fitting, batch_size, max(limits)),
        )
        for one in measured
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
        not_measured=missing,
    )


class _Pass:
    """One pass of a contender over all prompts."""

    def __init__(self, batches: list[list[Tokens]], max_new_tokens: int, cost_rounds: int, streams: int):
        self.batches, self.max_new_tokens = batches, max_new_tokens
        self.cost_rounds, self.streams = cost_rounds, streams

    def __call__(self, measured: Measured) -> None:
        """Measures one pass."""
        contender, limit = measured.contender, self.max_new_tokens
        measured.runs.append([contender.run(batch, limit) for batch in self.batches])
        if not isinstance(contender, DecoderContender):
            return
        for batch in self.batches[: self.streams]:
            measured.chunks += contender.chunk_seconds(batch, limit)
        if self.cost_rounds:
            costs = step_costs(contender.decoder, self.batches[0], max_new_tokens=limit, rounds=self.cost_rounds)
            measured.costs.append(costs)

    def warm_up(self, contender: Contender) -> float:
        """Compiles everything and returns the seconds; prompts of other lengths may need other programs."""
        with CompileClock() as clock:
            self(Measured(contender, 0.0))
        return clock.seconds


def _fitting(contenders: Sequence[Contender], batch_size: int) -> tuple[list[Contender], list[NotMeasured]]:
    fitting, missing = [], []
    for one in contenders:
        if one.largest_batch is None or batch_size <= one.largest_batch:
            fitting.append(one)
        else:
            missing.append(NotMeasured(one.name, f"takes {one.largest_batch} prompt at a time, not {batch_size}"))
    return fitting, missing


def _targets(contenders: Sequence[Contender]) -> dict[str, LoadedTarget]:
    """Targets of this library by precision."""
    ours = [one for one in contenders if isinstance(one, DecoderContender)]
    return {one.dtype: one.decoder.target for one in reversed(ours)}


def _ceiling(contenders: Sequence[Contender], batch_size: int, large: int) -> float:
    """The highest bandwidth measured at the sizes of the targets' steps and far beyond all caches; 0 if left out."""
    targets = _targets(contenders).values()
    return max((ceiling(target, rows=batch_size, context=0, large=large) for target in targets if large), default=0.0)


def _bandwidth_share(measured: Measured, contenders: Sequence[Contender], batch_size: int, most: float) -> float | None:
    targets = _targets(contenders)
    acceptance = acceptance_of(measured)
    if not most or not targets or (measured.contender.drafts and acceptance is None):
        return None
    target = targets.get(measured.contender.dtype, next(iter(targets.values())))
    speed = Spread.of(measured.decode_speeds).median
    tau = 1.0 if acceptance is None else acceptance.mean_acceptance_length
    return least_bytes_per_second(target, tokens_per_second=speed, tokens_per_round=tau, rows=batch_size) / most
