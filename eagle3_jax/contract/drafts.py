"""What the loop relies on in a drafter, asked of its three methods alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm, poisson

from eagle3_jax.boundary import declares_chain, require_drafter
from eagle3_jax.contract.frequencies import Contrast
from eagle3_jax.contract.report import ALPHA, Broken, NotRun
from eagle3_jax.contract.subject import (
    CAPACITY,
    FED,
    LENGTHS,
    ROWS,
    SAMPLING,
    HostDraft,
    Subject,
    differing_rows,
    named_rows,
)
from eagle3_jax.sampling import row_keys

_SUM = 2e-5  # how far from 1 sums of float32 probabilities lie over large vocabularies


def keeps_the_protocol(subject: Subject) -> str:
    """It is an instance with every member, and the same static argument whenever it is asked."""
    drafter = subject.loaded.drafter
    require_drafter(drafter)
    if hash(drafter) != hash(drafter) or drafter != drafter:
        raise Broken("its hash changes, or it is not equal to itself, so every call would compile anew")
    shape = "a chain" if declares_chain(drafter) else "a tree"
    return f"{shape} of {drafter.num_nodes} nodes, at most {drafter.max_depth} below the root"


def keeps_shapes(subject: Subject) -> str:
    """States lead with the batch and keep their shapes and types, and drafts have the size announced."""
    state = subject.observe(subject.after_prompt, subject.shown((2, 1, 0, 2), seed=1))
    subject.propose(state)
    return f"{len(jax.tree.leaves(state))} arrays in its state"


def proposes_from_its_state_alone(subject: Subject) -> str:
    """Asked again, or traced anew, it answers the same: nothing but its state, keys and sampling decides."""
    first, params, keys = subject.draft, subject.loaded.params, row_keys(subject.seed, ROWS)
    subject.propose(subject.after_prompt, seed=1)
    again = subject.propose(subject.after_prompt)
    traced = HostDraft.of(subject.proposing()(params, subject.after_prompt, keys, SAMPLING))
    observed = subject.propose(subject.observing()(params, subject.fresh(), subject.shown()))
    for other, how in (
        (again, "a second call"),
        (traced, "tracing `propose` anew"),
        (observed, "tracing `observe` after it"),
    ):
        if rows := differing_rows(first, other):
            raise Broken(f"{how} gave another draft in {named_rows(rows)}; something is kept outside the state")
    return ""


def commits_nothing_by_proposing(subject: Subject) -> str:
    """What proposing left in the state, where it is handed on, goes on as the state that was proposed from."""
    left = subject.left(subject.after_prompt)
    if left is None:
        return "its drafts hand no state on"
    for length in ((0,) * ROWS, (2, 1, 2, 1)):
        seen = subject.shown(length, seed=3)
        kept, went_on = (subject.propose(subject.observe(state, seen)) for state in (subject.after_prompt, left))
        if rows := differing_rows(kept, went_on):
            raise Broken(f"{named_rows(rows)} drafts something else after the state that the draft before handed on")
    return ""


def starts_at_the_root(subject: Subject) -> str:
    """Node 0 is the token observed last, parent -1, and valid."""
    draft, root = subject.draft, np.asarray(subject.shown().next_token)
    if (rows := np.flatnonzero(draft.tokens[:, 0] != root)).size:
        raise Broken(
            f"node 0 of {named_rows(rows.tolist())} is {draft.tokens[rows[0], 0]}; expected the last `next_token`, "
            f"{root[rows[0]]} (the loop puts it there, but the drafter works from another)"
        )
    if (draft.parents[:, 0] != -1).any() or not draft.valid[:, 0].all():
        raise Broken(f"node 0 has parents {draft.parents[:, 0].tolist()} or is invalid; expected -1 and valid")
    return ""


def is_topological(subject: Subject) -> str:
    """Every parent stands before its child; in a declared chain it is the node before."""
    parents, valid = subject.draft.parents, subject.draft.valid
    node = np.arange(parents.shape[1])
    wrong = valid & (node > 0) & ((parents < 0) | (parents >= node))
    if wrong.any():
        row, at = np.argwhere(wrong)[0]
        raise Broken(f"node {at} of row {row} has parent {parents[row, at]}; expected 0 to {at - 1} (it is cut off)")
    if declares_chain(subject.loaded.drafter) and (valid & (parents != node - 1)).any():
        raise Broken(f"it declares a chain and has parents {parents[0].tolist()}; expected {(node - 1).tolist()}")
    return ""


def is_as_deep_as_it_says(subject: Subject) -> str:
    """No node lies deeper than ``max_depth``."""
    num_nodes = subject.loaded.drafter.num_nodes
    depth = np.zeros((ROWS, num_nodes), int)
    for node in range(1, num_nodes):
        above = np.clip(subject.draft.parents[:, node], 0, num_nodes - 1)
        depth[:, node] = 1 + depth[np.arange(ROWS), above]
    deepest = int(np.where(subject.draft.valid, depth, 0).max())
    if deepest > subject.loaded.drafter.max_depth:
        raise Broken(
            f"it drafts {deepest} levels and says {subject.loaded.drafter.max_depth}; deeper nodes are cut off"
        )
    return f"{deepest} levels"


def drafts_ids_of_the_vocabulary(subject: Subject) -> str:
    """Ids lie in the target's vocabulary, and siblings that are not drawn do not repeat each other."""
    draft, size = subject.draft, subject.target.vocab_size
    outside = draft.valid & ((draft.tokens < 0) | (draft.tokens >= size))
    if outside.any():
        row, node = np.argwhere(outside)[0]
        raise Broken(f"node {node} of row {row} is id {draft.tokens[row, node]}; expected 0 to {size - 1} (cut off)")
    if draft.probs is None:
        for row in range(ROWS):
            family = [(draft.parents[row, n], draft.tokens[row, n]) for n in np.flatnonzero(draft.valid[row]) if n]
            if len(set(family)) < len(family):
                raise Broken(f"siblings of row {row} repeat a token, which can never be accepted twice")
    return ""


def is_alone_in_its_row(subject: Subject) -> str:
    """A row's draft does not depend on what its neighbours are or were shown."""
    seen, other = subject.shown(), subject.shown((2, 3, 4, 1), seed=2)
    for row in range(ROWS):
        mixed = jax.tree.map(lambda new, own, row=row: new.at[row].set(own[row]), other, seen)
        if row in differing_rows(subject.draft, subject.propose(subject.observe(subject.fresh(), mixed))):
            raise Broken(f"row {row} drafts something else when its neighbours were shown other tokens")
    return ""


def ignores_empty_observations(subject: Subject) -> str:
    """An observation of length 0 changes nothing."""
    nothing = subject.shown((0,) * ROWS, seed=1)
    idle = subject.observe(subject.after_prompt, nothing)
    more = subject.shown((2, 1, 2, 1), seed=3)
    then = [subject.propose(subject.observe(state, more)) for state in (subject.after_prompt, idle)]
    for one, other in ((subject.draft, subject.propose(idle)), then):
        if rows := differing_rows(one, other):
            raise Broken(f"{named_rows(rows)} drafts something else after an observation of length 0")
    return ""


def ignores_padding(subject: Subject) -> str:
    """What lies past the observed length does not matter."""
    seen = subject.shown()
    padding = jnp.arange(FED, dtype=jnp.int32)[None] >= seen.length[:, None]
    dirty = seen.replace(  # type: ignore[attr-defined]
        tokens=jnp.where(padding, subject.target.vocab_size - 1 - seen.tokens, seen.tokens),
        features=jnp.where(padding[:, :, None, None], jnp.asarray(1e3, seen.features.dtype), seen.features),
    )
    if rows := differing_rows(subject.draft, subject.propose(subject.observe(subject.fresh(), dirty))):
        raise Broken(f"{named_rows(rows)} drafts something else when what lies past the observed length changes")
    return f"lengths {', '.join(map(str, LENGTHS))} of {FED}"


def does_not_care_how_truth_is_cut(subject: Subject) -> str:
    """Observing in pieces is observing at once: a prefill is a long observation."""
    whole, cut = subject.shown((FED,) * ROWS, seed=4), 4
    first = whole.replace(  # type: ignore[attr-defined]
        length=jnp.full(ROWS, cut, jnp.int32), next_token=whole.tokens[:, cut]
    )
    roll = lambda leaf: jnp.roll(leaf, -cut, axis=1)
    second = whole.replace(  # type: ignore[attr-defined]
        tokens=roll(whole.tokens), features=roll(whole.features), length=jnp.full(ROWS, FED - cut, jnp.int32)
    )
    once = subject.propose(subject.observe(subject.fresh(), whole))
    pieces = subject.propose(subject.observe(subject.observe(subject.fresh(), first), second))
    rows = differing_rows(once, pieces, tolerance=2e-2 if subject.rounds_off else 1e-5)
    if len(rows) > (ROWS // 2 if subject.rounds_off else 0):
        raise Broken(f"{named_rows(rows)} drafts something else when {FED} tokens are shown as {cut} and {FED - cut}")
    return f"{named_rows(rows)} differed, as rounding lets it" if rows else ""


def declares_distributions(subject: Subject) -> str:
    """What it declares are distributions that can have given its tokens."""
    draft = subject.draft
    if draft.probs is None:
        return "point masses, which any token can have come from"
    probs, valid = draft.probs[:, 1:], draft.valid[:, 1:]
    if not np.isfinite(probs[valid]).all() or (probs[valid] < 0).any():
        raise Broken("a declared probability is negative or not finite")
    total = probs.sum(-1, dtype=np.float64)
    if (np.abs(total - 1) > _SUM)[valid].any():
        raise Broken(
            f"declared probabilities add up to {total[valid][np.abs(total[valid] - 1).argmax()]:.6g}; expected 1 "
            f"within {_SUM:g}, as float32 gives it"
        )
    chosen = np.take_along_axis(probs, np.clip(draft.tokens[:, 1:, None], 0, probs.shape[-1] - 1), axis=-1)[:, :, 0]
    if (valid & (chosen <= 0)).any():
        raise Broken("it drafts a token to which it declares probability 0")
    return ""


def draws_from_what_it_declares(subject: Subject) -> str:
    """Over many keys, tokens are as frequent as declared, and as likely; after a short text and after a long one."""
    if subject.draft.probs is None:
        return "point masses: exact whatever is drafted"
    said = []
    for state, row, times, what in (
        (subject.after_prompt, 2, 1, "a short text"),
        (subject.after_long_text, 3, 4, "a long text"),
    ):
        tally = _Tally()
        for draft in subject.drafts_of_one_row(times * subject.samples, state=state, row=row):
            tally.add(draft)
        said.append(f"after {what} {tally.verdict(f'after {what} ')}")
    return "; ".join(said) + " would have shown nine times in ten"


def drafts_after_a_long_text(subject: Subject) -> str:
    """A long text, observed at once or in pieces of a size of their own, gives the draft that it should."""
    long = subject.long
    whole = subject.shown((long,) * ROWS, seed=5, size=long)
    at = (
        lambda start: whole.replace(  # type: ignore[attr-defined]
            tokens=whole.tokens[:, start : start + FED],
            features=whole.features[:, start : start + FED],
            length=jnp.full(ROWS, FED, jnp.int32),
            next_token=whole.tokens[:, start + FED] if start + FED < long else whole.next_token,
        )
    )
    state = subject.fresh()
    for start in range(0, long // FED * FED, FED):
        state = subject.observe(state, at(start))
    once, pieces = subject.propose(subject.after_long_text), subject.propose(state)
    if (rows := np.flatnonzero(once.tokens[:, 0] != np.asarray(whole.next_token))).size:
        raise Broken(f"node 0 of {named_rows(rows.tolist())} is not the last token of a text of {long}")
    rows = differing_rows(once, pieces, tolerance=2e-2 if subject.rounds_off else 1e-4)
    if len(rows) > (ROWS // 2 if subject.rounds_off else 0):
        raise Broken(f"{named_rows(rows)} drafts something else when {long} tokens are shown {FED} at a time")
    return f"{long} tokens, at once and {FED} at a time, with a capacity of {CAPACITY}"


def knows_before_it_draws(subject: Subject) -> str:
    """What a chain's token is drawn from follows from the tokens before it in the draft."""
    drafter, draft = subject.loaded.drafter, subject.draft
    if draft.probs is None:
        return "nothing is drawn"
    if not declares_chain(drafter):
        return "a tree: only chains are compared"
    known: dict[tuple, np.ndarray] = {}
    compared = 0
    for draft in subject.drafts_of_one_row(min(subject.samples, 1024)):
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


class _Tally:
    """Tokens seen and expected at every node, apart for the most frequent tokens of its parent.

    At every node the logarithms of what was declared for its tokens are added up, too, less what they should be on
    average: one number, which shows a temperature that is not the declared one sooner than the frequencies do.
    """

    def __init__(self) -> None:
        self.sharpness: dict[int, Contrast] = {}
        self.groups: dict[tuple[int, int], list] = {}  # (node, its parent's token) -> [seen [V], expected [V], drafts]

    def add(self, draft: HostDraft) -> None:
        first, rows = not self.groups, np.arange(draft.tokens.shape[0])
        assert draft.probs is not None
        for node in range(1, draft.tokens.shape[1]):
            valid, q = draft.valid[:, node], draft.probs[:, node].astype(np.float64)
            log = np.log(np.where(q > 0, q, 1))
            mean, square = (q * log).sum(-1), (q * log**2).sum(-1)
            scores = log[rows, np.clip(draft.tokens[:, node], 0, q.shape[-1] - 1)] - mean
            contrast = self.sharpness.setdefault(node, Contrast())
            contrast.add(scores[valid], np.maximum(square - mean**2, 0)[valid])
            parent = np.clip(draft.parents[:, node], 0, draft.tokens.shape[1] - 1)
            above = np.where(parent == 0, -1, draft.tokens[rows, parent])  # every row has the same root
            if first:
                found, counts = np.unique(above[draft.valid[:, node]], return_counts=True)
                for key in found[np.argsort(-counts)][:8]:
                    self.groups[node, int(key)] = [0, 0.0, 0]
            for key in [key for at, key in self.groups if at == node]:
                chosen = draft.valid[:, node] & (above == key)
                size = draft.probs.shape[-1]
                group = self.groups[node, key]
                group[0] += np.bincount(draft.tokens[chosen, node], minlength=size)[:size]
                group[1] += draft.probs[chosen, node].sum(0, dtype=np.float64)
                group[2] += int(chosen.sum())

    def verdict(self, when: str) -> str:
        found, largest = [], 0.0
        for (node, key), (seen, expected, drafts) in self.groups.items():
            often = np.flatnonzero((expected >= 10) | (seen >= 10))
            p = np.minimum(
                _two_sided(seen[often], expected[often]), _two_sided(drafts - seen[often], drafts - expected[often])
            )
            below = "" if key < 0 else f" below id {key}"
            found += [
                (float(value), f"id {token} at node {node}{below} was drafted {seen[token]} times in {drafts}; "
                 f"declared were {expected[token]:.1f}")
                for value, token in zip(p, often, strict=True)
            ]  # fmt: skip
            largest = max(largest, float(np.max(expected, initial=0)))
        if not found:
            raise NotRun("no token was drafted often enough to compare")
        known = {node: contrast for node, contrast in self.sharpness.items() if contrast.variance > 100}
        tests = len(found) + len(known)
        for node, contrast in known.items():
            if contrast.p_value * tests < ALPHA:
                how = "likely tokens too often" if contrast.total > 0 else "likely tokens too seldom"
                raise Broken(
                    f"{when}node {node} draws {how} for what it declares, by {abs(contrast.z):.1f} standard "
                    "deviations; is its temperature, or its precision, another?"
                )
        worst, where = min(found)
        if worst * tests < ALPHA:
            raise Broken(f"{when}{where} (p = {worst * tests:.1g})")
        visible = (norm.isf(ALPHA / tests / 2) + norm.isf(0.1)) / np.sqrt(largest)
        if not known:
            return f"{len(found)} frequencies, of which the largest {visible:.1%} off"
        tilt = max(contrast.visible(ALPHA / tests) for contrast in known.values())
        return (
            f"{len(found)} frequencies, of which the largest {visible:.1%} off, or a node drawn from q^{1 + tilt:.3f}"
        )


def _two_sided(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Poisson tails, which are no lighter than those of a sum of coins."""
    expected = np.maximum(expected, 0)
    return np.minimum(1, 2 * np.minimum(poisson.cdf(observed, expected), poisson.sf(observed - 1, expected)))
