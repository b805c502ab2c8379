"""Writes the folder: tiny models, rounds decoded with them, a page, and a program that checks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from scipy import special

from eagle3_jax import loop as loops
from eagle3_jax.acceptance import Exact, verification_uniforms
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters import NGram
from eagle3_jax.files.writing import whole_directory
from eagle3_jax.load import load_drafter, load_target
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
from eagle3_jax.oracle.models import VOCAB_SIZE, write_models
from eagle3_jax.processors.logits import (
    LogitBias,
    LogitsProcessor,
    MinP,
    Penalty,
    TokenAutomaton,
    with_processors,
)
from eagle3_jax.sampling import probabilities
from eagle3_jax.topology import Chain, DynamicTree, StaticTree, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, TargetOutput, Verdict, Verifier
from eagle3_jax.verifiers.block import BlockVerification
from eagle3_jax.verifiers.typical import TypicalAcceptance

_ROUNDS = 4
_LONGEST = 40  # tokens of a text with a draft
_PROMPTS = (
    [20, 21, 22, 23, 24, 20],
    [3, 4, 5],
    [52, 53, 54, 55, 56, 57, 58, 52, 53, 54],
    [23, 24, 25, 26, 27, 28, 23, 24],
)
_CHAIN = Chain(4)
_DYNAMIC = DynamicTree(num_nodes=12, max_depth=4, top_k=3)
_SIBLINGS = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
_TYPICAL = TypicalAcceptance()
_RULES: dict[type, str] = {Exact: "token", BlockVerification: "block", TypicalAcceptance: "typical"}
# The state is the residue of the last token. A token of the same residue is forbidden.
_RESIDUE = np.arange(VOCAB_SIZE) % 3
_NO_REPETITION = np.where(np.arange(3)[:, None] == _RESIDUE, -1, _RESIDUE).astype(np.int32)
_ALL_ALLOWED = np.zeros_like(_NO_REPETITION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of a case; by default nothing changes the logits.

    Attributes:
        describes: What it covers, in words.
        head: The folder of its drafter in ``models/``; ``ngram`` has none.
        shape: The shape of its drafts.
        sampled: Whether draft tokens are sampled, so that there is a ``q``.
        verifier: The acceptance rule.
        temperature: One value per row, as the next two.
        top_k: Number of tokens to keep; 0 keeps all.
        top_p: Mass to keep.
        min_p: Smallest probability at temperature 1, as a share of the largest.
        presence: Subtracted from the logits of tokens of the output.
        frequency: Subtracted for each occurrence in the output.
        repetition: Divides or multiplies the logits of tokens of prompt and output.
        bias: Added to the logit of each token.
        automaton: ``[S V]``, the state after each token, -1 if it is forbidden.
        features: Whether the features that the head read are written.
    """

    describes: str
    head: str = "draft_model"
    shape: Topology = _CHAIN
    sampled: bool = True
    verifier: Verifier = Exact()
    temperature: Sequence[float] = (1.0,) * 4
    top_k: Sequence[int] = (0,) * 4
    top_p: Sequence[float] = (1.0,) * 4
    min_p: float = 1e-30
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    automaton: np.ndarray = dataclasses.field(default_factory=lambda: _ALL_ALLOWED)
    features: bool = False

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """Returns the changes of the logits, in their order."""
        return (
            TokenAutomaton(self.automaton, columns=np.arange(VOCAB_SIZE)),
            LogitBias(self.bias),
            Penalty(repetition=self.repetition, prompt=True),
            Penalty(presence=self.presence, frequency=self.frequency),
            MinP(self.min_p),
        )

    def settings(self) -> dict[str, np.ndarray]:
        """Returns the settings as arrays."""
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "presence",
            "frequency",
            "repetition",
            "automaton",
        )
        arrays = {name: jnp.asarray(getattr(self, name)) for name in names}  # in 32 bits
        return jax.device_get({**arrays, "bias": LogitBias(self.bias).arrays(VOCAB_SIZE)})

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters of the rows."""
        return SamplingParams(
            temperature=np.array(self.temperature, np.float32),
            top_k=np.array(self.top_k, np.int32),
            top_p=np.array(self.top_p, np.float32),
        )


def _greedy(head: str, shape: Topology = _CHAIN) -> Case:
    return Case(
        describes=f"greedy, {head}",
        head=head,
        shape=shape,
        sampled=False,
        temperature=(0.0,) * 4,
        features=head != "ngram",
    )


_WARM = (0.7, 1.0, 1.3, 2.0)
CASES: dict[str, Case] = {
    "eagle3_greedy": _greedy("eagle3"),
    "eagle1_greedy_tree": _greedy("eagle1", _DYNAMIC),
    "medusa_greedy": _greedy("medusa"),
    "mtp_greedy": _greedy("mtp"),
    "p_eagle_greedy": _greedy("p-eagle"),
    "dflash_sampled": Case(
        describes="dflash, sampled", head="dflash", temperature=(8.0,) * 4, features=True
    ),
    "eagle3_sampled": Case(
        describes="eagle3, sampled", head="eagle3", temperature=_WARM, features=True
    ),
    "ngram_greedy": _greedy("ngram"),
    "temperature": Case(
        describes="four temperatures, one of them 0", temperature=(0.0, 0.6, 1.0, 1.5)
    ),
    "top_k": Case(describes="top-k 1, 3, 10 and off", top_k=(1, 3, 10, 0), temperature=_WARM),
    "top_p": Case(
        describes="top-p 0.2, 0.7, 0.95 and off", top_p=(0.2, 0.7, 0.95, 1.0), temperature=_WARM
    ),
    "top_k_top_p": Case(
        describes="top-k, then top-p", top_k=(5, 20, 0, 8), top_p=(0.8, 0.9, 0.6, 1.0)
    ),
    "min_p": Case(describes="min-p", min_p=0.1),
    "penalties": Case(
        describes="presence and frequency of the output", presence=0.8, frequency=0.7
    ),
    "repetition": Case(describes="repetition of prompt and output", repetition=1.7),
    "bias": Case(
        describes="biases, and a banned token", bias={1: 2.5, 7: -1.5, 12: 3.0, 54: -math.inf}
    ),
    "grammar": Case(describes="a grammar mask at each node", automaton=_NO_REPETITION),
    "all_settings": Case(
        describes="all settings together",
        automaton=_NO_REPETITION,
        bias={1: 2.5, 54: -math.inf},
        repetition=1.3,
        presence=0.4,
        frequency=0.3,
        min_p=0.01,
        top_k=(0, 30, 0, 12),
        top_p=(1.0, 1.0, 0.9, 0.95),
    ),
    "point_masses": Case(
        describes="likeliest drafts, one row greedy",
        sampled=False,
        temperature=(0.0, 0.7, 1.0, 2.0),
    ),
    "point_masses_tree": Case(
        describes="likeliest drafts in a tree",
        head="eagle1",
        sampled=False,
        shape=_DYNAMIC,
        temperature=_WARM,
    ),
    "siblings": Case(
        describes="siblings sampled without replacement",
        head="eagle1",
        shape=_SIBLINGS,
        temperature=_WARM,
    ),
    "block": Case(describes="block verification", verifier=BlockVerification(), temperature=_WARM),
    "typical": Case(
        describes="typical acceptance",
        head="eagle1",
        verifier=_TYPICAL,
        shape=_DYNAMIC,
        sampled=False,
    ),
}


def write_oracle(out: Path, say: Callable[[str], Any] = lambda step: None) -> None:
    """Writes the folder. Two calls write the same bytes.

    Args:
        out: A directory that does not exist yet.
        say: Is told the current step.

    Raises:
        eagle3_jax.files.writing.WriteError: The directory exists, or cannot be written.
    """
    with whole_directory(out) as folder:
        say("models")
        models = folder / "models"
        models.mkdir()
        write_models(models)
        target = load_target(models / "target")

        (folder / "cases").mkdir()
        for name, case in CASES.items():
            say(name)
            drafter = LoadedDrafter(NGram())
            if case.head != "ngram":
                drafter = load_drafter(models / case.head, target=target)
            np.savez_compressed(folder / "cases" / f"{name}.npz", **_arrays(case, target, drafter))

        for name in ("README.md", "check.py"):
            shutil.copy(Path(__file__).parent / name, folder / name)


# Rounds


class _Recorded(Verdict, kw_only=True):
    """A verdict with what decided it: the uniforms, and the target's changed distributions."""

    accept: Float[Array, "B N"]
    choose: Float[Array, "B U"]
    p: Float[Array, "B N V"]


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """Returns the verdicts of a rule as :class:`_Recorded`."""

    rule: Verifier

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def chains_only(self) -> bool:
        return getattr(self.rule, "chains_only", False)

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        keys: Key[Array, " B"],
        *,
        sampling_mode: SamplingMode,
        max_depth: int,
    ) -> Verdict:
        verdict = self.rule(
            draft, logits, sampling, keys, sampling_mode=sampling_mode, max_depth=max_depth
        )
        # The rule takes the same uniforms from the same keys.
        accept, choose = verification_uniforms(keys, *logits.shape[1:])
        has_distribution = jnp.max(logits, axis=-1, keepdims=True) > -jnp.inf
        p = jnp.where(has_distribution, probabilities(logits, sampling), 0.0)
        return _Recorded(**vars(verdict), accept=accept, choose=choose, p=p)


def _arrays(case: Case, target: LoadedTarget, drafter: LoadedDrafter) -> dict[str, Any]:
    """Decodes the rounds of a case and returns its arrays."""
    rounds = _decode(case, target, drafter)
    arrays = {name: np.stack([latest[name] for latest in rounds]) for name in rounds[0]}
    prompt_length = np.array([len(prompt) for prompt in _PROMPTS], np.int32)
    arrays["prompt_length"] = prompt_length
    # Texts only grow, so the last one holds all; lengths tell what each round knew.
    arrays["text"] = arrays["text"][-1, :, : arrays["length"].max()]
    arrays["length"] = np.concatenate([prompt_length[None] + 1, arrays["length"]])
    arrays["cache_length"] = np.concatenate([prompt_length[None], arrays["cache_length"]])

    # Forward passes over whole texts, which share no cache and no mask with what decided.
    arrays["logits"] = _plain_logits(target, arrays)
    arrays["logprobs"] = _log_probabilities(arrays)
    if case.features:
        arrays["features"] = _plain_features(target, drafter.drafter.aux_layers, arrays["text"])
    arrays |= case.settings()

    about = {
        "describes": case.describes,
        "head": case.head,
        "rule": _RULES[type(case.verifier)],
        "arrays": sorted(arrays),
    }
    if case.verifier is _TYPICAL:
        about |= {"epsilon": _TYPICAL.epsilon, "delta": _TYPICAL.delta}
    return {"about": np.array(json.dumps(about)), **arrays}


def _decode(
    case: Case, target: LoadedTarget, drafter: LoadedDrafter
) -> list[dict[str, np.ndarray]]:
    """Returns the arrays of each round."""
    shape: dict[str, Any] = {"tree": case.shape}
    if isinstance(case.shape, Chain):
        shape = {"num_speculative_tokens": case.shape.num_speculative_tokens}
    draft_sampling = "probabilistic" if case.sampled else "greedy"
    decoder = SpeculativeDecoder(
        with_processors(target, *case.processors()),
        drafter,
        draft_sampling=None if case.head == "ngram" else draft_sampling,
        verifier=_Recorder(case.verifier),
        stop_tokens=(),
        **shape,
    )

    most = 2 + _ROUNDS * (1 + case.shape.max_depth)
    # Cases with and without top-k share a program.
    mode = SamplingMode.TRUNCATED if any(case.temperature) else SamplingMode.GREEDY
    loop = dataclasses.replace(decoder.loop, sampling_mode=mode)
    state = decoder.prefill(
        _PROMPTS, max_new_tokens=most, sampling=case.sampling(), sampling_mode=mode
    )

    rounds = []
    for _ in range(_ROUNDS):
        latest = loops.step(loop, decoder.params, state)
        state = latest.state
        draft = latest.draft
        verdict = vars(latest.verdict)
        arrays = {"tokens": draft.tokens, "parents": draft.parents, "valid": draft.valid, **verdict}
        arrays |= {"text": state.tokens, "length": state.length, "cache_length": state.cache.length}
        arrays["choose"] = verdict["choose"][:, 0]  # one uniform samples one of 64 tokens
        if draft.probs is not None:
            arrays["q"] = draft.probs.at[:, 0].set(0.0)
        rounds.append(jax.device_get(arrays))
    return rounds


def _plain_logits(target: LoadedTarget, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the logits after each node, by a pass over its text without a cache or a tree."""
    tokens = arrays["tokens"]
    texts = np.zeros((*tokens.shape, _LONGEST), np.int32)
    last = np.zeros(tokens.shape, np.int32)
    for index in np.ndindex(tokens.shape):
        *row, node = index
        path = []
        while node > 0:
            path.append(tokens[*row, node])
            node = arrays["parents"][*row, node]
        known = arrays["length"][*row]
        texts[index][:known] = arrays["text"][row[1], :known]
        texts[index][known : known + len(path)] = path[::-1]
        last[index] = known + len(path) - 1

    flat = texts.reshape(-1, _LONGEST)
    output = _forward(target.model, target.params, flat)
    final = np.asarray(output.final)[np.arange(len(flat)), last.ravel()]
    logits = target.model.unembed(target.params, jnp.asarray(final))
    return np.asarray(logits).reshape(*tokens.shape, -1)


def _plain_features(
    target: LoadedTarget, aux_layers: tuple[int, ...], text: np.ndarray
) -> np.ndarray:
    padded = np.zeros((len(text), _LONGEST), np.int32)
    padded[:, : text.shape[1]] = text
    features = _forward(target.model, target.params, padded, aux_layers).features
    return np.asarray(features)[:, : text.shape[1]]


@functools.partial(jax.jit, static_argnames=("model", "aux_layers"))
def _forward(
    model: Any, params: Any, tokens: Int[Array, "B T"], aux_layers: tuple[int, ...] = ()
) -> TargetOutput:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return model(params, tokens, positions, causal_mask(tokens.shape[1]), aux_layers=aux_layers)


def _log_probabilities(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the log-probabilities of the tokens of each round, 0 after the last."""
    scores = special.log_softmax(arrays["logits"].astype(np.float64), axis=-1)
    path = arrays["path"]
    out = np.zeros((*path.shape[:2], path.shape[2] + 1), np.float32)
    for row in np.ndindex(path.shape[:2]):
        accepted = path[row][: arrays["num_accepted"][row]]
        emitted = [*arrays["tokens"][row][accepted], arrays["next_token"][row]]
        for index, (node, token) in enumerate(zip([0, *accepted], emitted, strict=True)):
            out[row][index] = scores[*row, node, token]
    return out
