"""The contract of a drafter: :func:`check_drafter`.

The loop keeps the output exact whatever a drafter proposes, with one exception that it cannot
detect: ``probs`` that are not what the tokens were sampled from. A drafter that breaks another rule
is exact and slow. Both show here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key
from scipy import special

from eagle3_jax.checks import (
    check_draft,
    check_rows,
    checked_state,
    declares_chain,
    reads_cache,
)
from eagle3_jax.checks import propose as propose_with
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.frequencies import DETECTED, Evidence
from eagle3_jax.testing.report import (
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    class_name,
    examine,
    require_accepted,
    require_no,
)
from eagle3_jax.testing.subject import (
    Subject,
    has_low_precision,
    mix_rows,
    name_rows,
    repeat_row,
    require_protocol,
)
from eagle3_jax.testing.target import forward, reference_logits, require_greedy_output
from eagle3_jax.tree import ancestor_mask, causal_mask, depths
from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams, TargetModel

ROWS = 4
# Tokens of an observation, and of a long text.
SIZE = 6
LONG = 72
CAPACITY = 4 * SIZE + LONG
# Ragged; the first row is full.
LENGTHS = (SIZE, 3, 1, SIZE - 1)
SAMPLING = SamplingParams(
    temperature=np.array([0.0, 0.7, 1.5, 1.0], np.float32),
    top_k=np.array([0, 3, 0, 0], np.int32),
    top_p=np.array([1.0, 1.0, 0.9, 1.0], np.float32),
)
# The distribution of four tokens is enumerated, each among the three likeliest.
TOP = 3
HORIZON = 4
# Logits closer than this may change places with the order of sums.
_NEAR = 1e-3
# Largest distance from 1 of sums of float32 probabilities over large vocabularies.
_SUM = 2e-5
# Tokens of a parent below which a node is tested separately, the most frequent ones.
_GROUPS = 8


def check_drafter(
    drafter: LoadedDrafter | Drafter[Any],
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    samples: int = 32768,
    seed: int = 0,
) -> ContractReport:
    """Runs your own drafter through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_drafter(MyDrafter(), target))`` shows the report. The
    statistical checks fail a correct drafter once in a million runs; their lines say which
    deviation they would have detected. It compiles about fifteen programs and decodes a few
    thousand short sequences, so a small target is the place to start.

    **Limits.** Texts are 72 tokens long at most, in 4 rows, with a capacity of 96. Declared
    probabilities must add up to 1 within 2e-5, so a ``q`` that is rounded to bfloat16 fails. With
    the default ``samples`` a node that is sampled at a temperature 2 % off the declared one is
    detected with 90 % power, if the standard deviation of ``log q`` is about 1 there and the node
    is always valid; the report has the number for your drafter. Deviations of about 0.2 % (a ``q``
    that is rounded and normalized again) need more than ten million samples.

    Args:
        drafter: An instance, with its parameters if it has any.
        target: The target that it drafts for. The distribution is enumerated with the vocabulary
            cut to three tokens (top-k), so any target in float32 will do.
        checks: Names of :data:`DRAFTER_CHECKS`; all of them by default.
        samples: Number of sampled drafts, and of sampled sequences; four times as many drafts after
            a long text.
        seed: Random seed.

    Raises:
        ValueError: ``checks`` names a check that does not exist.
    """
    loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
    subject = subject_of(loaded, target, samples, seed=seed)
    return examine(
        f"{class_name(loaded.drafter)} with {target.name}", subject, DRAFTER_CHECKS, checks
    )


@dataclasses.dataclass(frozen=True)
class WithCache:
    """A drafter that reads the target's cache, next to a cache that it fills from what it observes.

    So it drafts from its state alone, as the checks of other drafters expect it. The parameters are
    a pair: those of the drafter, and those of the target.
    """

    drafter: Drafter[Any]
    model: TargetModel

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.drafter.num_nodes

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.drafter.max_depth

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose features it reads."""
        return self.drafter.aux_layers

    @property
    def is_chain(self) -> bool:
        """Whether every draft is a chain."""
        return declares_chain(self.drafter)

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """Returns an empty state and an empty cache."""
        return self.drafter.init(params[0], batch, capacity), self.model.init_cache(batch, capacity)

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        """Runs the target on the tokens as well."""
        before, cache = state
        size = seen.tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        output = self.model(params[1], seen.tokens, positions, causal_mask(size), cache)
        after = self.drafter.observe(params[0], before, seen)
        return after, cache.commit(output.written, seen.length)

    def propose(
        self, params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Drafts from both."""
        before, cache = state
        draft = propose_with(self.drafter, params[0], before, keys, sampling, cache)
        return draft if draft.state is None else draft.replace(state=(draft.state, cache))


def subject_of(
    loaded: LoadedDrafter, target: LoadedTarget, samples: int = 32768, *, seed: int = 0
) -> Subject:
    """Returns a drafter as the checks run it."""
    part: Any = loaded.drafter
    params = loaded.params
    if reads_cache(part):
        part = WithCache(part, target.model)
        params = (params, target.params)
    return Subject(part, params, target, samples, seed=seed)


def loaded_part(subject: Subject) -> LoadedDrafter:
    """Returns the drafter as the loop runs it."""
    if isinstance(subject.part, WithCache):
        return LoadedDrafter(subject.part.drafter, subject.params[0])
    return LoadedDrafter(subject.part, subject.params)


# Inputs, states and drafts


def sample_observation(
    subject: Subject, length: tuple[int, ...] = LENGTHS, *, stream: int = 0, size: int = SIZE
) -> Observation:
    """Returns random tokens ``[ROWS size]`` with the target's features.

    The first ``length`` tokens of each row are real.
    """
    random = subject.random(stream)
    # Two ids, so that texts repeat themselves, for lookups.
    ids = random.integers(0, subject.target.vocab_size, 2)
    tokens = random.choice(ids, (ROWS, size)).astype(np.int32)
    next_token = random.choice(ids, ROWS)

    positions = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
    output, _ = forward(
        subject, tokens, positions, causal_mask(size), aux_layers=subject.part.aux_layers
    )
    return Observation(
        tokens=jnp.asarray(tokens),
        features=output.features,
        length=jnp.asarray(length, jnp.int32),
        next_token=jnp.asarray(next_token, jnp.int32),
    )


def sample_long_text(subject: Subject) -> Observation:
    """Returns a text of up to ``LONG`` tokens, as far as the target's positions go."""
    size = min(LONG, subject.target.max_positions - 4 * SIZE) // SIZE * SIZE
    return sample_observation(subject, (size,) * ROWS, stream=5, size=size)


def compile_observe(subject: Subject) -> Any:
    """Traces ``observe`` anew, with its check."""
    drafter = subject.part

    @jax.jit
    def observe(params: Any, state: Any, observation: Observation) -> Any:
        return checked_state(drafter, state, drafter.observe(params, state, observation))

    return observe


def compile_propose(subject: Subject) -> Any:
    """Traces ``propose`` anew, with its checks."""
    drafter = subject.part
    vocab_size = subject.target.vocab_size

    @jax.jit
    def propose(params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        draft = drafter.propose(params, state, keys, sampling)
        check_draft(drafter, draft, batch=keys.shape[0], vocab_size=vocab_size)
        if draft.state is not None:
            checked_state(drafter, state, draft.state, "propose")
        return draft

    return propose


def observe(
    subject: Subject, *observations: Observation, state: Any = None, program: Any = None
) -> Any:
    """Returns the state after observations, from an empty one by default."""
    if state is None:
        state = subject.part.init(subject.params, ROWS, CAPACITY)
        check_rows(subject.part, state, ROWS)

    program = program or subject.once(compile_observe)
    for observation in observations:
        state = program(subject.params, state, observation)
    return state


class HostDraft(NamedTuple):
    """The arrays of a :class:`~eagle3_jax.Draft` on the host."""

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    valid: Bool[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B N V"] | None


def propose(subject: Subject, state: Any, *, seed: int = 0, program: Any = None) -> HostDraft:
    """Returns a draft."""
    program = program or subject.once(compile_propose)
    return _on_host(program(subject.params, state, row_keys(subject.seed + seed, ROWS), SAMPLING))


def _on_host(draft: Draft) -> HostDraft:
    return HostDraft(*jax.device_get((draft.tokens, draft.parents, draft.valid, draft.probs)))


def state_after_prompt(subject: Subject) -> Any:
    """Returns the state that most checks start from."""
    return observe(subject, sample_observation(subject))


def draft_after_prompt(subject: Subject) -> HostDraft:
    """Returns the draft that most checks compare with."""
    return propose(subject, subject.once(state_after_prompt))


def sample_drafts(subject: Subject, state: Any, row: int, samples: int) -> Iterator[HostDraft]:
    """Yields drafts with many keys from the state of one row."""
    # As many rows as keep the probabilities of a batch within 32 MB.
    size = subject.part.num_nodes * subject.target.vocab_size
    rows = int(np.clip(2**23 // size, 1, 1024))

    state = repeat_row(state, row, rows)
    sampling = repeat_row(SAMPLING, row, rows)
    program = subject.once(compile_propose)
    for run in range(max(1, samples // rows)):
        keys = row_keys(subject.seed + 100 + run, rows)
        yield _on_host(program(subject.params, state, keys, sampling))


def computes_in_low_precision(subject: Subject) -> bool:
    """Whether the drafter or its target computes in less than 32 bits."""
    state = subject.once(state_after_prompt)
    return has_low_precision(
        subject.params, state, subject.target.params, sample_observation(subject).features
    )


# Comparisons


def differing_rows(draft: HostDraft, expected: HostDraft, tolerance: float = 1e-6) -> list[int]:
    """Returns rows in which valid nodes of two drafts differ.

    Probabilities may differ by ``tolerance`` and 1e-4 of their value.
    """
    equal = np.logical_and(draft.tokens == expected.tokens, draft.parents == expected.parents)
    if draft.probs is not None and expected.probs is not None:
        close = np.isclose(draft.probs, expected.probs, rtol=1e-4, atol=tolerance).all(axis=-1)
        # The root has no distribution.
        is_root = np.arange(draft.tokens.shape[1]) == 0
        equal = equal & (close | is_root)

    same = (draft.valid == expected.valid) & (equal | ~expected.valid)
    return np.flatnonzero(~same.all(axis=1)).tolist()


def _require_equal(draft: HostDraft, expected: HostDraft, condition: str) -> None:
    if rows := differing_rows(draft, expected):
        raise Broken(f"{name_rows(rows)} drafts something else {condition}")


# Checks


def keeps_the_protocol(subject: Subject) -> str:
    """It is an instance with every member and a stable hash."""
    drafter = loaded_part(subject).drafter
    require_protocol(dataclasses.replace(subject, part=drafter), "drafter")
    shape = "a chain" if declares_chain(drafter) else "a tree"
    return f"{shape} of {drafter.num_nodes} nodes, at most {drafter.max_depth} below the root"


def keeps_shapes(subject: Subject) -> str:
    """States lead with the batch and keep their shapes and types; drafts have the declared size."""
    state = subject.once(state_after_prompt)
    subject.once(draft_after_prompt)
    return f"{len(jax.tree.leaves(state))} arrays in its state"


def proposes_from_its_state_only(subject: Subject) -> None:
    """A second call and a new trace give the same draft."""
    expected = subject.once(draft_after_prompt)
    state = subject.once(state_after_prompt)
    # A drafter that remembers its last keys would show in the second call.
    propose(subject, state, seed=1)

    observed_anew = observe(subject, sample_observation(subject), program=compile_observe(subject))
    for draft, condition in (
        (propose(subject, state), "after a second call"),
        (
            propose(subject, state, program=compile_propose(subject)),
            "when `propose` is traced anew",
        ),
        (propose(subject, observed_anew), "when `observe` is traced after it"),
    ):
        _require_equal(draft, expected, f"{condition}; something is kept outside the state")


def commits_nothing_by_proposing(subject: Subject) -> str | None:
    """A state that ``propose`` returns leads to the same drafts as the state before it."""
    state = subject.once(state_after_prompt)
    program = subject.once(compile_propose)
    returned = program(subject.params, state, row_keys(subject.seed, ROWS), SAMPLING).state
    if returned is None:
        return "its drafts return no state"

    for length in ((0,) * ROWS, (2, 1, 2, 1)):
        observation = sample_observation(subject, length, stream=3)
        expected = propose(subject, observe(subject, observation, state=state))
        draft = propose(subject, observe(subject, observation, state=returned))
        _require_equal(draft, expected, "after the state that the draft before returned")
    return None


def drafts_a_tree(subject: Subject) -> str:
    """Node 0 is the token observed last, parents precede children, ids are in the vocabulary."""
    draft = subject.once(draft_after_prompt)
    _require_root(subject, draft)
    deepest = _require_parents(subject.part, draft)

    last_id = subject.target.vocab_size - 1
    for row, node in np.argwhere(draft.valid & ((draft.tokens < 0) | (draft.tokens > last_id))):
        raise Broken(
            f"node {node} of row {row} is id {draft.tokens[row, node]}; expected 0 to {last_id}"
            " (it is cut off)"
        )

    # Siblings that were sampled may be equal: the rule takes them one after the other.
    for row in range(ROWS if draft.probs is None else 0):
        nodes = np.flatnonzero(draft.valid[row])
        children = {(draft.parents[row, node], draft.tokens[row, node]) for node in nodes}
        if len(children) < len(nodes):
            raise Broken(f"siblings of row {row} repeat a token, which can never be accepted twice")
    return f"{deepest} levels"


def _require_root(subject: Subject, draft: HostDraft) -> None:
    root = np.asarray(sample_observation(subject).next_token)
    if (rows := np.flatnonzero(draft.tokens[:, 0] != root)).size:
        raise Broken(
            f"node 0 of {name_rows(rows.tolist())} is {draft.tokens[rows[0], 0]}; expected the last"
            f" `next_token`, {root[rows[0]]} (the loop puts it there, but the drafter works from"
            " another)"
        )


def _require_parents(drafter: Any, draft: HostDraft) -> int:
    """Returns the depth of the deepest node; raises ``Broken`` if parents are not what it says."""
    parents = draft.parents
    valid = draft.valid
    nodes = np.arange(parents.shape[1], dtype=np.int32)
    if (parents[:, 0] != -1).any() or not valid[:, 0].all():
        raise Broken(
            f"node 0 has parents {parents[:, 0].tolist()} or is invalid; expected -1 and valid"
        )
    for row, node in np.argwhere(valid & (nodes > 0) & ((parents < 0) | (parents >= nodes))):
        raise Broken(
            f"node {node} of row {row} has parent {parents[row, node]}; expected 0 to {node - 1}"
            " (it is cut off)"
        )
    if declares_chain(drafter) and (valid & (parents != nodes - 1)).any():
        raise Broken(
            f"it declares a chain and has parents {parents[0].tolist()}; expected"
            f" {(nodes - 1).tolist()}"
        )

    # Padding may have any parent; the root's stays -1.
    topological = np.clip(parents, 0, nodes - 1)
    depth = np.asarray(depths(ancestor_mask(jnp.asarray(topological), len(nodes))))
    deepest = int(depth[valid].max())
    if deepest > drafter.max_depth:
        raise Broken(
            f"it drafts {deepest} levels and says {drafter.max_depth}; deeper nodes are cut off"
        )
    return deepest


def has_independent_rows(subject: Subject) -> None:
    """A row's draft does not depend on its neighbours."""
    observation = sample_observation(subject)
    neighbours = sample_observation(subject, (2, 3, 4, 1), stream=2)
    for row in range(ROWS):
        mixed = mix_rows(np.arange(ROWS) == row, observation, neighbours)
        draft = propose(subject, observe(subject, mixed))
        if row in differing_rows(draft, subject.once(draft_after_prompt)):
            raise Broken(
                f"row {row} drafts something else when its neighbours were shown other tokens"
            )


def ignores_empty_observations(subject: Subject) -> None:
    """An observation of length 0 changes nothing."""
    condition = "after an observation of length 0"
    state = subject.once(state_after_prompt)
    idle = observe(subject, sample_observation(subject, (0,) * ROWS, stream=1), state=state)
    _require_equal(propose(subject, idle), subject.once(draft_after_prompt), condition)

    more = sample_observation(subject, (2, 1, 2, 1), stream=3)
    expected = propose(subject, observe(subject, more, state=state))
    _require_equal(propose(subject, observe(subject, more, state=idle)), expected, condition)


def ignores_padding(subject: Subject) -> str:
    """Tokens and features past the observed length have no influence."""
    observation = sample_observation(subject)
    padding = jnp.arange(SIZE, dtype=jnp.int32)[None] >= observation.length[:, None]
    changed_ids = subject.target.vocab_size - 1 - observation.tokens
    large = jnp.full_like(observation.features, 1e3)
    changed = observation.replace(
        tokens=jnp.where(padding, changed_ids, observation.tokens),
        features=jnp.where(padding[:, :, None, None], large, observation.features),
    )

    draft = propose(subject, observe(subject, changed))
    _require_equal(
        draft, subject.once(draft_after_prompt), "when the content past the observed length changes"
    )
    return f"lengths {', '.join(map(str, LENGTHS))} of {SIZE}"


def observes_in_pieces(subject: Subject) -> str:
    """A short and a long text give the same draft at once and in pieces, up to rounding."""
    short = sample_observation(subject, (SIZE,) * ROWS, stream=4)
    long = subject.once(sample_long_text)
    length = long.tokens.shape[1]
    _require_equal_in_pieces(subject, short, (4, SIZE - 4), 1e-5)
    _require_equal_in_pieces(subject, long, (SIZE,) * (length // SIZE), 1e-4)
    return f"up to {length} tokens, at once and {SIZE} at a time, with a capacity of {CAPACITY}"


def _require_equal_in_pieces(
    subject: Subject, text: Observation, sizes: tuple[int, ...], tolerance: float
) -> None:
    """Raises ``Broken`` if a text in pieces leads to another draft than the text at once."""
    length = sum(sizes)
    expected = propose(subject, observe(subject, text))
    if (rows := np.flatnonzero(expected.tokens[:, 0] != np.asarray(text.next_token))).size:
        raise Broken(
            f"node 0 of {name_rows(rows.tolist())} is not the last token of a text of {length}"
        )

    starts = itertools.accumulate(sizes, initial=0)
    pieces = [_cut(text, start, size) for start, size in zip(starts, sizes, strict=False)]
    draft = propose(subject, observe(subject, *pieces))

    # Below 32 bits the order of sums may change the likeliest token of some rows.
    low_precision = subject.once(computes_in_low_precision)
    rows = differing_rows(draft, expected, 2e-2 if low_precision else tolerance)
    if len(rows) > (ROWS // 2 if low_precision else 0):
        distinct = ", ".join(map(str, dict.fromkeys(sizes)))
        raise Broken(
            f"{name_rows(rows)} drafts something else when {length} tokens come in pieces of"
            f" {distinct}"
        )


def _cut(text: Observation, start: int, count: int) -> Observation:
    """Returns the observation of tokens ``start .. start + count - 1`` of a text."""
    end = start + count
    padding = (0, SIZE - count)
    return Observation(
        tokens=jnp.pad(text.tokens[:, start:end], ((0, 0), padding)),
        features=jnp.pad(text.features[:, start:end], ((0, 0), padding, (0, 0), (0, 0))),
        length=jnp.full(ROWS, count, jnp.int32),
        next_token=text.tokens[:, end] if end < text.tokens.shape[1] else text.next_token,
    )


def declares_distributions(subject: Subject) -> str | None:
    """What it declares are distributions under which its tokens are possible."""
    draft = subject.once(draft_after_prompt)
    if draft.probs is None:
        return "point masses, which any token can have come from"

    valid = draft.valid[:, 1:]
    probs = draft.probs[:, 1:][valid]
    tokens = draft.tokens[:, 1:][valid]
    if not np.isfinite(probs).all() or (probs < 0).any():
        raise Broken("a declared probability is negative or not finite")

    total = probs.sum(-1, dtype=np.float64)
    if (np.abs(total - 1) > _SUM).any():
        farthest = total[np.abs(total - 1).argmax()]
        raise Broken(
            f"declared probabilities add up to {farthest:.6g}; expected 1 within {_SUM:g}, as"
            " float32 gives it"
        )

    tokens = np.clip(tokens, 0, subject.target.vocab_size - 1)
    if (np.take_along_axis(probs, tokens[:, None], axis=-1) <= 0).any():
        raise Broken("it drafts a token to which it declares probability 0")
    return None


def samples_from_what_it_declares(subject: Subject) -> str:
    """Over many keys, tokens are as frequent and as likely as declared."""
    if subject.once(draft_after_prompt).probs is None:
        return "point masses: exact whatever is drafted"

    drafts = sample_drafts(subject, subject.once(state_after_prompt), 2, subject.samples)
    short = _require_declared(drafts, "after a short text")
    state = observe(subject, subject.once(sample_long_text))
    drafts = sample_drafts(subject, state, 3, 4 * subject.samples)
    long = _require_declared(drafts, "after a long text")
    return f"{short} and {long} {DETECTED}"


def _require_declared(drafts: Iterable[HostDraft], event: str) -> str:
    """Returns what would have been detected; raises ``Broken`` if tokens are not as declared."""
    evidence = _compare_with_declared(drafts, event)
    if not evidence.fits:
        raise NotRun("no token was drafted")
    require_no(evidence.bias())
    require_no(evidence.misfit("its declared distribution"))
    return (
        f"{event} {len(evidence.fits)} distributions that are"
        f" {evidence.smallest_deviation():.1%} off (rms), or a node sampled from"
        f" q^{1 + evidence.smallest_tilt():.3f},"
    )


def _compare_with_declared(drafts: Iterable[HostDraft], event: str) -> Evidence:
    """Compares the tokens of every node with its declared distributions, by its parent's token."""
    evidence = Evidence()
    # By node, the most frequent tokens of its parent in the first drafts.
    tracked: dict[int, list[int]] = {}
    for draft in drafts:
        assert draft.probs is not None
        for node in range(1, draft.tokens.shape[1]):
            valid = draft.valid[:, node]
            probs = draft.probs[valid, node].astype(np.float64)
            tokens = np.clip(draft.tokens[valid, node], 0, probs.shape[-1] - 1)
            fault = (
                f"{event} node {node} samples likely tokens too {{}} for its declared temperature"
                " or precision"
            )
            evidence.contrasts[fault].add_log_probabilities(probs, tokens)

            parents = draft.parents[valid, node]
            parent_tokens = draft.tokens[valid][np.arange(len(parents)), parents]
            # Every row has the same root.
            parent_tokens[parents <= 0] = -1
            ranked = Counter(parent_tokens.tolist()).most_common(_GROUPS)
            for token in tracked.setdefault(node, [token for token, _ in ranked]):
                chosen = parent_tokens == token
                condition = "" if token < 0 else f" below id {token}"
                evidence.count(
                    f"{event} node {node}{condition}", tokens[chosen], probs[chosen].sum(0)
                )
    return evidence


def declares_before_sampling(subject: Subject) -> str:
    """The distribution of a chain's token is a function of the tokens before it in the draft."""
    if subject.once(draft_after_prompt).probs is None:
        return "nothing is sampled"
    if not declares_chain(subject.part):
        return "a tree: only chains are compared"

    # The first distribution of a node after the tokens before it.
    known: dict[tuple[int, ...], np.ndarray] = {}
    compared = 0
    for draft in sample_drafts(
        subject, subject.once(state_after_prompt), 2, min(subject.samples, 1024)
    ):
        assert draft.probs is not None
        for row, index in np.argwhere(draft.valid[:, 1:]):
            node = index + 1
            probs = draft.probs[row, node]
            prefix = (node, *draft.tokens[row, 1:node].tolist())
            first = known.setdefault(prefix, probs)
            compared += first is not probs
            if not np.allclose(first, probs, rtol=1e-3, atol=1e-6):
                raise Broken(
                    f"the declared distribution of node {node} differs between drafts of one state"
                    " that share every token before it"
                )

    if not compared:
        raise NotRun("no two drafts shared their first tokens")
    return f"{compared} nodes compared"


def keeps_greedy_output(subject: Subject) -> str:
    """Greedy output on a ragged batch is the target's likeliest token after every token."""
    prompts = _random_prompts(subject, (5, 2, 9, 1))
    drafter = loaded_part(subject)
    stats = require_greedy_output(subject, drafter, prompts, [24, 7, 16, 1], "please report this")
    if stats.num_draft_tokens:
        require_accepted(int(stats.num_accepted_tokens), "output")
    return f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted"


def keeps_the_distribution(subject: Subject) -> str:
    """Sampled sequences over three tokens have the target's distribution, which is enumerated."""
    if subject.once(computes_in_low_precision):
        raise NotRun(
            "it or its target computes in less than 32 bits, where rounding alone would show"
        )

    candidates = _random_prompts(subject, (1, 3) * 4)
    enumerated = ((prompt, _sequence_distribution(subject, prompt)) for prompt in candidates)
    pairs = list(itertools.islice((pair for pair in enumerated if pair[1]), 2))
    if not pairs:
        raise NotRun("the target's third and fourth likeliest tokens are too close together")

    prompts = [prompt for prompt, _ in pairs] * 512
    decoder = SpeculativeDecoder(subject.target, loaded_part(subject), stop_tokens=())
    sampling = SamplingParams(temperature=1.0, top_k=TOP)

    evidence = Evidence()
    accepted = 0
    runs = max(1, subject.samples // len(prompts))
    for run in range(runs):
        result = decoder.generate(
            prompts, max_new_tokens=HORIZON, sampling=sampling, seed=subject.seed + run
        )
        accepted += int(result.stats.num_accepted_tokens)
        for index, (prompt, distribution) in enumerate(pairs):
            sequences = {tokens: number for number, tokens in enumerate(distribution)}
            written = result.tokens[index :: len(pairs)]
            # The last outcome is any other sequence.
            outcomes = [sequences.get(tuple(tokens), len(sequences)) for tokens in written]
            expected = len(written) * np.array([*distribution.values(), 0.0])
            name = f"the distribution of {HORIZON} tokens after {prompt}"
            evidence.count(name, np.array(outcomes), expected)

    require_no(evidence.misfit("the target"))
    require_accepted(accepted, "distribution")
    return (
        f"{runs * len(prompts)} sequences, {accepted} draft tokens accepted; a deviation of "
        f"{evidence.smallest_deviation():.1%} (rms over sequences) {DETECTED}"
    )


def _sequence_distribution(subject: Subject, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Returns the probability of every sequence; empty where the cut is too near a tie."""
    distribution = {(): 1.0}
    for length in range(HORIZON):
        texts = np.zeros((len(distribution), len(prompt) + HORIZON), np.int32)
        texts[:, : len(prompt) + length] = [[*prompt, *tokens] for tokens in distribution]
        logits = reference_logits(subject, texts)[:, len(prompt) + length - 1]

        longer = {}
        for (tokens, mass), scores in zip(distribution.items(), logits, strict=True):
            order = np.argsort(-scores)
            likeliest = order[:TOP]
            if len(order) > TOP and scores[likeliest[-1]] - scores[order[TOP]] < _NEAR:
                return {}
            for token, weight in zip(
                likeliest.tolist(), special.softmax(scores[likeliest]), strict=True
            ):
                longer[*tokens, token] = mass * float(weight)
        distribution = longer
    return distribution


def _random_prompts(subject: Subject, lengths: tuple[int, ...]) -> list[list[int]]:
    random = subject.random(*lengths)
    return [random.integers(0, subject.target.vocab_size, size).tolist() for size in lengths]


DRAFTER_CHECKS: dict[str, Callable[[Subject], str | None]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": keeps_shapes,
    "proposes from its state alone": proposes_from_its_state_only,
    "commits nothing by proposing": commits_nothing_by_proposing,
    "drafts a tree below the root": drafts_a_tree,
    "rows are independent of their neighbours": has_independent_rows,
    "an empty observation changes nothing": ignores_empty_observations,
    "padding behind an observation does not matter": ignores_padding,
    "observing in pieces is observing at once": observes_in_pieces,
    "declares distributions": declares_distributions,
    "draws from what it declares": samples_from_what_it_declares,
    "knows before it draws": declares_before_sampling,
    "greedy output is the target's": keeps_greedy_output,
    "sampled output has the target's distribution": keeps_the_distribution,
}
