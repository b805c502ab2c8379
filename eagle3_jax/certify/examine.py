"""Asks a server for greedy and sampled answers, and judges them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from eagle3_jax.bench.environment import git
from eagle3_jax.certify.certificate import Certificate
from eagle3_jax.certify.client import Client, Completion, ServerError
from eagle3_jax.certify.statistics import Draws, Sampling, Test, judge
from eagle3_jax.testing.frequencies import smallest_deviation
from eagle3_jax.testing.report import ALPHA

REPEATED_PROMPTS = 4  # prompts that half of the sampled requests share, with unlike seeds
SCORED = 32  # sampled answers that are scored by force
SAME_SEEDS = 4  # requests that are sent twice
TWO_SAMPLE_TOKENS = 3  # tokens of each answer where only texts can be compared
_LEAST_NOISE = 1e-4  # difference of log-probabilities that no server is held to
_NOISE = 30  # medians of the differences between decoded and forced log-probabilities that count as noise
_MOST_NOISY = 0.01  # share of tokens that may differ by more than the noise
_MOST_LOST = 0.1  # share of the requests that may fail


@dataclasses.dataclass(frozen=True)
class Plan:
    """The requests of a certificate.

    Attributes:
        prompts: Texts or token ids.
        sampling: Temperature, top-k and top-p of the sampled answers.
        num_requests: Number of sampled answers; 0 for none.
        max_new_tokens: Tokens of each answer.
        num_greedy: Number of greedy answers; 0 for none.
        num_reported: Log-probabilities of each position.
        concurrency: Requests at a time.
        seed: Seed of the first request; each has its own.
    """

    prompts: Sequence[str | list[int]]
    sampling: Sampling = Sampling()
    num_requests: int = 512
    max_new_tokens: int = 32
    num_greedy: int = 16
    num_reported: int = 20
    concurrency: int = 8
    seed: int = 0

    def prompt_of(self, request: int) -> int:
        """Returns the number of a sampled request's prompt: the first few have half of all requests."""
        half, is_odd = divmod(request, 2)
        return half % (len(self.prompts) if is_odd else min(REPEATED_PROMPTS, len(self.prompts)))


def certify(
    client: Client,
    plan: Plan,
    *,
    plain: Client | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Certificate:
    """Judges a server.

    Args:
        client: The server.
        plan: What it is asked.
        plain: The same model without speculation, for a server that reports no log-probabilities.
        on_progress: Takes a line about each answer.

    Raises:
        ServerError: The server answers nothing, or reports nothing and there is no plain one.
        ValueError: The reports do not determine the distribution of such a sampling.
    """
    plan.sampling.check(plan.num_reported)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    clock = time.perf_counter()
    before = client.counters()
    examination = _Examination(client, plan, on_progress)
    # Whether the server reports anything, and scores a prompt, is seen before hundreds of requests are sent.
    probe = client.complete(plan.prompts[0], num_reported=plan.num_reported, max_tokens=2, temperature=0.0)
    if probe.reports:
        reported = min(len(report.top) for report in probe.reports)
        if reported < plan.num_reported:
            raise ServerError(
                f"{client.url} reports {reported} log-probabilities where {plan.num_reported} were asked for; ask for "
                f"{reported} (--logprobs)"
            )
        client.score(plan.prompts[0], probe, num_reported=plan.num_reported)
        examination.judge_greedy()
        examination.judge_sampled()
    elif plain is not None:
        examination.compare_with(plain)
    else:
        raise ServerError(
            f"{client.url} reports no log-probabilities; name the same model without speculation with --plain-url, "
            "and texts are compared, which sees much less"
        )
    if examination.failures and not examination.answered:
        raise ServerError(examination.failures[0])
    after = client.counters()
    drafted = {name: (np.array(count) - before.get(name, 0)).tolist() for name, count in after.items()}
    request_facts = {**vars(plan), "prompts": len(plan.prompts), "sampling": dataclasses.asdict(plan.sampling)}
    return Certificate(
        first_tokens=examination.first_tokens,
        tests=examination.tests,
        notes=examination.notes,
        facts={"url": client.url, **client.facts, **drafted, **request_facts},
        requests=examination.answered,
        lost=len(examination.failures),
        is_partial=bool(examination.stopped),
        seconds=time.perf_counter() - clock,
        started=started,
        commit=_commit(),
    )


def _commit() -> str:
    state = git()
    return f"{state['commit']}{'+' if state['dirty'] else ''}" if isinstance(state, dict) else ""


class _Examination:
    """Sends requests, a few at a time, and collects what their answers show.

    Attributes:
        first_tokens: Tests of the tokens that no draft reaches.
        tests: Tests of all others.
        notes: What else was seen.
        answered: Number of answers.
        failures: The errors of requests that failed.
        stopped: Why no more requests are sent; empty while they are.
    """

    def __init__(self, client: Client, plan: Plan, on_progress: Callable[[str], None]) -> None:
        self._client = client
        self._plan = plan
        self._on_progress = on_progress
        self.first_tokens: list[Test] = []
        self.tests: list[Test] = []
        self.notes: list[str] = []
        self.answered = 0
        self.failures: list[str] = []
        self.stopped = ""

    def judge_greedy(self) -> None:
        """Scores greedy answers: each token is the likeliest, tied with it within the noise, or wrong."""
        prompt_of = lambda request: request % len(self._plan.prompts)
        send = lambda request: self._send(self._client, prompt_of(request), temperature=0.0)
        answers = self._ask("greedy answers", self._plan.num_greedy, send)
        index, gaps, differences = self._scores([(prompt_of(request), answer) for request, answer in answers.items()])
        noise = _noise(differences)
        for is_first, tests in ((True, self.first_tokens), (False, self.tests)):
            chosen = gaps[(index == 0) == is_first]
            if not len(chosen):
                continue
            wrong = chosen[chosen > noise]
            ties = int((chosen > 0).sum())
            detail = f"none wrong: fewer than {3 / len(chosen):.2g} of all (95 %); {ties} tied within {noise:.1g}"
            if len(wrong):
                detail = f"{len(wrong)} are not the likeliest, by up to {wrong.max():.2g}; noise {noise:.1g}"
            tests.append(Test("greedy tokens, scored by force", 0.0 if len(wrong) else 1.0, len(chosen), detail))

    def judge_sampled(self) -> None:
        """Tests sampled answers against the reported distributions, and those against forced ones."""
        plan = self._plan
        send = lambda request: self._sample(self._client, plan.prompt_of(request), plan.seed + request)
        answers = self._ask("sampled answers", plan.num_requests, send)
        answers = {request: answer for request, answer in answers.items() if answer.reports}
        if not answers:
            return
        draws = draws_of(answers, plan)
        is_first = draws.index == 0
        level = ALPHA / 20  # close to that of a test, whose number depends on what there is to test
        self.first_tokens += judge(draws[is_first], alpha=level, seed=plan.seed)
        self.tests += judge(draws[~is_first], alpha=level, seed=plan.seed)
        if draws.chunk_index.any():
            self.notes.append(f"Chunks have {len(draws) / (draws.chunk_index == 0).sum():.2f} tokens on average.")
        else:
            self.notes.append("Chunks have one token, so places were not judged by their index in a round.")
        if not plan.sampling.processed:
            scored = [(plan.prompt_of(request), answers[request]) for request in list(answers)[:SCORED]]
            _, _, differences = self._scores(scored)
            noise = _noise(differences)
            different = int((differences > noise).sum())
            p_value = float(stats.binom.sf(different - 1, len(differences), _MOST_NOISY))
            detail = f"{different} differ by more than {noise:.1g}; at most {_MOST_NOISY:.0%} may"
            if len(differences):
                name = "reported against forced log-probabilities"
                self.tests.append(Test(name, p_value, len(differences), detail))
        again = self._ask("answers to the same seeds", min(SAME_SEEDS, plan.num_requests), send)
        same = sum(answer.text == answers[request].text for request, answer in again.items() if request in answers)
        if again:
            self.notes.append(f"The same seed wrote the same text in {same} of {len(again)} requests.")

    def compare_with(self, plain: Client) -> None:
        """Compares sampled texts of two servers, for a few prompts."""
        plan = self._plan
        num_prompts = min(REPEATED_PROMPTS, len(plan.prompts))
        counts: list[Counter] = []
        for first_seed, server in ((plan.seed, self._client), (plan.seed + plan.num_requests, plain)):

            def send(request: int, server: Client = server, first_seed: int = first_seed) -> Completion:
                return self._sample(server, request % num_prompts, first_seed + request, max_tokens=TWO_SAMPLE_TOKENS)

            answers = self._ask(f"answers of {server.url}", plan.num_requests, send)
            counts.append(Counter((request % num_prompts, answer.text) for request, answer in answers.items()))
        self.tests += compare_texts(counts[0], counts[1])
        self.notes.append("The server reports no log-probabilities, so texts of two servers were compared.")

    def _sample(self, server: Client, prompt: int, seed: int, **options: Any) -> Completion:
        sampling = self._plan.sampling
        top_k = sampling.top_k or -1
        fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k, "seed": seed}
        return self._send(server, prompt, **fields, **options)

    def _send(self, server: Client, prompt: int, **options: Any) -> Completion:
        options = {"max_tokens": self._plan.max_new_tokens} | options
        return server.complete(self._plan.prompts[prompt], num_reported=self._plan.num_reported, **options)

    def _ask(self, name: str, number: int, send: Callable[[int], Any]) -> dict[int, Any]:
        """Returns the answers to requests ``0 .. number - 1``, without those that failed."""
        answers: dict[int, Any] = {}
        if self.stopped:
            return answers
        pool = concurrent.futures.ThreadPoolExecutor(self._plan.concurrency)
        try:
            futures = {pool.submit(send, request): request for request in range(number)}
            for future in concurrent.futures.as_completed(futures):
                try:
                    answers[futures[future]] = future.result()
                    self.answered += 1
                except ServerError as error:
                    self.failures.append(str(error))
                    if len(self.failures) > max(3.0, _MOST_LOST * number):
                        self._stop(f"{len(self.failures)} requests failed: {error}")
                        break
                self._on_progress(f"{name}: {len(answers)} of {number}")
        except KeyboardInterrupt:
            self._stop("interrupted")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(answers.items()))

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self.notes.append(f"Only a part was judged: {reason}.")

    def _scores(self, answers: Sequence[tuple[int, Completion]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores answers to prompts by force.

        Returns:
            For each token its position behind the prompt, by how much a likelier token's log-probability is larger, and
            the distance of its log-probability from the one reported while decoding.
        """

        def score(row: int) -> list[tuple[int, float, float]]:
            prompt, answer = answers[row]
            scored = self._client.score(self._plan.prompts[prompt], answer, num_reported=self._plan.num_reported)
            values = []
            for index, (forced, decoded) in enumerate(zip(scored, answer.reports, strict=False)):
                is_known = not math.isnan(forced.log_prob)
                # A token that is not among the reported ones has at most the least of their probabilities.
                log_prob = forced.log_prob if is_known else min(forced.top.values())
                difference = abs(decoded.log_prob - log_prob) if is_known else 0.0
                values.append((index, max(forced.top.values()) - log_prob, difference))
            return values

        scores = self._ask("scored answers", len(answers), score).values()
        index, gaps, differences = np.array([value for values in scores for value in values]).reshape(-1, 3).T
        return index, gaps, differences


def _noise(differences: np.ndarray) -> float:
    """Returns the difference of log-probabilities that is put down to rounding."""
    return max(_LEAST_NOISE, _NOISE * float(np.median(differences))) if len(differences) else _LEAST_NOISE


def compare_texts(first: Counter, second: Counter) -> list[Test]:
    """Compares the texts of two samples, counted by ``(prompt, text)``; no test if nothing is seen often enough."""
    statistic = 0.0
    degrees = 0
    for prompt in {prompt for prompt, _ in first}:
        table = _table(_of_prompt(first, prompt), _of_prompt(second, prompt))
        if table.shape[1] > 1 and table.sum(axis=1).all():
            of_prompt, _, freedom, _ = stats.chi2_contingency(table, correction=False)
            statistic += float(of_prompt)  # type: ignore[arg-type]
            degrees += int(freedom)  # type: ignore[arg-type]
    if not degrees:
        return []
    # Two equal samples have half of the noncentrality that one has against a known distribution.
    sees = smallest_deviation(first.total(), degrees, alpha=ALPHA) / math.sqrt(2)
    p_value = float(stats.chi2.sf(statistic, degrees))
    detail = f"χ² {statistic:.1f} on {degrees} degrees"
    return [Test(f"texts of {TWO_SAMPLE_TOKENS} tokens", p_value, TWO_SAMPLE_TOKENS * first.total(), detail, sees)]


def _of_prompt(counts: Counter, prompt: int) -> dict[str, int]:
    return {text: count for (number, text), count in counts.items() if number == prompt}


def _table(first: dict[str, int], second: dict[str, int], least: int = 10) -> np.ndarray:
    """Returns the counts of texts in two samples ``[2 C]``; those seen less than ``least`` times are the last cell."""
    texts = first | second
    counts = np.array([[sample.get(text, 0) for text in texts] for sample in (first, second)])
    is_common = counts.sum(axis=0) >= least
    table = np.column_stack([counts[:, is_common], counts[:, ~is_common].sum(axis=1)])
    return table[:, table.sum(axis=0) > 0]


def draws_of(answers: dict[int, Completion], plan: Plan) -> Draws:
    """Returns the tokens of sampled answers, by number of the request, with the distributions that were reported."""
    reports = [report for answer in answers.values() for report in answer.reports]
    ids = np.full((len(reports), plan.num_reported), -1)
    log_probs = np.full(ids.shape, -math.inf)
    for row, report in enumerate(reports):
        # The token itself may be reported behind the likeliest ones.
        ranked = sorted(report.top.items(), key=lambda entry: -entry[1])[: plan.num_reported]
        ids[row, : len(ranked)] = [token for token, _ in ranked]
        log_probs[row, : len(ranked)] = [value for _, value in ranked]
    return Draws.of_answers(
        [[report.token for report in answer.reports] for answer in answers.values()],
        prompts=[plan.prompt_of(request) for request in answers],
        requests=list(answers),
        chunk_index=[answer.chunk_index for answer in answers.values()],
        ids=ids,
        log_probs=log_probs,
        sampling=plan.sampling,
    )
