"""The contract of an acceptance rule: :func:`check_verifier`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special

from eagle3_jax.checks import check_verdict
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.frequencies import DETECTED, Evidence
from eagle3_jax.testing.report import (
    PROTOCOL,
    Broken,
    ContractReport,
    Skipped,
    class_name,
    examine,
    require_accepted,
    require_no,
)
from eagle3_jax.testing.scripted import chain_parents
from eagle3_jax.testing.subject import Subject, mix_rows, repeat_row, require_protocol
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict, Verifier


class Setting(NamedTuple):
    """How the target is sampled in a row."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


ROWS = 768
# One more than any draft is deep.
MAX_DEPTH = 12
ROOT = 0
# A quarter of the rows is greedy.
_GREEDY = Setting(0.0)
_SETTINGS = (Setting(1.0), Setting(0.7, top_k=3), Setting(1.3, top_p=0.8), _GREEDY)
_PLAIN_SETTINGS = tuple(Setting(setting.temperature) for setting in _SETTINGS)
# Ids of two digits where a draw goes digit by digit; truncation sorts, and 80 tokens take a CPU 15
# times longer.
_WIDE = 80
_NARROW = 7


def check_verifier(
    verifier: Verifier,
    *,
    checks: Collection[str] | None = None,
    samples: int = 32768,
    seed: int = 0,
) -> ContractReport:
    """Runs your own acceptance rule through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_verifier(MyRule()))`` shows the report. Drafts are chains
    of 12 nodes and trees of 16, of the likeliest tokens and of sampled ones; only chains for a rule
    that says ``chains_only``. They are verified with a ``max_depth`` of 12, with temperatures 0.7
    to 1.3 over 80 tokens, and with top-k 3 and top-p 0.8 over 7 tokens. A quarter of the 768 rows
    of each batch has temperature 0.

    A rule that says ``lossless=True`` must emit the target's distribution. Each statistical check
    fails a correct rule once in a million runs. A rule that says ``lossless=False`` is measured,
    not judged.

    **Limits.** The report says what each statistical check detects with 90 % power. With the
    default ``samples``: first tokens whose probabilities are 17 % off (root mean square, in one
    shape and setting), drafted tokens that are 0.8 % too frequent everywhere, all tokens sampled
    from ``p^1.013`` instead of ``p``, uniforms of 12 bits or fewer, and 2.1 % of the rows with the
    uniforms of a row at a fixed distance. For ``chains_only`` the second and the third are 1.0 %
    and ``p^1.017``. These deviations shrink with the square root of ``samples``; each bit of the
    uniforms doubles ``samples``. No check sees a fault that needs more than 16 nodes, 768 rows or
    80 tokens.

    Args:
        verifier: An instance.
        checks: Names of :data:`VERIFIER_CHECKS`; all of them by default.
        samples: Number of drafts for each kind of draft (chain or tree, likeliest or sampled
            tokens). Half of them are truncated. Rare tokens get four times as many.
        seed: Seed of the drafts, of the target and of the keys.

    Raises:
        ValueError: ``checks`` names a check that does not exist.
    """
    title = f"{class_name(verifier)}, lossless={getattr(verifier, 'lossless', None)!r}"
    return examine(title, Subject(verifier, samples=samples, seed=seed), VERIFIER_CHECKS, checks)


# Inputs


class Shape(NamedTuple):
    """How a draft is made."""

    name: str
    parents: tuple[int, ...]
    #: Whether tokens are sampled and declare their distribution; else they are the likeliest ones.
    is_sampled: bool
    sampling_mode: SamplingMode  #: That of the sampled batches that verify it.

    @property
    def vocabulary(self) -> int:
        """``V``."""
        return _NARROW if self.sampling_mode is SamplingMode.TRUNCATED else _WIDE

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings; row ``b`` has that of ``b`` modulo their number."""
        return _SETTINGS if self.sampling_mode is SamplingMode.TRUNCATED else _PLAIN_SETTINGS


_CHAIN = chain_parents(11)
# Late nodes are at the root, so that each is often visited.
_TREE = (-1, 0, 1, 1, 2, 2, 4, 0, 7, 7, 8, 3, 0, 10, 10, 13)
SHAPES = tuple(
    Shape(name + suffix, parents, is_sampled, sampling_mode)
    for sampling_mode, suffix in (
        (SamplingMode.TEMPERATURE, ""),
        (SamplingMode.TRUNCATED, " under truncation"),
    )
    for parents, is_sampled, name in (
        (_CHAIN, False, "a chain"),
        (_CHAIN, True, "a sampled chain"),
        (_TREE, False, "a tree"),
        (_TREE, True, "a tree of sampled siblings"),
    )
)
ONE_TOKEN = Shape("one token", (-1, 0), False, SamplingMode.TEMPERATURE)


def shapes_of(subject: Subject) -> list[Shape]:
    """Returns the drafts that the rule is for."""
    chains_only = getattr(subject.part, "chains_only", False)
    return [shape for shape in SHAPES if shape.parents == _CHAIN or not chains_only]


def batches_of(subject: Subject) -> list[tuple[Shape, bool]]:
    """Returns every shape in a sampled batch, and the plain ones in a greedy batch as well.

    In a greedy batch drafts declare no distributions, so sampled ones would be the same there.
    """
    shapes = shapes_of(subject)
    plain = [
        shape
        for shape in shapes
        if not shape.is_sampled and shape.sampling_mode is SamplingMode.TEMPERATURE
    ]
    return [(shape, False) for shape in shapes] + [(shape, True) for shape in plain]


def target_logits(subject: Subject) -> dict[int, Float[np.ndarray, "V V"]]:
    """Returns by ``V`` the target's logits after each token.

    They are nearly flat after some tokens, and nearly certain after others. The target is a table:
    its distribution depends on the last token alone, so that of the output is known.
    """
    tables = (_random_table(subject, _NARROW, attempt) for attempt in itertools.count())
    narrow = next(table for table in tables if _distance_from_cut(table) >= 1e-4)
    return {_WIDE: _random_table(subject, _WIDE), _NARROW: narrow}


def _random_table(subject: Subject, vocabulary: int, attempt: int = 0) -> Float[np.ndarray, "V V"]:
    random = subject.random(1, attempt)
    scale = random.uniform(1, 5, (vocabulary, 1))
    scale[ROOT] = 2
    return random.normal(0, scale, (vocabulary, vocabulary)).astype(np.float32)


def _distance_from_cut(logits: np.ndarray) -> float:
    """Returns the least distance of a sum of probabilities from top-p.

    Where it is small, rounding decides what is cut.
    """
    (cut,) = (setting for setting in _SETTINGS if setting.top_p < 1)
    probs = special.softmax(logits.astype(np.float64) / cut.temperature, axis=-1)
    sums = np.cumsum(-np.sort(-probs, axis=-1), axis=-1)
    return np.abs(sums - cut.top_p).min()


def draft_distributions(subject: Subject) -> dict[int, Float[np.ndarray, "V V"]]:
    """Returns by ``V`` the distributions of drafts: near the target's, and different."""
    random = subject.random(2)
    distributions = {}
    for vocabulary, logits in subject.once(target_logits).items():
        noise = random.normal(0, 0.8, logits.shape)
        distributions[vocabulary] = special.softmax(logits + noise, axis=-1).astype(np.float32)
    return distributions


def target_distributions(subject: Subject, shape: Shape) -> Float[np.ndarray, "S V V"]:
    """Returns for each setting the target's distribution after each token.

    It is computed without the library.
    """
    logits = subject.once(target_logits)[shape.vocabulary].astype(np.float64)
    return np.stack(
        [np.stack([warped(row, *setting) for row in logits]) for setting in shape.settings]
    )


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Returns probabilities after temperature, then top-k, then top-p."""
    if not temperature:
        return np.eye(len(logits))[logits.argmax()]

    order = np.argsort(-logits)
    ranked = special.softmax(logits[order] / temperature)
    if top_k:
        ranked[top_k:] = 0
    ranked /= ranked.sum()
    # The smallest set of likeliest tokens with a mass of top-p: those with less mass before them.
    if top_p < 1:
        ranked[np.cumsum(ranked) - ranked >= top_p] = 0

    probs = np.zeros_like(ranked)
    probs[order] = ranked / ranked.sum()
    return probs


def sample_drafts(subject: Subject, shape: Shape, run: int) -> Draft:
    """Returns random drafts, ``[ROWS N]``; one node in twenty is padding."""
    random = subject.random(3, run)
    nodes = len(shape.parents)
    distributions = subject.once(draft_distributions)[shape.vocabulary]
    sums = np.cumsum(distributions, axis=-1)
    ranked = np.argsort(-distributions, axis=-1)

    tokens = np.full((ROWS, nodes), ROOT, np.int32)
    probs = np.zeros((ROWS, nodes, shape.vocabulary), np.float32)
    for node, parent in enumerate(shape.parents[1:], 1):
        before = tokens[:, parent]
        if shape.is_sampled:
            uniforms = random.random((ROWS, 1)) * sums[before, -1:]
            tokens[:, node] = (uniforms < sums[before]).argmax(-1)
            probs[:, node] = distributions[before]
        else:
            rank = shape.parents[:node].count(parent)
            tokens[:, node] = ranked[before, rank]

    valid = random.random((ROWS, nodes)) < 0.95
    valid[:, 0] = True

    parents = np.broadcast_to(np.array(shape.parents, np.int32), tokens.shape)
    return Draft(
        tokens=jnp.asarray(tokens),
        parents=jnp.asarray(parents),
        valid=jnp.asarray(valid),
        probs=jnp.asarray(probs) if shape.is_sampled else None,
    )


# Calls of the rule


class Decisions(NamedTuple):
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

    def differing_rows(self, expected: Decisions) -> list[int]:
        """Returns the rows in which another verdict was given."""
        same_path = (self.path == expected.path).all(-1)
        same_tokens = (self.num_accepted == expected.num_accepted) & (
            self.next_token == expected.next_token
        )
        return np.flatnonzero(~(same_path & same_tokens)).tolist()


class Emitted(NamedTuple):
    """The tokens that rounds emit, all rows in one list."""

    row: Int[np.ndarray, " E"]
    depth: Int[np.ndarray, " E"]  #: Number of draft tokens accepted before it.
    node: Int[np.ndarray, " E"]  #: The node before it.
    before: Int[np.ndarray, " E"]  #: The token of that node.
    token: Int[np.ndarray, " E"]


def emit(decisions: Decisions) -> Emitted:
    """Returns the tokens that the rounds emit."""
    num_accepted = decisions.num_accepted
    # Node 0, the accepted ones, and room for the next token.
    nodes = np.pad(decisions.path, ((0, 0), (1, 1)))
    row, depth = np.nonzero(np.arange(nodes.shape[1] - 1) <= num_accepted[:, None])
    node = nodes[row, depth]
    accepted = decisions.tokens[row, nodes[row, depth + 1]]
    token = np.where(depth < num_accepted[row], accepted, decisions.next_token[row])
    return Emitted(row, depth, node, decisions.tokens[row, node], token)


def compile_rule(subject: Subject) -> Any:
    """Traces the rule anew, its verdicts checked."""

    @functools.partial(jax.jit, static_argnums=4)
    def decide(
        draft: Draft, logits: Any, sampling: SamplingParams, keys: Any, sampling_mode: SamplingMode
    ) -> Verdict:
        scores = logits[draft.tokens]
        verdict = subject.part(
            draft, scores, sampling, keys, sampling_mode=sampling_mode, max_depth=MAX_DEPTH
        )
        check_verdict(subject.part, verdict, batch=ROWS, max_depth=MAX_DEPTH)
        return verdict

    return decide


def decide(
    subject: Subject,
    shape: Shape,
    *,
    run: int = 0,
    greedy: bool = False,
    draft: Draft | None = None,
    logits: Float[np.ndarray, "V V"] | None = None,
    temperature: float | None = None,
    program: Any = None,
) -> Decisions:
    """Returns the rule's verdicts on drafts of a shape.

    Args:
        subject: The rule.
        shape: The shape of the drafts.
        run: Number of the drafts and of the keys.
        greedy: Whether the batch is greedy. Drafts of a greedy batch declare no distributions.
        draft: Drafts in place of those of ``run``.
        logits: Logits after each token in place of the target's.
        temperature: Temperature of all rows, without truncation, in place of the settings of the
            shape.
        program: The compiled rule; see :func:`compile_rule`.
    """
    draft = draft or sample_drafts(subject, shape, run)
    logits = subject.once(target_logits)[shape.vocabulary] if logits is None else logits
    settings = shape.settings if temperature is None else (Setting(temperature),)
    temperatures, top_k, top_p = np.resize(settings, (ROWS, 3)).T
    sampling = SamplingParams(
        temperature=temperatures.astype(np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
    )

    program = program or subject.once(compile_rule)
    verdict = program(
        draft.replace(probs=None) if greedy else draft,
        jnp.asarray(logits),
        sampling,
        row_keys(subject.seed + run, ROWS),
        SamplingMode.GREEDY if greedy else shape.sampling_mode,
    )

    arrays = jax.device_get(
        (draft.tokens, draft.valid, verdict.path, verdict.num_accepted, verdict.next_token)
    )
    return Decisions(*arrays)


# Checks


def keeps_the_protocol(subject: Subject) -> str:
    """It is an instance with every member and a stable hash, and says whether it is lossless."""
    require_protocol(subject, "verifier")
    return f"says lossless={subject.part.lossless}"


def gives_verdicts(subject: Subject) -> str:
    """Verdicts have a path of valid nodes down the draft, and a token of the vocabulary."""
    accepted = 0
    for shape, greedy in batches_of(subject):
        decisions = decide(subject, shape, greedy=greedy)
        for row in range(ROWS):
            accepted += _require_path(shape, decisions, row)
        for token in decisions.next_token:
            if not 0 <= token < shape.vocabulary:
                raise Broken(f"its next token is id {token} of {shape.vocabulary} tokens")
    return f"{accepted} draft tokens accepted"


def _require_path(shape: Shape, decisions: Decisions, row: int) -> int:
    """Returns the number of accepted tokens of a row; raises ``Broken`` if they are not a path."""
    path = decisions.path[row].tolist()
    count = int(decisions.num_accepted[row])
    if not 0 <= count <= len(path) or path[count:] != [-1] * (len(path) - count):
        raise Broken(
            f"it accepts {count} tokens by the path {path}; expected as many nodes, and -1 after"
            " them"
        )

    parent = 0
    for node in path[:count]:
        if not 0 < node < len(shape.parents) or shape.parents[node] != parent:
            raise Broken(
                f"in the path {path} of the draft {list(shape.parents)} {node} is not a child of"
                f" {parent}"
            )
        if not decisions.valid[row, node]:
            raise Broken(f"in the path {path} node {node} is padding")
        parent = node
    return count


def decides_from_its_arguments(subject: Subject) -> None:
    """A second call and a new trace give the same verdicts."""
    shape = shapes_of(subject)[-1]
    expected = decide(subject, shape)
    # A rule that remembers its last keys would show in the second call.
    decide(subject, shape, run=1)
    for decisions, event in (
        (decide(subject, shape), "a second call"),
        (decide(subject, shape, program=compile_rule(subject)), "tracing it anew"),
    ):
        if rows := decisions.differing_rows(expected):
            raise Broken(
                f"{event} gave other verdicts in {len(rows)} of {ROWS} rows; keys are all its"
                " randomness"
            )


def has_independent_rows(subject: Subject) -> str:
    """A row's verdict does not depend on other rows, nor its uniforms on other rows or rounds."""
    even = np.arange(ROWS) % 2 == 0
    for shape in shapes_of(subject):
        mixed = mix_rows(even, sample_drafts(subject, shape, 0), sample_drafts(subject, shape, 1))
        differing = decide(subject, shape, draft=mixed).differing_rows(decide(subject, shape))
        rows = [row for row in differing if even[row]]
        if rows:
            raise Broken(
                f"row {rows[0]} gets another verdict when its neighbours hold other drafts"
            )
    return _require_independent_uniforms(subject)


def _require_independent_uniforms(subject: Subject) -> str:
    """Compares the first tokens of rows with the same draft, by the distance of the rows."""
    shape = shapes_of(subject)[0]
    rounds = 16
    draft = repeat_row(sample_drafts(subject, shape, 0), 0, ROWS)
    first = [
        decide(subject, shape, draft=draft, temperature=1.0, run=run).first for run in range(rounds)
    ]

    # Tokens as unit vectors less their mean, [rounds ROWS V]. The product of two that are
    # independent has the expectation 0 and the variance Σ cov².
    scores = np.eye(shape.vocabulary)[np.array(first)]
    mean = scores.mean((0, 1))
    scores -= mean
    covariance = np.diag(mean) - np.outer(mean, mean)
    variance = rounds * ROWS * np.sum(covariance**2)
    if not variance:
        return "its first tokens are not random"

    # The sums of products at every distance are the autocorrelation (Wiener-Khinchin).
    evidence = Evidence()
    fault = "the same draft gets first tokens in {rows} that depend on each other"
    spectrum = np.abs(np.fft.rfft(scores, axis=1)) ** 2
    by_distance = np.fft.irfft(spectrum.sum((0, 2)), ROWS)
    for distance in range(1, ROWS // 2 + 1):
        # Half a batch apart every pair is counted twice.
        times = 1 + (distance == ROWS // 2)
        evidence.contrasts[fault.format(rows=f"rows {distance} apart")].add(
            by_distance[distance], times * variance
        )
    evidence.contrasts[fault.format(rows="a row in successive rounds")].add(
        np.sum(scores[1:] * scores[:-1]), variance
    )
    require_no(evidence.bias())

    share = evidence.smallest_tilt() * variance / np.sum(scores**2)
    return (
        f"{rounds * ROWS} first tokens of one draft; {share:.1%} of the rows with another row's"
        f" uniforms {DETECTED}"
    )


def _skip_lossy(subject: Subject, measured: str) -> None:
    """Raises ``Skipped`` with what was measured if the rule does not claim the target's output."""
    if not subject.part.lossless:
        raise Skipped(f"not judged, for it says lossless=False; {measured}")


def is_greedy_at_temperature_zero(subject: Subject) -> str:
    """Rows of temperature 0 emit the likeliest tokens, in greedy batches and in mixed ones."""
    total = 0
    faults = []
    for shape, greedy in batches_of(subject):
        decisions = decide(subject, shape, greedy=greedy, temperature=0.0 if greedy else None)
        emitted = emit(decisions)

        likeliest = subject.once(target_logits)[shape.vocabulary].argmax(-1)[emitted.before]
        is_greedy = greedy | (emitted.row % len(shape.settings) == shape.settings.index(_GREEDY))
        total += int(is_greedy.sum())
        for index in np.flatnonzero(is_greedy & (emitted.token != likeliest)):
            batch = "" if greedy else "in a mixed batch "
            faults.append(
                f"{batch}after id {emitted.before[index]} it writes {emitted.token[index]} where"
                f" {likeliest[index]} is the likeliest"
            )

    _skip_lossy(subject, f"{1 - len(faults) / total:.1%} were the likeliest")
    if faults:
        raise Broken(f"{len(faults)} of {total} tokens are not the likeliest: {faults[0]}")
    return f"{total} tokens"


_FIRST = "the first token"
_DRAFTED = "over all drafts it writes drafted tokens too {}"
_LIKELY = "over all drafts it writes likely tokens too {}"


def keeps_the_distribution(subject: Subject) -> str:
    """Over many keys, every token is as frequent as the target has it after the token before.

    A rule that is lossless writes each of a round's tokens from the target's distribution given
    those before it, however many it accepts. So the tokens after each number of accepted ones are
    compared, pairs of tokens, and two sums over all of them: of how often the tokens that the draft
    favours were written, and of how likely tokens were.
    """
    shapes = shapes_of(subject)
    runs = max(1, subject.samples // (2 * ROWS))
    evidence = Evidence()
    accepted = 0
    for shape in shapes:
        distributions = target_distributions(subject, shape)
        for run in range(runs):
            decisions = decide(subject, shape, run=run)
            accepted += int(decisions.num_accepted.sum())
            _count_emitted(subject, evidence, shape, distributions, decisions)

    distance = max(fit.distance for name, fit in evidence.fits.items() if name.endswith(_FIRST))
    _skip_lossy(subject, f"first tokens are {distance:.3f} (total variation) off the target")
    require_no(evidence.misfit("the target"))
    require_no(evidence.bias())
    require_accepted(accepted, "distribution")

    drafts = len(shapes) * runs * ROWS
    largest = max(len(shape.parents) for shape in shapes)
    return (
        f"{drafts} drafts of up to {largest} nodes, {accepted / drafts:.2f} tokens accepted of"
        f" each; first tokens {evidence.smallest_deviation(_FIRST):.1%} off (rms), all drafted"
        f" tokens {evidence.smallest_tilt(_DRAFTED):.1%} too frequent or all tokens sampled from"
        f" p^{1 + evidence.smallest_tilt(_LIKELY):.3f} {DETECTED}"
    )


def _count_emitted(
    subject: Subject,
    evidence: Evidence,
    shape: Shape,
    distributions: Float[np.ndarray, "S V V"],
    decisions: Decisions,
) -> None:
    """Counts the tokens of a batch by depth and in pairs, and adds them to the sums."""
    emitted = emit(decisions)
    setting = emitted.row % len(shape.settings)
    probs = distributions[setting, emitted.before]
    for index, (temperature, top_k, top_p) in enumerate(shape.settings):
        batch = f"with {shape.name} at temperature {temperature}, top-k {top_k}, top-p {top_p}"

        for depth in range(MAX_DEPTH + 1):
            chosen = (setting == index) & (emitted.depth == depth)
            name = f"the token after {depth} accepted ones" if depth else _FIRST
            evidence.count(f"{batch} {name}", emitted.token[chosen], probs[chosen].sum(0))

        later = (setting == index) & (emitted.depth > 0)
        before = emitted.before[later]
        pairs = before * shape.vocabulary + emitted.token[later]
        expected = np.bincount(before, minlength=shape.vocabulary)[:, None] * distributions[index]
        evidence.count(f"{batch} a token after an accepted one", pairs, expected.ravel())

    # A favoured token scores 1 and another one -odds, so that the expectation of the score is 0.
    favours = _favoured_tokens(subject, shape, decisions, emitted, probs)
    mass = (probs * favours).sum(-1)
    is_favoured = favours[np.arange(len(mass)), emitted.token]
    drafted = (mass > 0) & (mass < 0.98)
    odds = mass[drafted] / (1 - mass[drafted])
    evidence.contrasts[_DRAFTED].add(np.where(is_favoured[drafted], 1, -odds), odds)
    evidence.contrasts[_LIKELY].add_log_probabilities(probs, emitted.token)


def _favoured_tokens(
    subject: Subject,
    shape: Shape,
    decisions: Decisions,
    emitted: Emitted,
    probs: Float[np.ndarray, "E V"],
) -> Bool[np.ndarray, "E V"]:
    """Returns after each node the tokens that are likelier for the draft than for the target."""
    is_child = decisions.valid[emitted.row] & (np.array(shape.parents) == emitted.node[:, None])
    if shape.is_sampled:
        draft_probs = subject.once(draft_distributions)[shape.vocabulary]
        return (draft_probs[emitted.before] > probs) & is_child.any(-1, keepdims=True)
    favours = np.zeros(probs.shape, bool)
    index, child = np.nonzero(is_child)
    favours[index, decisions.tokens[emitted.row[index], child]] = True
    return favours


def keeps_rare_tokens(subject: Subject) -> str:
    """Tokens with a probability of one in thousands are accepted, and sampled, that often.

    A rule whose uniforms have too few bits accepts and samples them too often, or never.
    """
    runs = max(1, 4 * subject.samples // ROWS)
    vocabulary = ONE_TOKEN.vocabulary
    # The fewest bits of uniforms that are enough; with fewer the counts would differ.
    bits = round(math.log2(runs * ROWS)) - 5

    random = subject.random(4)
    seldom = random.uniform(0.5, 1, 60) * 2**-bits
    seldom_drafted = np.full(12, 2.0 ** -(bits + 3))
    frequent = random.dirichlet(np.full(8, 5.0))
    ids = random.permutation(vocabulary)
    logits = np.zeros(vocabulary, np.float32)
    logits[ids] = np.log(np.concatenate([seldom, seldom_drafted, frequent]))
    distribution = warped(logits.astype(np.float64), *Setting(1.0))

    rare = ids[60 + np.arange(ROWS) % 12]
    draft = sample_drafts(subject, ONE_TOKEN, 0)
    draft = draft.replace(tokens=draft.tokens.at[:, 1].set(rare), valid=jnp.ones_like(draft.valid))
    table = np.broadcast_to(logits, (vocabulary, vocabulary))
    share = distribution[rare].mean()
    expected = ROWS * np.array([1 - share, share])

    evidence = Evidence()
    accepted = 0
    for run in range(runs):
        decisions = decide(subject, ONE_TOKEN, draft=draft, logits=table, temperature=1.0, run=run)
        is_accepted = decisions.first == rare
        accepted += int(is_accepted.sum())
        name = "the number of accepted rare tokens"
        evidence.count(name, is_accepted.astype(int), expected)
        evidence.count("the frequency of rare tokens", decisions.first, ROWS * distribution)

    _skip_lossy(subject, f"{accepted} rare drafts were written; expected {runs * ROWS * share:.1f}")
    require_no(evidence.misfit("the target"))
    return f"{runs * ROWS} drafts; uniforms of {bits} bits {DETECTED}"


VERIFIER_CHECKS: dict[str, Callable[[Subject], str | None]] = {
    PROTOCOL: keeps_the_protocol,
    "accepts a path of the draft": gives_verdicts,
    "decides from its arguments alone": decides_from_its_arguments,
    "rows are independent of their neighbours": has_independent_rows,
    "temperature 0 is greedy": is_greedy_at_temperature_zero,
    "what is rare is as rare as the target has it": keeps_rare_tokens,
    "what it emits has the target's distribution": keeps_the_distribution,
}
