"""The contract of a drafter: :func:`check_drafter`.

The loop keeps the output exact whatever a drafter proposes, with one exception that it cannot detect: ``probs`` that
are not what the tokens were drawn from. A drafter that breaks another rule is exact and slow. Both show here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key
from scipy import special
from scipy.stats import norm, poisson

from eagle3_jax.checks import check_same_state, declares_chain, require_draft, require_part, require_rows
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.frequencies import Contrast, goodness_of_fit
from eagle3_jax.testing.report import (
    ALPHA,
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    class_name,
    examine,
    has_low_precision,
    require_stable_hash,
)
from eagle3_jax.testing.target import TargetSubject
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams

ROWS = 4
FED = 6
LONG = 72  # tokens of a long text
CAPACITY = 4 * FED + LONG
LENGTHS = (FED, 3, 1, FED - 1)  # ragged; the first row is full
SAMPLING = SamplingParams(
    temperature=np.array([0.0, 0.7, 1.5, 1.0], np.float32),
    top_k=np.array([0, 3, 0, 0], np.int32),
    top_p=np.array([1.0, 1.0, 0.9, 1.0], np.float32),
)
# the distribution of four tokens is enumerated, each among the three likeliest
TOP = 3
HORIZON = 4
_NEAR = 1e-3  # logits closer than this may change places with the order of sums
_SUM = 2e-5  # how far from 1 sums of float32 probabilities lie over large vocabularies


def check_drafter(
    drafter: LoadedDrafter | Drafter[Any],
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    samples: int = 32768,
    seed: int = 0,
) -> ContractReport:
    """Run a drafter of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_drafter(MyDrafter(), target))`` shows the report. The statistical checks fail
    a correct drafter once in a million runs; their lines say what deviation they would have detected. It compiles about
    fifteen programs and decodes a few thousand short sequences, so a small target is the place to start.

    **Limits.** Texts are 72 tokens long at most, in 4 rows, with a capacity of 96. Declared probabilities must add up
    to 1 within 2e-5, so a ``q`` that is rounded to bfloat16 fails. With the default ``samples`` a node that is sampled
    at a temperature 2 % off the declared one is detected with 90 % power, if the standard deviation of ``log q`` is
    about 1 there and the node is always valid; the report has the number for your drafter. Deviations of about 0.2 %
    (a ``q`` that is rounded and normalized again) need more than ten million samples.

    Args:
        drafter: An instance, with its parameters if it has any.
        target: The target that it drafts for. The distribution is enumerated with the vocabulary cut to three tokens
            (top-k), so any target in float32 will do.
        checks: Names of :data:`DRAFTER_CHECKS`; all of them by default.
        samples: Drafts and sequences drawn by the statistical checks; four times as many drafts after a long text.
        seed: Random seed.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
    subject = Subject(loaded, target, samples, seed)
    return examine(f"{class_name(loaded.drafter)} with {target.name}", subject, DRAFTER_CHECKS, checks)


class HostDraft(NamedTuple):
    """The arrays of a :class:`~eagle3_jax.Draft` on the host."""

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B N V"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A drafter with its target, the number of samples of statistical checks, and the programs that call both."""

    loaded: LoadedDrafter
    target: LoadedTarget
    samples: int = 32768
    seed: int = 0

    def shown(self, length: tuple[int, ...] = LENGTHS, *, seed: int = 0, size: int = FED) -> Observation:
        """Random tokens and the target's features at them, ``[ROWS size]``; ``length`` of them are real."""
        rng = np.random.default_rng([self.seed, seed])
        ids = rng.integers(0, self.target.vocab_size, 2)  # two ids, so that texts repeat themselves, for lookups
        tokens = rng.choice(ids, (ROWS, size))
        following = rng.choice(ids, ROWS)
        tokens = jnp.asarray(tokens, jnp.int32)
        return Observation(
            tokens=tokens,
            features=self._features(self.target.params, tokens),
            length=jnp.asarray(length, jnp.int32),
            next_token=jnp.asarray(following, jnp.int32),
        )

    @functools.cached_property
    def _features(self) -> Any:
        layers = self.loaded.drafter.aux_layers
        model = self.target.model
        return jax.jit(lambda params, tokens: _causal(model, params, tokens, layers).features)

    def fresh(self) -> Any:
        """An empty state, checked."""
        state = self.loaded.drafter.init(self.loaded.params, ROWS, CAPACITY)
        require_rows(self.loaded.drafter, state, ROWS)
        return state

    def traced_observe(self) -> Any:
        """``observe`` traced anew, with its check."""
        drafter = self.loaded.drafter
        return jax.jit(
            lambda params, state, seen: check_same_state(drafter, state, drafter.observe(params, state, seen))
        )

    def traced_propose(self) -> Any:
        """``propose`` traced anew, with its checks."""
        drafter = self.loaded.drafter
        vocab_size = self.target.vocab_size

        def propose(params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
            draft = drafter.propose(params, state, keys, sampling)
            require_draft(drafter, draft, batch=keys.shape[0], vocab_size=vocab_size)
            if draft.state is not None:
                check_same_state(drafter, state, draft.state, "propose")
            return draft

        return jax.jit(propose)

    _observe = functools.cached_property(traced_observe)
    _propose = functools.cached_property(traced_propose)

    def observe(self, *seen: Observation, state: Any = None, program: Any = None) -> Any:
        """The state after observations, from an empty one by default, checked."""
        state = self.fresh() if state is None else state
        for one in seen:
            state = (program or self._observe)(self.loaded.params, state, one)
        return state

    def propose(self, state: Any, *, seed: int = 0, program: Any = None) -> HostDraft:
        """A draft, checked."""
        keys = row_keys(self.seed + seed, ROWS)
        return _on_host((program or self._propose)(self.loaded.params, state, keys, SAMPLING))

    @functools.cached_property
    def after_prompt(self) -> Any:
        """The state that most checks start from."""
        return self.observe(self.shown())

    @functools.cached_property
    def draft(self) -> HostDraft:
        """The draft after the prompt."""
        return self.propose(self.after_prompt)

    @functools.cached_property
    def long_text(self) -> Observation:
        """A long text, as far as the target's positions go."""
        size = min(LONG, self.target.max_positions - 4 * FED) // FED * FED
        return self.shown((size,) * ROWS, seed=5, size=size)

    @functools.cached_property
    def after_long_text(self) -> Any:
        """The state after a long text."""
        return self.observe(self.long_text)

    def drafts_of_one_row(self, samples: int, state: Any, row: int = 2) -> Iterator[HostDraft]:
        """Drafts with many keys from the state of one row; row 3 does not truncate."""
        size = self.loaded.drafter.num_nodes * self.target.vocab_size
        rows = int(np.clip(2**23 // size, 1, 1024))
        alike = lambda leaf: jnp.repeat(leaf[row : row + 1], rows, axis=0)
        state = jax.tree.map(alike, state)
        sampling = jax.tree.map(lambda leaf: alike(jnp.asarray(leaf)), SAMPLING)
        for run in range(max(1, samples // rows)):
            yield _on_host(self._propose(self.loaded.params, state, row_keys(self.seed + 100 + run, rows), sampling))

    @functools.cached_property
    def rounds_off(self) -> bool:
        """Whether it or its target computes in less than 32 bits, so that another order of sums may change a token."""
        return has_low_precision(self.loaded.params, self.after_prompt, self.target.params, self.shown().features)


def _on_host(draft: Draft) -> HostDraft:
    return HostDraft(*jax.device_get((draft.tokens, draft.parents, draft.valid, draft.probs)))


def _differing_rows(one: HostDraft, other: HostDraft, tolerance: float = 1e-6) -> list[int]:
    """Rows in which valid nodes of two drafts differ; declared probabilities may differ as much as rounding does."""
    same = np.asarray(one.valid == other.valid)
    for field in ("tokens", "parents"):
        same &= (getattr(one, field) == getattr(other, field)) | ~one.valid
    if one.probs is not None and other.probs is not None:
        close = np.isclose(one.probs, other.probs, rtol=1e-4, atol=tolerance).all(axis=-1)
        same[:, 1:] &= (close | ~np.asarray(one.valid))[:, 1:]
    return np.flatnonzero(~same.all(axis=1)).tolist()


def _require_equal(one: HostDraft, other: HostDraft, when: str) -> None:
    if rows := _differing_rows(one, other):
        raise Broken(f"{_named(rows)} drafts something else {when}")


def _named(rows: Collection[int]) -> str:
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"


def _causal(model: Any, params: Any, tokens: Int[Array, "B T"], layers: tuple[int, ...] = ()) -> Any:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model(params, tokens, positions, causal_mask(tokens.shape[1]), aux_layers=layers)


def keeps_the_protocol(subject: Subject) -> str:
    """It is an instance with every member and a stable hash."""
    drafter = subject.loaded.drafter
    require_part(drafter, "drafter")
    require_stable_hash(drafter)
    shape = "a chain" if declares_chain(drafter) else "a tree"
    return f"{shape} of {drafter.num_nodes} nodes, at most {drafter.max_depth} below the root"


def keeps_shapes(subject: Subject) -> str:
    """States lead with the batch and keep their shapes and types; drafts have the declared size."""
    state = subject.observe(subject.shown((2, 1, 0, 2), seed=1), state=subject.after_prompt)
    subject.propose(state)
    return f"{len(jax.tree.leaves(state))} arrays in its state"


def proposes_from_its_state_alone(subject: Subject) -> str:
    """A second call and a new trace give the same draft: it depends on its state, keys and sampling only."""
    first = subject.draft
    start = subject.after_prompt
    subject.propose(start, seed=1)
    observed_anew = subject.observe(subject.shown(), program=subject.traced_observe())
    for how, other in (
        ("after a second call", subject.propose(start)),
        ("when `propose` is traced anew", subject.propose(start, program=subject.traced_propose())),
        ("when `observe` is traced after it", subject.propose(observed_anew)),
    ):
        _require_equal(first, other, f"{how}; something is kept outside the state")
    return ""


def commits_nothing_by_proposing(subject: Subject) -> str:
    """A state that ``propose`` returns goes on as the state that it was proposed from."""
    kept = subject.after_prompt
    left = subject._propose(subject.loaded.params, kept, row_keys(subject.seed, ROWS), SAMPLING).state
    if left is None:
        return "its drafts return no state"
    for length in ((0,) * ROWS, (2, 1, 2, 1)):
        seen = subject.shown(length, seed=3)
        one, other = (subject.propose(subject.observe(seen, state=state)) for state in (kept, left))
        _require_equal(one, other, "after the state that the draft before returned")
    return ""


def drafts_a_tree(subject: Subject) -> str:
    """Node 0 is the token observed last; parents precede children, within ``max_depth``; ids are in the vocabulary."""
    draft = subject.draft
    root = np.asarray(subject.shown().next_token)
    drafter = subject.loaded.drafter
    tokens = draft.tokens
    parents = draft.parents
    valid = draft.valid
    node = np.arange(draft.tokens.shape[1])
    if (rows := np.flatnonzero(tokens[:, 0] != root)).size:
        raise Broken(
            f"node 0 of {_named(rows.tolist())} is {tokens[rows[0], 0]}; expected the last `next_token`, "
            f"{root[rows[0]]} (the loop puts it there, but the drafter works from another)"
        )
    if (parents[:, 0] != -1).any() or not valid[:, 0].all():
        raise Broken(f"node 0 has parents {parents[:, 0].tolist()} or is invalid; expected -1 and valid")
    for row, at in np.argwhere(valid & (node > 0) & ((parents < 0) | (parents >= node))):
        raise Broken(f"node {at} of row {row} has parent {parents[row, at]}; expected 0 to {at - 1} (it is cut off)")
    if declares_chain(drafter) and (valid & (parents != node - 1)).any():
        raise Broken(f"it declares a chain and has parents {parents[0].tolist()}; expected {(node - 1).tolist()}")
    depth = np.zeros(parents.shape, int)
    for at in node[1:]:
        depth[:, at] = 1 + depth[np.arange(ROWS), np.clip(parents[:, at], 0, at - 1)]
    deepest = int(np.where(valid, depth, 0).max())
    if deepest > drafter.max_depth:
        raise Broken(f"it drafts {deepest} levels and says {drafter.max_depth}; deeper nodes are cut off")
    for row, at in np.argwhere(valid & ((tokens < 0) | (tokens >= subject.target.vocab_size))):
        most = subject.target.vocab_size - 1
        raise Broken(f"node {at} of row {row} is id {tokens[row, at]}; expected 0 to {most} (it is cut off)")
    for row in range(ROWS if draft.probs is None else 0):
        family = [(parents[row, at], tokens[row, at]) for at in np.flatnonzero(valid[row])]
        if len(set(family)) < len(family):
            raise Broken(f"siblings of row {row} repeat a token, which can never be accepted twice")
    return f"{deepest} levels"


def is_alone_in_its_row(subject: Subject) -> str:
    """A row's draft does not depend on its neighbours."""
    seen = subject.shown()
    other = subject.shown((2, 3, 4, 1), seed=2)
    for row in range(ROWS):
        mixed = jax.tree.map(lambda new, own, row=row: new.at[row].set(own[row]), other, seen)
        if row in _differing_rows(subject.draft, subject.propose(subject.observe(mixed))):
            raise Broken(f"row {row} drafts something else when its neighbours were shown other tokens")
    return ""


def ignores_empty_observations(subject: Subject) -> str:
    """An observation of length 0 changes nothing."""
    idle = subject.observe(subject.shown((0,) * ROWS, seed=1), state=subject.after_prompt)
    more = subject.shown((2, 1, 2, 1), seed=3)
    then = [subject.propose(subject.observe(more, state=state)) for state in (subject.after_prompt, idle)]
    for one, other in ((subject.draft, subject.propose(idle)), then):
        _require_equal(one, other, "after an observation of length 0")
    return ""


def ignores_padding(subject: Subject) -> str:
    """Tokens and features past the observed length have no influence."""
    seen = subject.shown()
    padding = jnp.arange(FED, dtype=jnp.int32)[None] >= seen.length[:, None]
    dirty = seen.replace(
        tokens=jnp.where(padding, subject.target.vocab_size - 1 - seen.tokens, seen.tokens),
        features=jnp.where(padding[:, :, None, None], jnp.asarray(1e3, seen.features.dtype), seen.features),
    )
    other = subject.propose(subject.observe(dirty))
    _require_equal(subject.draft, other, "when what lies past the observed length changes")
    return f"lengths {', '.join(map(str, LENGTHS))} of {FED}"


def _cut(whole: Observation, start: int, count: int) -> Observation:
    """Tokens ``start .. start + count - 1`` of a text."""
    size = whole.tokens.shape[1]
    padding = FED - count
    part = lambda leaf: jnp.pad(leaf[:, start : start + count], ((0, 0), (0, padding), *((0, 0),) * (leaf.ndim - 2)))
    return Observation(
        tokens=part(whole.tokens),
        features=part(whole.features),
        length=jnp.full(ROWS, count, jnp.int32),
        next_token=whole.tokens[:, start + count] if start + count < size else whole.next_token,
    )


def does_not_care_how_texts_are_cut(subject: Subject) -> str:
    """A short and a long text give the same draft at once and in pieces, up to rounding."""
    short = subject.shown((FED,) * ROWS, seed=4)
    long = subject.long_text
    length = long.tokens.shape[1]
    for whole, sizes, tolerance in ((short, (4, FED - 4), 1e-5), (long, (FED,) * (length // FED), 1e-4)):
        once = subject.propose(subject.observe(whole))
        starts = np.cumsum((0, *sizes))
        if (rows := np.flatnonzero(once.tokens[:, 0] != np.asarray(whole.next_token))).size:
            raise Broken(f"node 0 of {_named(rows.tolist())} is not the last token of a text of {starts[-1]}")
        pieces = (_cut(whole, int(start), size) for start, size in zip(starts, sizes, strict=False))
        in_pieces = subject.propose(subject.observe(*pieces))
        rows = _differing_rows(once, in_pieces, 2e-2 if subject.rounds_off else tolerance)
        if len(rows) > (ROWS // 2 if subject.rounds_off else 0):
            shown = ", ".join(map(str, dict.fromkeys(sizes)))
            raise Broken(f"{_named(rows)} drafts something else when {starts[-1]} tokens come in pieces of {shown}")
    return f"up to {length} tokens, at once and {FED} at a time, with a capacity of {CAPACITY}"


def declares_distributions(subject: Subject) -> str:
    """What it declares are distributions under which its tokens are possible."""
    draft = subject.draft
    if draft.probs is None:
        return "point masses, which any token can have come from"
    probs = draft.probs[:, 1:]
    valid = draft.valid[:, 1:]
    if not np.isfinite(probs[valid]).all() or (probs[valid] < 0).any():
        raise Broken("a declared probability is negative or not finite")
    total = probs.sum(-1, dtype=np.float64)[valid]
    if (np.abs(total - 1) > _SUM).any():
        raise Broken(
            f"declared probabilities add up to {total[np.abs(total - 1).argmax()]:.6g}; expected 1 "
            f"within {_SUM:g}, as float32 gives it"
        )
    chosen = np.take_along_axis(probs, np.clip(draft.tokens[:, 1:, None], 0, probs.shape[-1] - 1), axis=-1)[:, :, 0]
    if (valid & (chosen <= 0)).any():
        raise Broken("it drafts a token to which it declares probability 0")
    return ""


def draws_from_what_it_declares(subject: Subject) -> str:
    """Over many keys, tokens are as frequent and as likely as declared, after a short text and after a long one."""
    if subject.draft.probs is None:
        return "point masses: exact whatever is drafted"
    said = []
    for state, row, times, what in (
        (subject.after_prompt, 2, 1, "after a short text"),
        (subject.after_long_text, 3, 4, "after a long text"),
    ):
        tally = _Tally()
        for draft in subject.drafts_of_one_row(times * subject.samples, state, row):
            tally.add(draft)
        said.append(f"{what} {tally.verdict(what)}")
    return "; ".join(said) + " would have shown nine times in ten"


class _Tally:
    """Tokens seen and expected at every node, separately for the most frequent tokens of its parent.

    The sum of log-probabilities less their expectation at a node shows a wrong temperature sooner than frequencies do.
    """

    def __init__(self) -> None:
        self.sharpness: dict[int, Contrast] = {}
        self.groups: dict[tuple[int, int], list] = {}  # (node, its parent's token) -> [seen [V], expected [V], drafts]

    def add(self, draft: HostDraft) -> None:
        assert draft.probs is not None
        first = not self.groups
        count, nodes, size = draft.probs.shape
        rows = np.arange(count)
        for node in range(1, nodes):
            valid = draft.valid[:, node]
            q = draft.probs[:, node].astype(np.float64)
            log = np.log(np.where(q > 0, q, 1))
            mean = (q * log).sum(-1)
            square = (q * log**2).sum(-1)
            scores = log[rows, np.clip(draft.tokens[:, node], 0, size - 1)] - mean
            contrast = self.sharpness.setdefault(node, Contrast())
            contrast.add(scores[valid], np.maximum(square - mean**2, 0)[valid])
            parent = np.clip(draft.parents[:, node], 0, nodes - 1)
            above = np.where(parent == 0, -1, draft.tokens[rows, parent])  # every row has the same root
            if first:
                found, counts = np.unique(above[valid], return_counts=True)
                self.groups |= {(node, int(key)): [0, 0.0, 0] for key in found[np.argsort(-counts)][:8]}
            for (at, key), group in self.groups.items():
                if at == node:
                    chosen = valid & (above == key)
                    group[0] += np.bincount(draft.tokens[chosen, node], minlength=size)[:size]
                    group[1] += draft.probs[chosen, node].sum(0, dtype=np.float64)
                    group[2] += int(chosen.sum())

    def verdict(self, when: str) -> str:
        found = []
        largest = 0.0
        for (node, key), (seen, expected, drafts) in self.groups.items():
            below = "" if key < 0 else f" below id {key}"
            often = np.flatnonzero((expected >= 10) | (seen >= 10))
            p = np.minimum(
                _two_sided(seen[often], expected[often]), _two_sided(drafts - seen[often], drafts - expected[often])
            )
            for value, token in zip(p.tolist(), often, strict=True):
                text = f"id {token} at node {node}{below} was drafted {seen[token]} times in {drafts}"
                found.append((value, f"{text}; declared were {expected[token]:.1f}"))
            largest = max(largest, float(np.max(expected, initial=0)))
        if not found:
            raise NotRun("no token was drafted often enough to compare")
        known = {node: contrast for node, contrast in self.sharpness.items() if contrast.variance > 100}
        tests = len(found) + len(known)
        for node, contrast in known.items():
            if contrast.p_value * tests < ALPHA:
                how = "likely tokens too often" if contrast.total > 0 else "likely tokens too seldom"
                raise Broken(
                    f"{when} node {node} draws {how} for what it declares, by {abs(contrast.z):.1f} standard "
                    "deviations; is its temperature, or its precision, another?"
                )
        worst, where = min(found)
        if worst * tests < ALPHA:
            raise Broken(f"{when} {where} (p = {worst * tests:.1g})")
        visible = (norm.isf(ALPHA / tests / 2) + norm.isf(0.1)) / np.sqrt(largest)
        tilt = max((contrast.visible(ALPHA / tests) for contrast in known.values()), default=None)
        sharper = "" if tilt is None else f", or a node drawn from q^{1 + tilt:.3f}"
        return f"{len(found)} frequencies, of which the largest {visible:.1%} off{sharper}"


def _two_sided(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Poisson tails, which are no lighter than those of a sum of coins."""
    expected = np.maximum(expected, 0)
    return np.minimum(1, 2 * np.minimum(poisson.cdf(observed, expected), poisson.sf(observed - 1, expected)))


def knows_before_it_draws(subject: Subject) -> str:
    """The distribution of a chain's token is a function of the tokens before it in the draft."""
    if subject.draft.probs is None:
        return "nothing is drawn"
    if not declares_chain(subject.loaded.drafter):
        return "a tree: only chains are compared"
    known: dict[tuple, np.ndarray] = {}
    compared = 0
    for draft in subject.drafts_of_one_row(min(subject.samples, 1024), subject.after_prompt):
        assert draft.probs is not None
        for node in range(1, draft.tokens.shape[1]):
            for row in np.flatnonzero(draft.valid[:, node]):
                said = draft.probs[row, node]
                first = known.setdefault((node, *draft.tokens[row, 1:node].tolist()), said)
                compared += first is not said
                if not np.allclose(first, said, rtol=1e-3, atol=1e-6):
                    raise Broken(
                        f"the distribution that node {node} is drawn from differs between drafts of one state that "
                        "share every token before it"
                    )
    if not compared:
        raise NotRun("no two drafts shared their first tokens")
    return f"{compared} nodes compared"


def leaves_greedy_output_alone(subject: Subject) -> str:
    """Greedy output on a ragged batch is the target's likeliest token after every token."""
    prompts = _prompts(subject, (5, 2, 9, 1))
    limits = [24, 7, 16, 1]
    decoder = SpeculativeDecoder(subject.target, subject.loaded, stop_tokens=())
    result = decoder.generate(prompts, max_new_tokens=limits)
    TargetSubject(subject.target).require_likeliest(prompts, result.tokens, "please report this")
    accepted = int(result.stats.num_accepted_tokens)
    drafted = int(result.stats.num_draft_tokens)
    if drafted and not accepted:
        raise NotRun("the output is right, but no draft token was accepted, so refusals alone were compared")
    return f"{accepted} of {drafted} draft tokens accepted"


def leaves_the_law_alone(subject: Subject) -> str:
    """Sampled sequences of a vocabulary cut to three tokens have the target's distribution, enumerated."""
    if subject.rounds_off:
        raise NotRun("it or its target computes in less than 32 bits, where rounding alone would show")
    candidates = ((prompt, _law(subject.target, prompt)) for prompt in _prompts(subject, (1, 3) * 4))
    chosen = list(itertools.islice(((prompt, law) for prompt, law in candidates if law), 2))
    if not chosen:
        raise NotRun("the target's third and fourth likeliest tokens lie too close together")
    prompts = [prompt for prompt, _ in chosen] * 512
    decoder = SpeculativeDecoder(subject.target, subject.loaded, stop_tokens=())
    sampling = SamplingParams(temperature=1.0, top_k=TOP)
    accepted = 0
    counts = [Counter() for _ in chosen]
    for run in range(max(1, subject.samples // len(prompts))):
        result = decoder.generate(prompts, max_new_tokens=HORIZON, sampling=sampling, seed=subject.seed + run)
        accepted += int(result.stats.num_accepted_tokens)
        for row, tokens in enumerate(result.tokens):
            counts[row % len(chosen)][tuple(tokens)] += 1
    fits = [goodness_of_fit(seen, law) for seen, (_, law) in zip(counts, chosen, strict=True)]
    for fit in fits:
        if fit.chi_square < ALPHA:
            raise Broken(
                f"sampled sequences of {HORIZON} tokens do not have the target's distribution: {fit.why} "
                f"(p = {fit.chi_square:.1g})"
            )
    if accepted == 0:
        raise NotRun("the law is right, but no draft token was accepted, so refusals alone were compared")
    return (
        f"{sum(map(Counter.total, counts))} sequences, {accepted} draft tokens accepted; a deviation of "
        f"{max(fit.sees(ALPHA) for fit in fits):.1%} (rms over sequences) would have shown nine times in ten"
    )


def _law(target: LoadedTarget, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every sequence, by plain forwards of the target; empty where the cut is too near a tie."""
    law = {(): 1.0}
    for _ in range(HORIZON):
        longer = {}
        for tokens, values in zip(law, _last_logits(target, [[*prompt, *tokens] for tokens in law]), strict=True):
            order = np.argsort(-values)
            kept = order[:TOP]
            if len(order) > TOP and values[kept[-1]] - values[order[TOP]] < _NEAR:
                return {}
            weights = special.softmax(values[kept])
            for token, weight in zip(kept.tolist(), weights, strict=True):
                longer[*tokens, token] = law[tokens] * float(weight)
        law = longer
    return law


def _last_logits(target: LoadedTarget, rows: list[list[int]]) -> Float[np.ndarray, "B V"]:
    """Logits after the last token of texts of one length: one plain causal forward, without a cache."""
    length = len(rows[0])
    tokens = np.zeros((TOP ** (HORIZON - 1), 32), np.int32)  # one shape for all calls: one program
    tokens[: len(rows), :length] = rows
    logits = _forward(target.model, target.params, jnp.asarray(tokens), jnp.int32(length - 1))
    return np.asarray(logits, np.float64)[: len(rows)]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model: Any, params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
    return model.unembed(params, jnp.take(_causal(model, params, tokens).final, last, axis=1))


def _prompts(subject: Subject, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng([subject.seed, *lengths])
    return [rng.integers(0, subject.target.vocab_size, size).tolist() for size in lengths]


DRAFTER_CHECKS: dict[str, Callable[[Subject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": keeps_shapes,
    "proposes from its state alone": proposes_from_its_state_alone,
    "commits nothing by proposing": commits_nothing_by_proposing,
    "drafts a tree below the root": drafts_a_tree,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "an empty observation changes nothing": ignores_empty_observations,
    "padding behind an observation does not matter": ignores_padding,
    "observing in pieces is observing at once": does_not_care_how_texts_are_cut,
    "declares distributions": declares_distributions,
    "draws from what it declares": draws_from_what_it_declares,
    "knows before it draws": knows_before_it_draws,
    "greedy output is the target's": leaves_greedy_output_alone,
    "sampled output has the target's law": leaves_the_law_alone,
}
