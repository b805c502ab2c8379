"""The contract of an acceptance rule, run on somebody's own: :func:`check_verifier`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from eagle3_jax.boundary import require_verifier
from eagle3_jax.contract.frequencies import ChiSquare, Contrast, chi_square
from eagle3_jax.contract.proposals import MAX_DEPTH, ONE_TOKEN, ROOT, ROWS, Decided, Shape, VerifierSubject, warped
from eagle3_jax.contract.report import ALPHA, PROTOCOL, Broken, ContractReport, NotRun, Skipped, class_name, examine
from eagle3_jax.types import Draft, Verifier, Warping


def check_verifier(
    verifier: Verifier, *, checks: Collection[str] | None = None, samples: int = 32768, seed: int = 0
) -> ContractReport:
    """Run an acceptance rule of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_verifier(MyRule()))`` shows the report. Drafts are chains of 12 nodes and trees
    of 16, of the likeliest tokens and of sampled ones; only chains for a rule that says ``chains_only``. They are
    verified with a ``max_depth`` of 12, with temperatures 0.7 to 1.3 over 80 tokens, and with top-k 3 and top-p 0.8
    over 7 tokens. A quarter of the 768 rows of each batch has temperature 0.

    A rule that says ``lossless=True`` must emit the target's distribution. Each statistical check fails a correct rule
    once in a million runs. A rule that says ``lossless=False`` is measured, not judged.

    **Limits.** The report says what each statistical check detects with 90 % power. With the default ``samples``:
    first tokens whose probabilities are 15 % off (root mean square, in one shape and setting), drafted tokens that are
    0.8 % too frequent everywhere, all tokens sampled from ``p^1.013`` instead of ``p``, uniforms of 12 bits or fewer,
    and 2.1 % of the rows with the uniforms of a row at a fixed distance. For ``chains_only`` the second and the third
    are 1.0 % and ``p^1.017``. These deviations shrink with the square root of ``samples``; each bit of the uniforms
    doubles ``samples``. No check sees a fault that needs more than 16 nodes, 768 rows or 80 tokens.

    Args:
        verifier: An instance.
        checks: Which of :data:`VERIFIER_CHECKS`; all when left out.
        samples: Number of drafts for each kind of draft (chain or tree, likeliest or sampled tokens). Half of them are
            truncated. Rare tokens get four times as many.
        seed: Seed of the drafts, of the target and of the keys.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    findings = examine(VerifierSubject(verifier, samples, seed), VERIFIER_CHECKS, checks)
    return ContractReport(f"{class_name(verifier)}, lossless={getattr(verifier, 'lossless', None)!r}", findings)


def keeps_the_protocol(subject: VerifierSubject) -> str:
    """It is an instance that says whether it is lossless, and the same static argument whenever it is asked."""
    verifier = subject.verifier
    require_verifier(verifier)
    if hash(verifier) != hash(verifier) or verifier != verifier:
        raise Broken("its hash changes, or it is not equal to itself, so every call would compile anew")
    return f"says lossless={verifier.lossless}"


def gives_verdicts(subject: VerifierSubject) -> str:
    """Verdicts have the sizes and types of the protocol."""
    return f"{len([subject.decide(shape, greedy=greedy) for shape, greedy in _everything(subject)])} programs"


def accepts_a_path(subject: VerifierSubject) -> str:
    """What is accepted is a path of valid nodes, each the child of the one before, and -1 behind it."""
    accepted = 0
    for shape, greedy in _everything(subject):
        decided = subject.decide(shape, greedy=greedy)
        for row in range(ROWS):
            path, count = decided.path[row].tolist(), int(decided.num_accepted[row])
            if not 0 <= count <= len(path) or path[count:] != [-1] * (len(path) - count):
                raise Broken(
                    f"it accepts {count} tokens by the path {path}; expected as many nodes, and -1 behind them"
                )
            above = 0
            for node in path[:count]:
                if not 0 < node < len(shape.parents) or shape.parents[node] != above:
                    raise Broken(f"in the path {path} of the draft {list(shape.parents)} {node} is no child of {above}")
                if not decided.valid[row, node]:
                    raise Broken(f"in the path {path} node {node} is padding")
                above = node
            accepted += count
    return f"{accepted} draft tokens accepted"


def stays_in_the_vocabulary(subject: VerifierSubject) -> str:
    """The token after the path is one."""
    for shape, greedy in _everything(subject):
        token = subject.decide(shape, greedy=greedy).next_token
        outside = (token < 0) | (token >= shape.vocabulary)
        if outside.any():
            raise Broken(f"its next token is id {token[outside][0]} of {shape.vocabulary} tokens")
    return ""


def decides_from_its_arguments(subject: VerifierSubject) -> str:
    """Asked again, or traced anew, it decides the same."""
    *_, shape = subject.shapes.values()
    first = subject.decide(shape)
    subject.decide(shape, run=1)
    for again, how in ((False, "a second call"), (True, "tracing it anew")):
        if rows := _differing(first, subject.decide(shape, anew=again)):
            raise Broken(f"{how} decided otherwise in {len(rows)} of {ROWS} rows; keys are all its randomness")
    return ""


def is_alone_in_its_row(subject: VerifierSubject) -> str:
    """A row's verdict does not depend on its neighbours' drafts, and its dice are not those of another row or round."""
    own = np.arange(ROWS) % 2 == 0
    for shape in subject.shapes.values():
        one, other = subject.drafts(shape, 0), subject.drafts(shape, 1)
        mix = lambda a, b: jnp.where(own.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        fields = {name: mix(getattr(one, name), getattr(other, name)) for name in ("tokens", "parents", "valid")}
        if one.probs is not None and other.probs is not None:
            fields["probs"] = mix(one.probs, other.probs)
        mixed = subject.decide(shape, draft=one.replace(**fields))  # type: ignore[attr-defined]
        rows = [row for row in _differing(subject.decide(shape), mixed) if own[row]]
        if rows:
            raise Broken(f"row {rows[0]} is decided otherwise when its neighbours hold other drafts")
    return _throws_dice_of_its_own(subject)


def _throws_dice_of_its_own(subject: VerifierSubject) -> str:
    """First tokens of rows with the same draft, by how far apart the rows are: covariance of their indicators."""
    shape, rounds = next(iter(subject.shapes.values())), 16
    draft = subject.drafts(shape, 0)
    alike = {name: jnp.repeat(getattr(draft, name)[:1], ROWS, axis=0) for name in ("tokens", "parents", "valid")}
    draft = draft.replace(**alike)  # type: ignore[attr-defined]
    first = [subject.decide(shape, draft=draft, temperature=1.0, run=run).first for run in range(rounds)]
    seen = np.eye(shape.vocabulary)[np.array(first)]
    law = seen.mean((0, 1))
    seen -= law
    spread = math.sqrt(seen.size / len(law) * (np.sum(law**2) - 2 * np.sum(law**3) + np.sum(law**2) ** 2))
    if not spread:
        return "its first tokens are not random"
    power = np.abs(np.fft.rfft(seen, axis=1)) ** 2
    apart = np.fft.irfft(power.sum((0, 2)), ROWS)[1 : ROWS // 2 + 1]
    apart[-1] /= math.sqrt(2)  # half a batch apart every pair is counted twice
    shared = np.append(apart, np.sum(seen[1:] * seen[:-1])) / spread
    most = int(np.abs(shared).argmax())
    tests = len(shared)
    p = 2 * tests * stats.norm.sf(abs(shared[most]))
    if p < ALPHA:
        where = f"rows {most + 1} apart" if most < tests - 1 else "a row in successive rounds"
        raise Broken(f"the same draft gets first tokens in {where} that depend on each other (p = {p:.1g})")
    visible = (stats.norm.isf(ALPHA / 2 / tests) + stats.norm.isf(0.1)) * spread / np.sum(seen**2)
    return f"{rounds * ROWS} first tokens of one draft; {visible:.1%} of the rows with another row's dice {_SEEN}"


def is_greedy_at_temperature_zero(subject: VerifierSubject) -> str:
    """Rows of temperature 0 write the likeliest token after every token, in greedy batches and in mixed ones."""
    wrong, total, where = 0, 0, ""
    for shape, greedy in _everything(subject):
        best, zero = subject.logits[shape.vocabulary].argmax(-1), shape.settings.index((0.0, 0, 1.0))
        for temperature in (0.0, None) if not greedy else (0.0,):
            decided = subject.decide(shape, greedy=greedy, temperature=temperature)
            for row in range(ROWS) if temperature is not None else range(zero, ROWS, len(shape.settings)):
                before = ROOT
                for token in decided.emitted(row):
                    if token != best[before]:
                        mixed = "" if temperature is not None else "in a mixed batch "
                        where = (
                            where or f"{mixed}after id {before} it writes {token} where {best[before]} is the likeliest"
                        )
                        wrong += 1
                    before, total = token, total + 1
    if not subject.verifier.lossless:
        raise Skipped(f"not judged, for it says lossless=False; {1 - wrong / total:.1%} were the likeliest")
    if wrong:
        raise Broken(f"{wrong} of {total} tokens are not the likeliest: {where}")
    return f"{total} tokens"


class _Written(NamedTuple):
    """Tokens that rounds wrote.

    Attributes:
        depth: How many draft tokens were accepted before it.
        setting: Of its row.
        before: The token before it.
        token: Itself.
        favoured: Whether the draft makes it likelier than the target does.
        share: The target's mass of all favoured tokens; 0 where nothing was drafted.
    """

    depth: Int[np.ndarray, " E"]
    setting: Int[np.ndarray, " E"]
    before: Int[np.ndarray, " E"]
    token: Int[np.ndarray, " E"]
    favoured: Bool[np.ndarray, " E"]
    share: Float[np.ndarray, " E"]


def leaves_the_law_alone(subject: VerifierSubject) -> str:
    """Over many keys, every token is as frequent as the target has it after the token before it.

    A rule that is lossless writes each of a round's tokens from the target's distribution given those before it,
    however many it accepts. So the tokens after each number of accepted ones are compared, pairs of tokens, and two
    sums over all of them: of how often what the draft favours was written, and of how likely tokens were.
    """
    worst, accepted, found = 0.0, 0, []
    eager, likely = Contrast(), Contrast()
    for name, shape in subject.shapes.items():
        laws = np.stack([subject.wanted(shape, setting) for setting in shape.settings])
        written = _written(subject, shape, laws)
        accepted += int((written.depth > 0).sum())
        for index, (temperature, top_k, top_p) in enumerate(shape.settings):
            of_setting = _Written(*(values[written.setting == index] for values in written))
            start = of_setting.depth == 0
            seen = np.bincount(of_setting.token[start], minlength=shape.vocabulary) / start.sum()
            worst = max(worst, float(np.abs(seen - laws[index, ROOT]).sum() / 2))
            where = f"with {name} at temperature {temperature}, top-k {top_k}, top-p {top_p}"
            found += [(fit, f"{where} {what}") for fit, what in _fits(of_setting, laws[index])]
        drafted = (written.share > 0) & (written.share < 0.98)
        share = written.share[drafted]
        eager.add((written.favoured[drafted] - share) / (1 - share), share / (1 - share))
        log = np.log(np.where(laws > 0, laws, 1))
        mean, square = (laws * log).sum(-1), (laws * log**2).sum(-1)
        at = (written.setting, written.before)
        likely.add(log[(*at, written.token)] - mean[at], (square - mean**2)[at])
    if not subject.verifier.lossless:
        raise Skipped(
            f"not judged, for it says lossless=False; first tokens lie {worst:.3f} (total variation) from the target's"
        )
    tests = len(found) + 2
    fit, where = min(found, key=lambda pair: pair[0].p_value)
    if fit.p_value * tests < ALPHA:
        raise Broken(f"{where} does not follow the target: {fit.why} (p = {fit.p_value * tests:.1g})")
    for contrast, more, less in (
        (eager, "accepts too much: drafted", "accepts too little: drafted"),
        (likely, "draws too sharply: likely", "draws too flatly: likely"),
    ):
        if contrast.p_value * tests < ALPHA:
            how = f"{more} tokens too often" if contrast.total > 0 else f"{less} tokens too seldom"
            raise Broken(f"over all drafts it {how}, by {contrast.z:.1f} standard deviations")
    if not accepted:
        raise NotRun("the law is right, but no draft token was accepted, so refusals alone were compared")
    drafts, largest = len(subject.shapes) * _runs(subject) * ROWS, max(len(s.parents) for s in subject.shapes.values())
    first = max(fit.visible for fit, what in found if "first" in what and "temperature 0.0" not in what)
    return (
        f"{drafts} drafts of up to {largest} nodes, {accepted / drafts:.2f} tokens accepted of each; first tokens "
        f"{first:.1%} off (rms), all drafted tokens {eager.visible(ALPHA / tests):.1%} too frequent or all tokens "
        f"drawn from p^{1 + likely.visible(ALPHA / tests):.3f} {_SEEN}"
    )


def _runs(subject: VerifierSubject) -> int:
    return max(1, subject.samples // (2 * ROWS))


def _written(subject: VerifierSubject, shape: Shape, laws: Float[np.ndarray, "S V V"]) -> _Written:
    """What rounds with drafts of a shape wrote."""
    parts = []
    for run in range(_runs(subject)):
        decided = subject.decide(shape, run=run)
        row, before, node = np.arange(ROWS), decided.tokens[:, 0], np.zeros(ROWS, int)
        for depth in range(MAX_DEPTH + 1):
            setting, law = row % len(shape.settings), laws[row % len(shape.settings), before]
            children = decided.valid[row] & (np.array(shape.parents) == node[:, None])
            if shape.drawn:
                favours = (subject.proposed[shape.vocabulary][before] > law) & children.any(-1, keepdims=True)
            else:
                favours = np.zeros(law.shape, bool)
                at, child = np.nonzero(children)
                favours[at, decided.tokens[row[at], child]] = True
            goes_on = depth < decided.num_accepted[row]
            node = decided.path[row, min(depth, MAX_DEPTH - 1)] * goes_on
            token = np.where(goes_on, decided.tokens[row, node], decided.next_token[row])
            favoured = favours[np.arange(len(row)), token]
            parts.append((np.full(len(row), depth), setting, before, token, favoured, (law * favours).sum(-1)))
            row, before, node = row[goes_on], token[goes_on], node[goes_on]
            if not len(row):
                break
    return _Written(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _fits(written: _Written, law: Float[np.ndarray, "V V"]) -> Iterator[tuple[ChiSquare, str]]:
    """Frequencies after each number of accepted tokens, and of pairs, the first ones being as frequent as they are."""
    vocabulary = len(law)
    for depth in range(written.depth.max() + 1):
        chosen = written.depth == depth
        expected = np.bincount(written.before[chosen], minlength=vocabulary) @ law
        what = f"the token after {depth} accepted ones" if depth else "the first token"
        yield _fit(np.bincount(written.token[chosen], minlength=vocabulary), expected), what
    later = written.depth > 0
    if later.any():
        pairs = np.bincount(written.before[later] * vocabulary + written.token[later], minlength=vocabulary**2)
        expected = np.bincount(written.before[later], minlength=vocabulary)[:, None] * law
        yield _fit(pairs, expected.ravel()), "a token after an accepted one"


def _fit(seen: Int[np.ndarray, " C"], expected: Float[np.ndarray, " C"]) -> ChiSquare:
    counts = Counter({(cell,): int(seen[cell]) for cell in np.flatnonzero(seen)})
    law = {(int(cell),): float(expected[cell] / expected.sum()) for cell in np.flatnonzero(expected)}
    return chi_square(counts, law, alpha=ALPHA)


def keeps_what_is_rare(subject: VerifierSubject) -> str:
    """Tokens that the target wants once in thousands of rounds are accepted, and drawn, that often.

    A rule whose dice are too coarse accepts and draws them too often, or never.
    """
    runs, vocabulary = max(1, 4 * subject.samples // ROWS), ONE_TOKEN.vocabulary
    bits = round(math.log2(runs * ROWS)) - 5
    rng = np.random.default_rng([subject.seed, 4])
    masses = np.concatenate([
        rng.uniform(0.5, 1, 60) * 2**-bits, np.full(12, 2.0 ** -(bits + 3)), rng.dirichlet(np.full(8, 5.0))
    ])  # fmt: skip
    place = rng.permutation(vocabulary)
    logits = np.zeros(vocabulary, np.float32)
    logits[place] = np.log(masses)
    law = warped(logits.astype(np.float64), 1.0, 0, 1.0)
    tokens = np.zeros((ROWS, 2), np.int32)
    tokens[:, 1] = place[60 + np.arange(ROWS) % 12]
    every = lambda value: jnp.broadcast_to(jnp.asarray(value), tokens.shape)
    draft = Draft(tokens=jnp.asarray(tokens), parents=every(np.array([-1, 0], np.int32)), valid=every(True))
    after = np.broadcast_to(logits, (vocabulary, vocabulary))
    seen, taken = np.zeros(vocabulary, int), 0
    for run in range(runs):
        first = subject.decide(ONE_TOKEN, draft=draft, logits=after, temperature=1.0, run=run).first
        seen += np.bincount(first, minlength=vocabulary)
        taken += int((first == tokens[:, 1]).sum())
    due = float(law[tokens[:, 1]].sum() * runs)
    if not subject.verifier.lossless:
        raise Skipped(f"not judged, for it says lossless=False; {taken} rare drafts were written, {due:.1f} are due")
    p = 4 * min(stats.poisson.sf(taken - 1, due), stats.poisson.cdf(taken, due))
    if p < ALPHA:
        raise Broken(
            f"of {runs * ROWS} drafts of rare tokens {taken} were written; the target wants {due:.1f} (p = {p:.1g})"
        )
    fit = _fit(seen, law * seen.sum())
    if 2 * fit.p_value < ALPHA:
        raise Broken(
            f"tokens that are rarely due are drawn too often or too seldom: {fit.why} (p = {2 * fit.p_value:.1g})"
        )
    return f"{runs * ROWS} drafts; dice of {bits} bits {_SEEN}"


_SEEN = "would have shown nine times in ten"
VERIFIER_CHECKS: dict[str, Callable[[VerifierSubject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": gives_verdicts,
    "accepts a path of the draft": accepts_a_path,
    "stays in the vocabulary": stays_in_the_vocabulary,
    "decides from its arguments alone": decides_from_its_arguments,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "temperature 0 is greedy": is_greedy_at_temperature_zero,
    "what is rare is as rare as the target has it": keeps_what_is_rare,
    "what it emits has the target's law": leaves_the_law_alone,
}


def _everything(subject: VerifierSubject) -> list[tuple[Shape, bool]]:
    """Every shape in a sampled batch, and in a greedy one those that differ there, where distributions are left out."""
    shapes = list(subject.shapes.values())
    plain = [shape for shape in shapes if not shape.drawn and shape.warping is Warping.TEMPERATURE]
    return [(shape, False) for shape in shapes] + [(shape, True) for shape in plain]


def _differing(one: Decided, other: Decided) -> list[int]:
    """Rows with another verdict."""
    same = (one.path == other.path).all(-1) & (one.num_accepted == other.num_accepted)
    return np.flatnonzero(~(same & (one.next_token == other.next_token))).tolist()
