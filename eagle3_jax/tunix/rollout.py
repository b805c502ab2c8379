"""The rollout engine: answers of a policy in training, drafted and verified.

Decoding is a function of parameters, so a new policy is a new argument of the same programs: there
is nothing to synchronise, and nothing is compiled again.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from tunix.generate.tokenizer_adapter import TokenizerAdapter  # type: ignore[import-not-found]
from tunix.rl import common  # type: ignore[import-not-found]
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput  # type: ignore[import-not-found]

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.devices.sharding import DATA, MODEL, param_shardings
from eagle3_jax.drafters.fallback import Fallback
from eagle3_jax.drafters.ngram import NGram
from eagle3_jax.engine.refill import complete
from eagle3_jax.files.sources import LOOKUP_FIRST, is_named
from eagle3_jax.load import load_drafter, named_drafter
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import PRECISIONS, stored_type
from eagle3_jax.prompts.request import Request
from eagle3_jax.results import Generation
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.text.tokens import without_stop_token
from eagle3_jax.training.refresh import HeadRefresh, RefreshConfig
from eagle3_jax.tree import causal_mask
from eagle3_jax.tunix.policies import flat, table_of
from eagle3_jax.types import Drafter, DraftSampling

# Tokens of the text on which both forwards are compared.
_PROBE = 16
# Largest difference of their log-probabilities.
_TOLERANCE = {jnp.dtype("float32"): 1e-3, jnp.dtype("bfloat16"): 0.3}

#: A name or a directory, a drafter, or a function that makes one for the policy.
DrafterLike = str | Drafter[Any] | LoadedDrafter | Callable[[LoadedTarget], LoadedDrafter] | None


class SpeculativeRollout(BaseRollout):
    """Tunix's rollouts with drafts: the same distribution in fewer steps of the model.

    Example::

        engine = functools.partial(SpeculativeRollout, drafter="ngram")
        config = rl_cluster.ClusterConfig(rollout_engine=engine, ...)

    The engine has its own copy of the policy, in the layout of its programs. It follows the policy
    by itself: before it decodes, it maps parameters that have changed, and compares its
    log-probabilities of a short text with those of Tunix's model.

    Attributes:
        decoder: Policy and drafter.
        last: The answers of the latest call, with the log-probabilities of their tokens under the
            model and under the distribution that they were sampled from.
        num_updates: Number of policies after the first.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: RolloutConfig | None = None,
        *,
        drafter: DrafterLike = "ngram",
        num_speculative_tokens: int | None = None,
        schedule: SpeculationSchedule | None = None,
        draft_sampling: DraftSampling | str | None = None,
        slots: int | None = None,
        refresh: RefreshConfig | None = None,
        lora_alpha: float | None = None,
        keep_end: bool = True,
        seed: int = 0,
    ):
        """Takes the policy over. Tunix gives the first four arguments.

        Args:
            rollout_actor: The policy: a Llama 3, Qwen 2, Qwen 3 or Gemma 3 of Tunix's.
            tokenizer: Its tokenizer, with a pad and an end token.
            mesh: Tunix's mesh: its first axis divides rows, its second axis the model.
            rollout_config: Its ``data_type`` is that of the rollouts. Default: the policy's.
            drafter: ``"ngram"``, ``"suffix"``, ``"none"``, the directory of a head or of a draft
                model, ``"ngram+DIRECTORY"``; a drafter; or a function of the policy that loads one.
            num_speculative_tokens: Length ``K`` of a draft.
            schedule: Lengths by the number of running rows, such as drafts only for the last rows
                of a batch.
            draft_sampling: How a head or a draft model chooses its tokens. Default: by sampling,
                because samples of a policy accept sampled drafts more often.
            slots: Rows that are decoded at once. Default: all prompts of a call.
            refresh: Steps of the head's objective between those of the policy. Default: none, the
                head is frozen.
            lora_alpha: ``alpha`` of the policy's low-rank updates, which are merged.
            keep_end: Whether an answer has the token that ended it, as in Tunix's engine for vLLM:
                a policy learns to end only from answers that have it. Tunix's vanilla engine cuts
                it off.
            seed: Random seed of calls whose configuration has none; each call has other numbers.

        Raises:
            ValueError: The policy's family has no table, the tokenizer has no pad or end token, or
                the mesh does not divide the policy.
        """
        self._model = rollout_actor
        self._tokenizer = _checked_tokenizer(tokenizer)
        self._table = table_of(rollout_actor, lora_alpha)
        state = _arrays(rollout_actor)
        self._table.check(list(state))
        self._precision = _precision(state, rollout_config)
        self._target = DecoderTarget(self._table.config, self._precision)
        self._mesh = _our_mesh(mesh)
        self._to_ours = self._compiled_table(state)
        # Tunix's configurations cannot be hashed, so the graph is not a static argument.
        graphdef = nnx.graphdef(rollout_actor)
        self._their_logprobs = jax.jit(functools.partial(_logprobs_of, graphdef))
        self._slots = slots
        self._keep_end = keep_end
        self._seed = seed
        self._num_calls = 0
        self._sources: list[weakref.ref[jax.Array]] = []
        self.last: list[Generation] = []
        self.num_updates = 0

        policy = LoadedTarget(
            model=self._target,
            params=self._mapped(),
            vocab_size=self._table.config.vocab_size,
            max_positions=self._table.config.max_positions,
            name="the policy",
            mesh=self._mesh,
        )
        loaded = _loaded(drafter, policy)
        self.decoder = SpeculativeDecoder(
            policy,
            loaded,
            num_speculative_tokens=num_speculative_tokens,
            schedule=schedule,
            draft_sampling=draft_sampling or _default_sampling(loaded),
        )
        self._refresh = None if refresh is None else HeadRefresh(self.decoder, refresh)

    # What Tunix calls

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Answers every prompt; equal prompts in a row are run once.

        Args:
            prompts: Texts.
            rollout_config: Lengths, sampling, seed and end tokens. A temperature of 0 is greedy.
                ``logprobs`` of the result are those of the distribution that was sampled from.
            kwargs: Nothing is known.

        Raises:
            ValueError: An option is not known or out of range, a prompt is longer than
                ``max_prompt_length``, or the policy has a parameter that is not finite.
        """
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} were given to generate; no option is known")
        self._follow()
        longest = rollout_config.max_prompt_length
        tokens = [self._encode(prompt) for prompt in prompts]
        for number, row in enumerate(tokens):
            if len(row) > longest:
                raise ValueError(
                    f"prompt {number} has {len(row)} tokens; max_prompt_length is {longest}, so"
                    " shorten the prompt or raise the limit"
                )

        requests = self._requests(tokens, rollout_config)
        room = longest + rollout_config.max_tokens_to_generate
        decoder = copy.copy(self.decoder)
        decoder.stop_tokens = tuple(rollout_config.eos_tokens or [self.eos_id()])
        answers = dict(
            complete(
                decoder,
                requests,
                slots=self._num_rows(len(requests)),
                logprobs=0,
                sampling_logprobs=True,
                share_prompts=True,
                capacity=room + decoder.loop.drafter.num_nodes,
            )
        )
        self.last = [answers[number] for number in range(len(requests))]

        pad = self.pad_id()
        padded = np.full((len(tokens), longest), pad, np.int32)
        for row, prompt in zip(padded, tokens, strict=True):
            row[longest - len(prompt) :] = prompt
        written = [without_stop_token(row.tokens, row.finish_reason) for row in self.last]
        rows = [row.tokens for row in self.last] if self._keep_end else written
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [
                np.array([token.sampled for token in row.logprobs or []][: len(tokens)], np.float32)
                for row, tokens in zip(self.last, rows, strict=True)
            ]
        return RolloutOutput(
            text=[self._tokenizer.decode(tokens) for tokens in written],
            logits=[],
            tokens=[np.array(tokens, np.int32) for tokens in rows],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Returns the log-probabilities of completions by Tunix's own forward, as in training.

        Args:
            prompt_tokens: ``[B P]``, padded on the left.
            completion_tokens: ``[B T]``, padded on the right.
        """
        graphdef, state = nnx.split(self._model)
        return common.compute_per_token_logps(
            graphdef,
            state,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes new parameters over; the next call of :meth:`generate` decodes with them.

        Args:
            params: A state of the policy, or the part of it that has changed.
            filter_types: The types of that part, such as ``(nnx.LoRAParam,)``.
        """
        if filter_types is not None:
            before = nnx.state(self._model, filter_types)
            params = jax.tree.map(
                lambda new, old: jax.device_put(new, old.sharding), params, before
            )
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """The id that fills prompts on the left."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id that ends an answer."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """The policy, as a model of Tunix's."""
        return self._model

    @property
    def stats(self) -> SpeculationStats:
        """Counters of the latest call."""
        return SpeculationStats.merge(answer.stats for answer in self.last)

    # Parameters

    def _compiled_table(self, state: dict[str, jax.Array]) -> Callable[..., Any]:
        """Returns the compiled map of parameters, onto the mesh if there is one."""

        def to_ours(state: dict[str, jax.Array]) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: leaf.astype(stored_type(path, leaf.ndim, self._precision)),
                self._table.to_ours(state),
            )

        shapes = jax.eval_shape(to_ours, state)
        if self._mesh is None:
            return jax.jit(to_ours)
        return jax.jit(to_ours, out_shardings=param_shardings(self._mesh, self._target, shapes))

    def _mapped(self) -> Any:
        """Returns the parameters of the policy in our layout, checked.

        Raises:
            ValueError: One of them is not finite, or our forward is not that of Tunix's model.
        """
        state = _arrays(self._model)
        for name, is_finite in jax.device_get(_finite(state)).items():
            if not is_finite:
                raise ValueError(
                    f"the policy's parameter {name} has a value that is not finite; the training"
                    " has diverged, so go back to an earlier step"
                )
        params = self._to_ours(state)
        self._check(params)
        # Not the arrays themselves, which would keep the old policy in memory.
        self._sources = [weakref.ref(array) for array in state.values()]
        return params

    def _follow(self) -> None:
        """Decodes with the policy as it is now, if it has changed."""
        arrays = _arrays(self._model).values()
        if all(seen() is array for seen, array in zip(self._sources, arrays, strict=True)):
            return
        self.decoder = self.decoder.with_params(self._mapped())
        self.num_updates += 1
        refresh = self._refresh
        if refresh is not None and self.last and self.num_updates % refresh.config.every == 0:
            self.decoder = refresh.step(self.decoder, self.last)

    def _check(self, params: Any) -> None:
        """Raises unless our forward and Tunix's give the same log-probabilities of a text.

        Raises:
            ValueError: They differ by more than rounding.
        """
        vocab_size = self._table.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocab_size, (1, _PROBE), np.int32)
        theirs = self._their_logprobs(nnx.state(self._model), tokens)
        ours = _our_logprobs(self._target, params, tokens)
        # Tokens that a model almost excludes differ by more, and are never sampled.
        likely = np.asarray(theirs) > np.log(1e-4)
        difference = float(np.max(np.abs(np.asarray(ours) - np.asarray(theirs))[likely]))
        tolerance = _TOLERANCE[jnp.dtype(self._precision.operands)]
        if not difference <= tolerance:
            raise ValueError(
                f"log-probabilities of a text differ by {difference:.2g} between Tunix's"
                f" {type(self._model).__name__} and its translation; expected at most {tolerance:g}"
                " (with low-rank updates: is lora_alpha theirs?)"
            )

    # Requests

    def _num_rows(self, num_requests: int) -> int:
        """Returns the rows that are decoded at once, a number that the mesh divides."""
        rows = min(self._slots or num_requests, num_requests)
        parts = 1 if self._mesh is None else self._mesh.shape[DATA]
        return -(-rows // parts) * parts

    def _encode(self, prompt: str) -> list[int]:
        """Returns the token ids of a prompt, with one begin token if the tokenizer has it."""
        begin = self._tokenizer.bos_id()
        ids = list(self._tokenizer.encode(prompt))
        return list(self._tokenizer.dedup_bos_ids(([begin] if begin else []) + ids))

    def _requests(self, tokens: Sequence[list[int]], config: RolloutConfig) -> list[Request]:
        """Returns a request for each prompt, with a seed of its own."""
        seed: Sequence[int] = (self._seed, self._num_calls)
        if config.seed is not None:
            words = jax.random.key_data(config.seed) if _is_key(config.seed) else config.seed
            seed = [int(word) for word in np.ravel(words)]
        self._num_calls += 1
        seeds = np.random.SeedSequence(seed).generate_state(len(tokens))
        return [
            Request(
                row,
                config.max_tokens_to_generate,
                temperature=float(config.temperature),
                top_k=max(config.top_k or 0, 0),
                top_p=1.0 if config.top_p is None else float(config.top_p),
                seed=int(row_seed),
            )
            for row, row_seed in zip(tokens, seeds, strict=True)
        ]


def _checked_tokenizer(tokenizer: Any) -> TokenizerAdapter:
    """Returns the tokenizer behind Tunix's interface.

    Raises:
        ValueError: It has no pad or end token.
    """
    if not isinstance(tokenizer, TokenizerAdapter):
        tokenizer = TokenizerAdapter(tokenizer)
    for name in ("pad", "eos"):
        token = getattr(tokenizer, f"{name}_id")()
        if token is None or token < 0:
            raise ValueError(
                f"the tokenizer has no {name} token; expected one, so set {name}_token"
            )
    return tokenizer


def _arrays(model: nnx.Module) -> dict[str, jax.Array]:
    """Returns the parameters of one of Tunix's models by path, low-rank updates included."""
    return flat(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def _precision(state: dict[str, jax.Array], config: RolloutConfig | None) -> Any:
    """Returns the precision of the rollouts.

    Raises:
        ValueError: It is neither float32 nor bfloat16.
    """
    dtype = None if config is None else config.data_type
    dtype = jnp.dtype(state["embedder.input_embedding"].dtype if dtype is None else dtype)
    if dtype not in _TOLERANCE:
        raise ValueError(f"the rollouts are to be in {dtype}; expected float32 or bfloat16")
    return PRECISIONS[dtype.name]


def _our_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns a mesh of the same devices in the same order; ``None`` for one device.

    Raises:
        ValueError: Tunix's mesh divides more than rows and the model.
    """
    if mesh is None or mesh.size == 1:
        return None
    sizes = (*mesh.devices.shape, 1)
    if any(size > 1 for size in sizes[2:]):
        raise ValueError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} of {mesh.devices.shape}; expected"
            " at most two above 1, the first for rows and the second for the model"
        )
    return Mesh(mesh.devices.reshape(sizes[:2]), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def _loaded(drafter: DrafterLike, policy: LoadedTarget) -> LoadedDrafter | Drafter[Any] | None:
    """Returns the drafter for a policy."""
    if drafter is None or (isinstance(drafter, str) and is_named(drafter)):
        return named_drafter(drafter or "none", policy)
    if isinstance(drafter, str):
        loaded = load_drafter(drafter.removeprefix(LOOKUP_FIRST), target=policy)
        return Fallback.of(NGram(), loaded) if drafter.startswith(LOOKUP_FIRST) else loaded
    if isinstance(drafter, LoadedDrafter | Drafter):
        return drafter
    return drafter(policy)


def _default_sampling(loaded: LoadedDrafter | Drafter[Any] | None) -> DraftSampling | None:
    """Returns that drafts are sampled, of a drafter that can do so."""
    drafter = loaded.drafter if isinstance(loaded, LoadedDrafter) else loaded
    return DraftSampling.PROBABILISTIC if hasattr(drafter, "draft_sampling") else None


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


@jax.jit
def _finite(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns of every array whether it is finite throughout."""
    return jax.tree.map(lambda array: jnp.all(jnp.isfinite(array)), state)


def _logprobs_of(graphdef: Any, state: Any, tokens: jax.Array) -> jax.Array:
    positions, mask = _positions_and_mask(tokens)
    logits, _ = nnx.merge(graphdef, state)(tokens, positions, None, mask)
    return jax.nn.log_softmax(logits.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("target",))
def _our_logprobs(target: DecoderTarget, params: Any, tokens: jax.Array) -> jax.Array:
    positions, mask = _positions_and_mask(tokens)
    output = target(params, tokens, positions, mask)
    return jax.nn.log_softmax(target.unembed(params, output.final).astype(jnp.float32))


def _positions_and_mask(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    length = tokens.shape[1]
    return jnp.arange(length, dtype=jnp.int32)[None], causal_mask(length)
