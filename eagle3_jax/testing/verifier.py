"""The contract of an acceptance rule: :func:`check_verifier`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special, stats

from eagle3_jax.checks import require_part, require_verdict
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.frequencies import Contrast, Fit, goodness_of_fit
from eagle3_jax.testing.report import (
    ALPHA,
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    Skipped,
    class_name,
    examine,
    require_stable_hash,
)
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict, Verifier

ROWS = 768
_SEEN = "would have shown nine times in ten"
MAX_DEPTH = 12  # one more than any draft is deep
ROOT = 0
_SETTINGS = ((1.0, 0, 1.0), (0.7, 3, 1.0), (1.3, 0, 0.8), (0.0, 0, 1.0))  # a quarter of the rows is greedy
# Ids of two digits where a draw goes digit by digit; truncation sorts, and 80 tokens take a CPU 15 times longer.
_WIDE = 80
_NARROW = 7


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
        checks: Names of :data:`VERIFIER_CHECKS`; all of them by default.
        samples: Number of drafts for each kind of draft (chain or tree, likeliest or sampled tokens). Half of them are
            truncated. Rare tokens get four times as many.
        seed: Seed of the drafts, of the target and of the keys.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    title = f"{class_name(verifier)}, lossless={getattr(verifier, 'lossless', None)!r}"
    return examine(title, VerifierSubject(verifier, samples, seed), VERIFIER_CHECKS, checks)


class Shape(NamedTuple):
    """How a draft is made."""

    parents: tuple[int, ...]
    drawn: bool  # tokens are drawn and declare their distribution; otherwise they are the likeliest ones by rank
    sampling_mode: SamplingMode  # of the sampled batches that verify it

    @property
    def vocabulary(self) -> int:
        """``V``."""
        return _NARROW if self.sampling_mode is SamplingMode.TRUNCATED else _WIDE

    @property
    def settings(self) -> tuple[tuple[float, int, float], ...]:
        """Temperature, top-k and top-p; row ``b`` has those of ``b`` modulo how many there are."""
        if self.sampling_mode is SamplingMode.TRUNCATED:
            return _SETTINGS
        return tuple((temperature, 0, 1.0) for temperature, _, _ in _SETTINGS)


_CHAIN = tuple(range(-1, 11))
_TREE = (-1, 0, 1, 1, 2, 2, 4, 0, 7, 7, 8, 3, 0, 10, 10, 13)  # late nodes at the root, so that each is often visited
SHAPES = {
    f"{what}{how}": Shape(parents, drawn, sampling_mode)
    for sampling_mode, how in ((SamplingMode.TEMPERATURE, ""), (SamplingMode.TRUNCATED, " under truncation"))
    for parents, drawn, what in (
        (_CHAIN, False, "a chain"),
        (_CHAIN, True, "a drawn chain"),
        (_TREE, False, "a tree"),
        (_TREE, True, "a tree of drawn siblings"),
    )
}
ONE_TOKEN = Shape((-1, 0), False, SamplingMode.TEMPERATURE)


class Decided(NamedTuple):
    """Drafts and the verdicts on them, on the host."""

    tokens: Int[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    path: Int[np.ndarray, "B G"]
    num_accepted: Int[np.ndarray, " B"]
    next_token: Int[np.ndarray, " B"]

    @property
    def first(self) -> Int[np.ndarray, " B"]:
        """The first token that each row writes."""
        child = np.take_along_axis(self.tokens, np.maximum(self.path[:, :1], 0), axis=1)[:, 0]
        return np.where(self.num_accepted > 0, child, self.next_token)

    def emitted(self, row: int) -> list[int]:
        """Tokens that the round writes."""
        nodes = self.path[row, : self.num_accepted[row]]
        return [*self.tokens[row, nodes].tolist(), int(self.next_token[row])]


@dataclasses.dataclass(frozen=True, eq=False)
class VerifierSubject:
    """An acceptance rule, the number of samples of statistical checks, and the programs that call the rule.

    The target is a table: its distribution depends on the last token alone, so the distribution of the output is known.
    """

    verifier: Verifier
    samples: int = 32768
    seed: int = 0

    @property
    def shapes(self) -> dict[str, Shape]:
        """The drafts that the rule is for."""
        chains_only = getattr(self.verifier, "chains_only", False)
        return {name: shape for name, shape in SHAPES.items() if shape.parents == _CHAIN or not chains_only}

    @functools.cached_property
    def logits(self) -> dict[int, Float[np.ndarray, "V V"]]:
        """By ``V``, the target's logits after each token: nearly flat after some, nearly certain after others."""
        return {vocabulary: self._table(vocabulary) for vocabulary in (_WIDE, _NARROW)}

    def _table(self, vocabulary: int, attempt: int = 0) -> Float[np.ndarray, "V V"]:
        rng = np.random.default_rng([self.seed, 1, attempt])
        scale = rng.uniform(1, 5, (vocabulary, 1))
        scale[ROOT] = 2
        logits = rng.normal(0, scale, (vocabulary, vocabulary)).astype(np.float32)
        if vocabulary == _NARROW and _near_the_cut(logits) < 1e-4:
            return self._table(vocabulary, attempt + 1)
        return logits

    @functools.cached_property
    def proposed(self) -> dict[int, Float[np.ndarray, "V V"]]:
        """By ``V``, the distributions that drafts are made from: near the target's, and different."""
        rng = np.random.default_rng([self.seed, 2])
        return {
            vocabulary: special.softmax(logits + rng.normal(0, 0.8, logits.shape), axis=-1).astype(np.float32)
            for vocabulary, logits in self.logits.items()
        }

    def wanted(self, shape: Shape, setting: tuple[float, int, float]) -> Float[np.ndarray, "V V"]:
        """The target's distribution after each token under a row's sampling, computed without the library."""
        return np.stack([warped(row, *setting) for row in self.logits[shape.vocabulary].astype(np.float64)])

    def drafts(self, shape: Shape, run: int) -> Draft:
        """Random drafts, ``[ROWS N]``; one node in twenty is padding."""
        rng = np.random.default_rng([self.seed, 3, run])
        nodes = len(shape.parents)
        proposed = self.proposed[shape.vocabulary]
        sums = np.cumsum(proposed, axis=-1)
        ranked = np.argsort(-proposed, axis=-1)
        tokens = np.full((ROWS, nodes), ROOT, np.int32)
        probs = np.zeros((ROWS, nodes, shape.vocabulary), np.float32)
        seen = [0] * nodes  # children so far
        for node, parent in enumerate(shape.parents[1:], 1):
            before = tokens[:, parent]
            if shape.drawn:
                tokens[:, node] = (rng.random((ROWS, 1)) * sums[before, -1:] < sums[before]).argmax(-1)
                probs[:, node] = proposed[before]
            else:
                tokens[:, node] = ranked[before, seen[parent]]
            seen[parent] += 1
        valid = rng.random((ROWS, nodes)) < 0.95
        valid[:, 0] = True
        parents = np.broadcast_to(np.array(shape.parents, np.int32), tokens.shape)
        return Draft(
            tokens=jnp.asarray(tokens),
            parents=jnp.asarray(parents),
            valid=jnp.asarray(valid),
            probs=jnp.asarray(probs) if shape.drawn else None,
        )

    def decide(
        self,
        shape: Shape,
        *,
        run: int = 0,
        greedy: bool = False,
        draft: Draft | None = None,
        logits: Float[np.ndarray, "V V"] | None = None,
        temperature: float | None = None,
        anew: bool = False,
    ) -> Decided:
        """The rule's verdicts on drafts of a shape; ``run`` chooses drafts and keys, ``anew`` traces the rule again.

        In a greedy batch drafts declare no distributions. With a ``temperature`` all rows have it, without truncation.
        """
        draft = self.drafts(shape, run) if draft is None else draft
        given = draft.replace(probs=None) if greedy else draft
        settings = shape.settings if temperature is None else ((temperature, 0, 1.0),)
        rows = np.resize(settings, (ROWS, 3))
        sampling = SamplingParams(
            temperature=jnp.array(rows[:, 0], jnp.float32),
            top_k=jnp.array(rows[:, 1], jnp.int32),
            top_p=jnp.array(rows[:, 2], jnp.float32),
        )
        program = self.deciding() if anew else self._decide
        verdict = program(
            given,
            jnp.asarray(self.logits[shape.vocabulary] if logits is None else logits),
            sampling,
            row_keys(self.seed + run, ROWS),
            SamplingMode.GREEDY if greedy else shape.sampling_mode,
        )
        found = jax.device_get((verdict.path, verdict.num_accepted, verdict.next_token))
        return Decided(np.asarray(draft.tokens), np.asarray(draft.valid), *found)

    def deciding(self) -> Any:
        """The rule traced anew, its verdicts checked."""

        @functools.partial(jax.jit, static_argnums=4)
        def decide(
            draft: Draft, logits: Any, sampling: SamplingParams, keys: Any, sampling_mode: SamplingMode
        ) -> Verdict:
            after = logits[draft.tokens]
            verdict = self.verifier(draft, after, sampling, keys, sampling_mode=sampling_mode, max_depth=MAX_DEPTH)
            require_verdict(self.verifier, verdict, batch=ROWS, max_depth=MAX_DEPTH)
            return verdict

        return decide

    _decide = functools.cached_property(deciding)


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities after temperature, then top-k, then top-p."""
    if not temperature:
        return np.eye(len(logits))[logits.argmax()]
    order = np.argsort(-logits)
    kept = special.softmax(logits[order] / temperature)
    if top_k:
        kept[top_k:] = 0
    kept /= kept.sum()
    if top_p < 1:
        kept[np.cumsum(kept) - kept >= top_p] = 0
    law = np.zeros_like(kept)
    law[order] = kept / kept.sum()
    return law


def _near_the_cut(logits: np.ndarray) -> float:
    """The least distance of a sum of probabilities from top-p, where rounding would decide which tokens are kept."""
    ((temperature, _, top_p),) = (setting for setting in _SETTINGS if setting[2] < 1)
    mass = -np.sort(-special.softmax(logits.astype(np.float64) / temperature, axis=-1), axis=-1)
    return np.abs(np.cumsum(mass, axis=-1) - top_p).min()


def keeps_the_protocol(subject: VerifierSubject) -> str:
    """It is an instance with every member and a stable hash, and says whether it is lossless."""
    verifier = subject.verifier
    require_part(verifier, "verifier")
    require_stable_hash(verifier)
    return f"says lossless={verifier.lossless}"


def gives_verdicts(subject: VerifierSubject) -> str:
    """Verdicts have the shapes of the protocol, a path of valid nodes down the draft, and a token of the vocabulary."""
    accepted = 0
    for shape, greedy in _everything(subject):
        decided = subject.decide(shape, greedy=greedy)
        for row in range(ROWS):
            path = decided.path[row].tolist()
            count = int(decided.num_accepted[row])
            if not 0 <= count <= len(path) or path[count:] != [-1] * (len(path) - count):
                raise Broken(f"it accepts {count} tokens by the path {path}; expected as many nodes, and -1 after them")
            above = 0
            for node in path[:count]:
                if not 0 < node < len(shape.parents) or shape.parents[node] != above:
                    raise Broken(f"in the path {path} of the draft {list(shape.parents)} {node} is no child of {above}")
                if not decided.valid[row, node]:
                    raise Broken(f"in the path {path} node {node} is padding")
                above = node
            accepted += count
        for token in decided.next_token:
            if not 0 <= token < shape.vocabulary:
                raise Broken(f"its next token is id {token} of {shape.vocabulary} tokens")
    return f"{accepted} draft tokens accepted"


def decides_from_its_arguments(subject: VerifierSubject) -> str:
    """A second call and a new trace give the same verdicts."""
    *_, shape = subject.shapes.values()
    first = subject.decide(shape)
    subject.decide(shape, run=1)
    for again, how in ((False, "a second call"), (True, "tracing it anew")):
        if rows := _differing(first, subject.decide(shape, anew=again)):
            raise Broken(f"{how} decided otherwise in {len(rows)} of {ROWS} rows; keys are all its randomness")
    return ""


def is_alone_in_its_row(subject: VerifierSubject) -> str:
    """A row's verdict does not depend on its neighbours' drafts, nor its uniforms on those of another row or round."""
    own = np.arange(ROWS) % 2 == 0
    for shape in subject.shapes.values():
        mix = lambda a, b: jnp.where(own.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        mixed = subject.decide(shape, draft=jax.tree.map(mix, subject.drafts(shape, 0), subject.drafts(shape, 1)))
        rows = [row for row in _differing(subject.decide(shape), mixed) if own[row]]
        if rows:
            raise Broken(f"row {rows[0]} is decided otherwise when its neighbours hold other drafts")
    return _draws_own_uniforms(subject)


def _draws_own_uniforms(subject: VerifierSubject) -> str:
    """Covariance of the first tokens of rows with the same draft, by the distance of the rows."""
    shape = next(iter(subject.shapes.values()))
    rounds = 16
    draft = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], ROWS, axis=0), subject.drafts(shape, 0))
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
    return f"{rounds * ROWS} first tokens of one draft; {visible:.1%} of the rows with another row's uniforms {_SEEN}"


def is_greedy_at_temperature_zero(subject: VerifierSubject) -> str:
    """Rows of temperature 0 emit the likeliest token after every token, in greedy batches and in mixed ones."""
    total = 0
    wrong = []
    for shape, greedy in _everything(subject):
        decided = subject.decide(shape, greedy=greedy, temperature=0.0 if greedy else None)
        best = subject.logits[shape.vocabulary].argmax(-1)
        zero = shape.settings.index((0.0, 0, 1.0))
        for row in range(ROWS) if greedy else range(zero, ROWS, len(shape.settings)):
            before = ROOT
            for token in decided.emitted(row):
                total += 1
                if token != best[before]:
                    mixed = "" if greedy else "in a mixed batch "
                    wrong.append(f"{mixed}after id {before} it writes {token} where {best[before]} is the likeliest")
                before = token
    if not subject.verifier.lossless:
        raise Skipped(f"not judged, for it says lossless=False; {1 - len(wrong) / total:.1%} were the likeliest")
    if wrong:
        raise Broken(f"{len(wrong)} of {total} tokens are not the likeliest: {wrong[0]}")
    return f"{total} tokens"


class _Written(NamedTuple):
    """Emitted tokens."""

    depth: Int[np.ndarray, " E"]  # number of draft tokens accepted before it
    setting: Int[np.ndarray, " E"]  # of its row
    before: Int[np.ndarray, " E"]  # the token before it
    token: Int[np.ndarray, " E"]
    favoured: Bool[np.ndarray, " E"]  # the draft gives it more probability than the target does
    share: Float[np.ndarray, " E"]  # the target's mass of all favoured tokens; 0 if nothing was drafted


def leaves_the_law_alone(subject: VerifierSubject) -> str:
    """Over many keys, every token is as frequent as in the target's distribution after the token before it.

    A rule that is lossless writes each of a round's tokens from the target's distribution given those before it,
    however many it accepts. So the tokens after each number of accepted ones are compared, pairs of tokens, and two
    sums over all of them: of how often what the draft favours was written, and of how likely tokens were.
    """
    worst = 0.0
    accepted = 0
    found = []
    eager = Contrast()
    likely = Contrast()
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
        mean = (laws * log).sum(-1)
        square = (laws * log**2).sum(-1)
        at = (written.setting, written.before)
        likely.add(log[(*at, written.token)] - mean[at], (square - mean**2)[at])
    if not subject.verifier.lossless:
        raise Skipped(
            f"not judged, for it says lossless=False; first tokens lie {worst:.3f} (total variation) from the target's"
        )
    tests = len(found) + 2
    fit, where = min(found, key=lambda pair: pair[0].chi_square)
    if fit.chi_square * tests < ALPHA:
        raise Broken(f"{where} does not follow the target: {fit.why} (p = {fit.chi_square * tests:.1g})")
    for contrast, more, less in (
        (eager, "accepts too much: drafted", "accepts too little: drafted"),
        (likely, "draws too sharply: likely", "draws too flatly: likely"),
    ):
        if contrast.p_value * tests < ALPHA:
            how = f"{more} tokens too often" if contrast.total > 0 else f"{less} tokens too seldom"
            raise Broken(f"over all drafts it {how}, by {contrast.z:.1f} standard deviations")
    if not accepted:
        raise NotRun("the law is right, but no draft token was accepted, so refusals alone were compared")
    drafts = len(subject.shapes) * _runs(subject) * ROWS
    largest = max(len(s.parents) for s in subject.shapes.values())
    first = max(fit.sees(ALPHA) for fit, what in found if "first" in what and fit.degrees)
    return (
        f"{drafts} drafts of up to {largest} nodes, {accepted / drafts:.2f} tokens accepted of each; first tokens "
        f"{first:.1%} off (rms), all drafted tokens {eager.visible(ALPHA / tests):.1%} too frequent or all tokens "
        f"drawn from p^{1 + likely.visible(ALPHA / tests):.3f} {_SEEN}"
    )


def _runs(subject: VerifierSubject) -> int:
    return max(1, subject.samples // (2 * ROWS))


def _written(subject: VerifierSubject, shape: Shape, laws: Float[np.ndarray, "S V V"]) -> _Written:
    """The tokens that rounds with drafts of a shape emit."""
    parts = []
    for run in range(_runs(subject)):
        decided = subject.decide(shape, run=run)
        row = np.arange(ROWS)
        before = decided.tokens[:, 0]
        node = np.zeros(ROWS, int)
        for depth in range(MAX_DEPTH + 1):
            setting = row % len(shape.settings)
            law = laws[row % len(shape.settings), before]
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
            row = row[goes_on]
            before = token[goes_on]
            node = node[goes_on]
            if not len(row):
                break
    return _Written(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _fits(written: _Written, law: Float[np.ndarray, "V V"]) -> Iterator[tuple[Fit, str]]:
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


def _fit(seen: Int[np.ndarray, " C"], expected: Float[np.ndarray, " C"]) -> Fit:
    return goodness_of_fit(dict(enumerate(seen.tolist())), dict(enumerate(expected / expected.sum())))


def keeps_what_is_rare(subject: VerifierSubject) -> str:
    """Tokens with a probability of one in thousands are accepted, and drawn, that often.

    A rule whose uniforms have too few bits accepts and samples them too often, or never.
    """
    runs = max(1, 4 * subject.samples // ROWS)
    vocabulary = ONE_TOKEN.vocabulary
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
    seen = np.zeros(vocabulary, int)
    taken = 0
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
    if 2 * fit.chi_square < ALPHA:
        raise Broken(
            f"tokens that are rarely due are drawn too often or too seldom: {fit.why} (p = {2 * fit.chi_square:.1g})"
        )
    return f"{runs * ROWS} drafts; uniforms of {bits} bits {_SEEN}"


VERIFIER_CHECKS: dict[str, Callable[[VerifierSubject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "accepts a path of the draft": gives_verdicts,
    "decides from its arguments alone": decides_from_its_arguments,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "temperature 0 is greedy": is_greedy_at_temperature_zero,
    "what is rare is as rare as the target has it": keeps_what_is_rare,
    "what it emits has the target's law": leaves_the_law_alone,
}


def _everything(subject: VerifierSubject) -> list[tuple[Shape, bool]]:
    """Every shape in a sampled batch, and in a greedy one those that differ there, where distributions are left out."""
    shapes = list(subject.shapes.values())
    plain = [shape for shape in shapes if not shape.drawn and shape.sampling_mode is SamplingMode.TEMPERATURE]
    return [(shape, False) for shape in shapes] + [(shape, True) for shape in plain]


def _differing(one: Decided, other: Decided) -> list[int]:
    """Rows with another verdict."""
    same = (one.path == other.path).all(-1) & (one.num_accepted == other.num_accepted)
    return np.flatnonzero(~(same & (one.next_token == other.next_token))).tolist()
