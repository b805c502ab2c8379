"""The contract of an acceptance rule, run on somebody's own: :func:`check_verifier`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection

import jax.numpy as jnp
import numpy as np

from eagle3_jax.boundary import require_verifier
from eagle3_jax.contract.frequencies import Law, chi_square
from eagle3_jax.contract.proposals import ROOT, ROWS, VOCABULARY, Decided, Shape, VerifierSubject
from eagle3_jax.contract.report import ALPHA, PROTOCOL, Broken, ContractReport, NotRun, Skipped, class_name, examine
from eagle3_jax.types import Verifier


def check_verifier(
    verifier: Verifier, *, checks: Collection[str] | None = None, samples: int = 32768, seed: int = 0
) -> ContractReport:
    """Run an acceptance rule of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_verifier(MyRule()))`` shows the report. Drafts are chains and trees over five
    tokens, three levels deep and verified with a ``max_depth`` of four, of likeliest tokens and of drawn ones; chains
    alone for a rule that says ``chains_only``. A rule
    that says ``lossless=True`` must emit the target's distribution, to which the statistical check holds what the
    published rules must give; it fails a rule that is right once in a million. That of a rule that says
    ``lossless=False`` is measured, not judged.

    Args:
        verifier: An instance.
        checks: Which of :data:`VERIFIER_CHECKS`; all when left out.
        samples: Drafts of each shape for the statistical check.
        seed: Of everything random.

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
        if (token < 0).any() or (token >= VOCABULARY).any():
            raise Broken(f"its next token is id {token[(token < 0) | (token >= VOCABULARY)][0]} of {VOCABULARY} tokens")
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
    """A row's verdict does not depend on its neighbours' drafts."""
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
    return ""


def is_greedy_at_temperature_zero(subject: VerifierSubject) -> str:
    """Rows of temperature 0 write the likeliest token after every token, in greedy batches and in mixed ones."""
    best, wrong, total, where = subject.logits.argmax(-1), 0, 0, ""
    for shape, greedy in _everything(subject):
        decided = subject.decide(shape, greedy=greedy, temperature=0.0)
        for row in range(ROWS):
            before = ROOT
            for token in decided.emitted(row):
                if token != best[before]:
                    where = where or f"after id {before} it writes {token} where {best[before]} is the likeliest"
                    wrong += 1
                before, total = token, total + 1
    if not subject.verifier.lossless:
        raise Skipped(f"not judged, for it says lossless=False; {1 - wrong / total:.1%} were the likeliest")
    if wrong:
        raise Broken(f"{wrong} of {total} tokens are not the likeliest: {where}")
    return f"{total} tokens"


def leaves_the_law_alone(subject: VerifierSubject) -> str:
    """Over many keys, the first token and those after accepted ones are as frequent as the target has them."""
    drafts = len(subject.shapes) * _runs(subject) * ROWS
    worst, visible, accepted = 0.0, 0.0, 0
    for name, shape in subject.shapes.items():
        first, later, of_draft = _written(subject, shape)
        accepted += of_draft
        for setting, starts, pairs in zip(shape.settings, first, later, strict=True):
            wanted = subject.wanted(setting)
            seen = np.array([starts[token,] for token in range(VOCABULARY)]) / starts.total()
            worst = max(worst, float(np.abs(seen - wanted[ROOT]).sum() / 2))
            if not subject.verifier.lossless:
                continue
            for counts, law, what in (
                (starts, {(token,): mass for token, mass in _possible(wanted[ROOT])}, "the first token"),
                (pairs, _law_of_pairs(pairs, wanted), "a token after an accepted one"),
            ):
                found = chi_square(counts, law, alpha=ALPHA) if counts else None
                if found is not None and found.p_value < ALPHA:
                    raise Broken(
                        f"with {name} at temperature {setting[0]}, top-k {setting[1]}, top-p {setting[2]} {what} does "
                        f"not follow the target: {found.why} (p = {found.p_value:.1g})"
                    )
                visible = max(visible, found.visible if found is not None else 0.0)
    if not subject.verifier.lossless:
        raise Skipped(
            f"not judged, for it says lossless=False; first tokens lie {worst:.3f} (total variation) from the target's"
        )
    if not accepted:
        raise NotRun("the law is right, but no draft token was accepted, so refusals alone were compared")
    return (
        f"{drafts} drafts, {accepted / drafts:.2f} tokens accepted of each; a deviation of {visible:.1%} (rms over "
        "tokens) would have shown nine times in ten"
    )


def _runs(subject: VerifierSubject) -> int:
    return max(1, subject.samples // ROWS)


def _written(subject: VerifierSubject, shape: Shape) -> tuple[list[Counter], list[Counter], int]:
    """For each setting first tokens, and pairs of an accepted token and the one after it; how many were accepted."""
    first, later, accepted = [Counter() for _ in shape.settings], [Counter() for _ in shape.settings], 0
    for run in range(_runs(subject)):
        decided = subject.decide(shape, run=run)
        accepted += int(decided.num_accepted.sum())
        for row in range(ROWS):
            tokens, setting = decided.emitted(row), row % len(shape.settings)
            first[setting][tokens[0],] += 1
            later[setting].update(itertools.pairwise(tokens))
    return first, later, accepted


def _law_of_pairs(pairs: Counter, wanted: np.ndarray) -> Law:
    """What the second token of a pair should be, the first ones being as frequent as they are."""
    before = Counter()
    for (token, _), count in pairs.items():
        before[token] += count
    return {
        (token, after): count / pairs.total() * mass
        for token, count in before.items()
        for after, mass in _possible(wanted[token])
    }


def _possible(masses: np.ndarray) -> list[tuple[int, float]]:
    return [(token, float(mass)) for token, mass in enumerate(masses) if mass > 0]


VERIFIER_CHECKS: dict[str, Callable[[VerifierSubject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": gives_verdicts,
    "accepts a path of the draft": accepts_a_path,
    "stays in the vocabulary": stays_in_the_vocabulary,
    "decides from its arguments alone": decides_from_its_arguments,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "temperature 0 is greedy": is_greedy_at_temperature_zero,
    "what it emits has the target's law": leaves_the_law_alone,
}


def _everything(subject: VerifierSubject) -> list[tuple[Shape, bool]]:
    """Every shape in a sampled batch, and in a greedy one those that differ there, where distributions are left out."""
    shapes = subject.shapes.values()
    return [(shape, greedy) for greedy in (False, True) for shape in shapes if not (greedy and shape.drawn)]


def _differing(one: Decided, other: Decided) -> list[int]:
    """Rows with another verdict."""
    same = (one.path == other.path).all(-1) & (one.num_accepted == other.num_accepted)
    return np.flatnonzero(~(same & (one.next_token == other.next_token))).tolist()
