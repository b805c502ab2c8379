"""The decoder that users call: prompts in, text and statistics out.

The output is exactly the target's.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import loop as loops
from eagle3_jax.acceptance import Exact
from eagle3_jax.checks import (
    check_mode,
    check_part,
    checked_sampling,
    configured,
    declares_chain,
    is_whole,
    sampling_mode_of,
)
from eagle3_jax.devices.sharding import as_mesh, param_shardings, place, place_rows, to_host, under
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget, Prompt, shape_of
from eagle3_jax.loop import GenerationState, LoopParams, Outcome, Prompts, Round, SpeculativeLoop
from eagle3_jax.results import Chunk, Generation, GenerationResult
from eagle3_jax.sampling import row_keys
from eagle3_jax.schedule import SpeculationSchedule, StagedLoop, stages_of
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.text.stops import StoppedText
from eagle3_jax.text.tokens import Pieces, without_stop_token
from eagle3_jax.topology import Chain, DynamicTree, StaticTree
from eagle3_jax.types import (
    Drafter,
    DraftSampling,
    FinishReason,
    SamplingMode,
    SamplingParams,
    TargetModel,
    Verifier,
)
from eagle3_jax.verifiers.simulated import SimulatedAcceptance

# Caches and prompts are padded to multiples of this, so most prompts share one compilation. Shorter
# prompts are padded to a power of two, because on CPUs a prefill costs in proportion to its tokens.
_BUCKET = 128
# Caches of one row that are larger than this are padded to multiples of it.
_COARSE = 512
_SHORTEST_PROMPT = 16


class SpeculativeDecoder:
    """Decodes with a target and a drafter.

    The output is the target's own, whatever the drafter proposes. A drafter that returns ``probs``
    must have sampled its tokens from them (``docs/drafters.md``).

    Example::

        target = e3.load_target()
        drafter = e3.load_drafter(target=target)
        decoder = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=5)
        print(decoder.generate("def fibonacci(n):", max_new_tokens=64).texts[0])
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | Drafter[Any] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        tree: DynamicTree | StaticTree | None = None,
        schedule: SpeculationSchedule | None = None,
        draft_sampling: DraftSampling | str | None = None,
        stop_tokens: Sequence[int] | None = None,
        verifier: Verifier | None = None,
        rounds_per_check: int = 1,
        mesh: Mesh | None = None,
        invariant: bool = False,
    ):
        """Puts a decoder together; nothing is compiled yet.

        Args:
            target: A target from ``load_target``.
            drafter: A drafter from ``load_drafter``, or one without parameters, or ``None`` for
                plain decoding.
            num_speculative_tokens: Length ``K`` of a chain. Default: 5, on CPUs 3 (Medusa: one
                token per head; DFlash: the block). The decoder is built before it sees a batch, so
                this is the length for one row; on CPUs shorter chains pay off for batches above 2
                (``eagle3_jax.topology.default_draft_length``).
            tree: A tree to draft instead of a chain.
            schedule: Chain lengths by the number of active rows.
            draft_sampling: How the tokens of a chain or a static tree are chosen: ``"greedy"`` or
                ``"probabilistic"``. Default: the drafter's own setting.
            stop_tokens: Ids that end a row. Default: the target's.
            verifier: The acceptance rule. Default: the exact one. With a rule that is not exact,
                results say ``lossless=False``.
            rounds_per_check: See :class:`eagle3_jax.loop.SpeculativeLoop`.
            mesh: A mesh from ``make_mesh``: its ``data`` axis divides rows, its ``model`` axis both
                models. Default: the target's.
            invariant: Whether the target's bits for a token depend on nothing but the tokens before
                it: greedy texts are then equal with every drafter and without, alone and in a
                batch, also in bfloat16. It needs chains and dense layers of grouped-query
                attention, on a CPU or, in bfloat16, on an NVIDIA GPU.

        Raises:
            ValueError: The drafter cannot draft this shape, or cannot sample; options of a draft
                are given without a drafter; a part was not loaded or misses a member; or the mesh
                does not divide the models.
        """
        _check_loaded(target, drafter)
        shapes = {
            "num_speculative_tokens": num_speculative_tokens,
            "tree": tree,
            "schedule": schedule,
        }
        draft_options = {**shapes, "draft_sampling": draft_sampling}
        option = next((name for name, value in draft_options.items() if value is not None), None)
        if drafter is None and option is not None:
            raise ValueError(
                f"{option} was given without a drafter; give one, such as"
                f" load_drafter(target=target) or drafters.NGram(), or leave {option} out for plain"
                " decoding"
            )
        if sum(shape is not None for shape in shapes.values()) > 1:
            raise ValueError(
                "more than one of num_speculative_tokens, tree and schedule was given; a draft is a"
                " chain, a tree, or a chain by schedule"
            )

        drafter = Plain() if drafter is None else drafter
        loaded = drafter if isinstance(drafter, LoadedDrafter) else LoadedDrafter(drafter)
        check_part(target.model, "target")
        length = num_speculative_tokens if schedule is None else schedule.max_length
        topology = Chain(length) if length is not None else tree
        configured_drafter = configured(loaded.drafter, topology, draft_sampling)
        _check_size(configured_drafter, target)

        params = LoopParams(target=target.params, drafter=loaded.params)
        self._borrowed = _borrowed(params)
        mesh = target.mesh if mesh is None else as_mesh(mesh)
        if invariant:
            target = _invariant(target, configured_drafter, mesh)
        self.mesh = mesh
        self.target = dataclasses.replace(target, mesh=mesh)
        self.drafter = loaded
        self._set_params(_placed(params, target.model, configured_drafter, mesh))
        self.stop_tokens = target.stop_tokens if stop_tokens is None else tuple(stop_tokens)
        for token in self.stop_tokens:
            target.check_token(token, "stop token")

        parts = {
            "target": target.model,
            "drafter": configured_drafter,
            "verifier": Exact() if verifier is None else verifier,
            "rounds_per_check": rounds_per_check,
        }
        if schedule is not None:
            stages = stages_of(configured_drafter, schedule)
            self.loop = StagedLoop(**parts, stages=stages)
        else:
            self.loop = SpeculativeLoop(**parts)

        self._compiled: set[Any] = set()
        # Sampling parameters and mode of the latest step.
        self._last = (None, SamplingMode.GREEDY)

    def with_params(self, target: Any, drafter: Any = None) -> SpeculativeDecoder:
        """Returns a decoder with other arrays, such as those of a policy after a step of training.

        Its programs are the same. Nothing of the old target is left in it: what the drafter
        borrows, such as the embedding, is that of the new one.

        Args:
            target: Parameters of the target, with the structure, shapes and types of those before.
            drafter: Parameters of the drafter. Default: those before.

        Raises:
            ValueError: A parameter is missing or has another shape or type; the message names it.
        """
        before = self.params
        after = LoopParams(target, before.drafter if drafter is None else drafter)
        _check_same_form(after, before)

        arrays = dict(jax.tree_util.tree_leaves_with_path(target))
        new_drafter = jax.tree_util.tree_map_with_path(
            lambda path, leaf: arrays[self._borrowed[path]] if path in self._borrowed else leaf,
            after.drafter,
        )
        params = LoopParams(target, new_drafter)
        decoder = copy.copy(self)
        decoder._set_params(_placed(params, self.loop.target, self.loop.drafter, self.mesh))
        return decoder

    def _set_params(self, params: LoopParams) -> None:
        self.params = params
        self.target = dataclasses.replace(self.target, params=params.target)
        self.drafter = dataclasses.replace(self.drafter, params=params.drafter)

    @property
    def method(self) -> str:
        """The drafter, the shape of its draft and its draft sampling, in one line."""
        loaded = self.drafter
        sampling = getattr(self.loop.drafter, "draft_sampling", None)
        if isinstance(loaded.drafter, Plain):
            return "none"
        shape = shape_of(self.loop.drafter)
        sampling_words = "" if sampling is None else f", {sampling.value} draft sampling"
        return f"{loaded.described}, {shape}{sampling_words}"

    @property
    def invariant(self) -> bool:
        """Whether the target's bits for a token depend on nothing but the tokens before it."""
        return bool(getattr(getattr(self.target.model, "precision", None), "invariant", False))

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule keeps the target's distribution exactly, as it declares."""
        return self.loop.verifier.lossless

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: int | Sequence[int] = 0,
        logprobs: int | None = None,
        stop: str | Sequence[str] | Sequence[Sequence[str]] = (),
    ) -> GenerationResult:
        """Completes a batch of prompts. The whole generation is one compiled program.

        Args:
            prompts: Texts or token ids, of any lengths, or one of them. An array ``[B T]`` of token
                ids is a batch of its rows.
            max_new_tokens: Maximum number of new tokens: one for all prompts, or one per prompt.
            sampling: Scalars for all rows or ``[B]`` arrays. Default: greedy.
            seed: Random seed, 0 to 2^32 - 1, or one per prompt: a prompt with a seed of its own has
                the same output in every batch. Two calls with the same seed share their random
                numbers. Row ``b`` does not depend on the other rows, unless a ``schedule`` chooses
                the draft length by the active rows.
            logprobs: ``L``: return the log-probability of every new token and of the ``L``
                likeliest ones, under the target at temperature 1. Default: none are computed.
            stop: Texts that end a row, or a list of texts per prompt. A row's text ends before the
                first of them, its tokens with the token that completes it. The host reads every
                round, so this is slower than ``stop_tokens``.

        Raises:
            ValueError: A prompt, limit or sampling parameter is out of range.
        """
        prompts = _as_batch(prompts)
        stops = _checked_stop(stop, len(prompts), self.target)
        loop, batch, rows = self.batch(prompts, max_new_tokens, sampling, seed, logprobs)

        if any(stops):
            return self._generate_until(stops, loop, batch, rows)
        start = time.perf_counter()
        outcome = self._call(loops.generate, loop, batch)
        outcome = to_host(jax.block_until_ready(outcome))
        seconds = time.perf_counter() - start
        return self.result(outcome, rows, seconds=seconds)

    def result(
        self, state: GenerationState | Outcome, prompts: Sequence[Sequence[int]], *, seconds: float
    ) -> GenerationResult:
        """Converts a state to the result that every way of decoding returns.

        Args:
            state: The state after the last round.
            prompts: Token ids of the prompts.
            seconds: Wall time of the generation.
        """
        fields = (state.tokens, state.length, state.finish, state.stats, state.logprobs)
        all_tokens, length, finish, counters, scores = to_host(fields)

        rows = []
        for index, prompt in enumerate(prompts):
            start = len(prompt)
            end = int(length[index])
            tokens = all_tokens[index, start:end].tolist()
            reason = FinishReason(int(finish[index]))
            stats = jax.tree.map(lambda leaf, index=index: leaf[index], counters)
            scored = None if scores is None else scores.row(index, start, end)
            text = self.text_of(tokens, reason)
            rows.append(Generation(list(prompt), tokens, text, reason, stats, scored))

        return GenerationResult(rows, seconds, lossless=self.lossless)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        seed: int | Sequence[int] = 0,
        logprobs: int | None = None,
    ) -> Iterator[Chunk]:
        """Completes one prompt round by round.

        Each round is the step that :meth:`generate` compiles into its loop, and the arguments are
        those of :meth:`generate`. The pieces of all chunks, joined, are its text.
        """
        text = Pieces(self.target.tokenizer)
        loop, batch, rows = self.batch([prompt], max_new_tokens, sampling, seed, logprobs)
        self._compile(loop, batch)
        state = self._call(loops.prefill, loop, batch)
        streamed = len(rows[0])
        accepted = 0

        while True:
            fields = (state.length, state.finish, state.stats, state.tokens, state.logprobs)
            length, finish, counters, tokens, scores = to_host(fields)
            end = int(length[0])
            new = tokens[0, streamed:end].tolist()
            scored = None if scores is None else scores.row(0, streamed, end)
            streamed = end

            reason = FinishReason(int(finish[0]))
            pieces = text.decode(new, reason)
            stats = SpeculationStats.merge([counters])
            yield Chunk(new, pieces, min(accepted, len(new)), reason, stats, scored)

            if reason is not FinishReason.RUNNING:
                return
            latest = self._step(loop, state)
            state = latest.state
            accepted = int(to_host(latest.verdict.num_accepted)[0])

    def rounds(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: int | Sequence[int] = 0,
        logprobs: int | None = None,
    ) -> Iterator[Round]:
        """Yields every round of a batch until all rows have finished.

        The arguments are those of :meth:`generate`. The next round consumes the state of this one,
        so read it first.
        """
        loop, batch, _ = self.batch(prompts, max_new_tokens, sampling, seed, logprobs)
        state = self._call(loops.prefill, loop, batch)
        while np.any(to_host(state.finish) == FinishReason.RUNNING):
            latest = self._step(loop, state)
            state = latest.state
            yield latest

    def prefill(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: int | Sequence[int] = 0,
        logprobs: int | None = None,
        capacity: int | None = None,
        sampling_mode: SamplingMode | None = None,
    ) -> GenerationState:
        """Returns the state after the prompts and the first token, for :meth:`step`.

        The other arguments are those of :meth:`generate`. Rows that join a batch later need their
        own seed. See ``docs/extending.md``. ``capacity`` is the number of slots per row (default:
        what these prompts and limits need), ``sampling_mode`` the way the first tokens are chosen
        (default: the least work that ``sampling`` needs).

        Raises:
            ValueError: An argument is out of range, ``capacity`` is too small, or ``sampling_mode``
                does less than ``sampling`` needs.
        """
        loop, batch, _ = self.batch(prompts, max_new_tokens, sampling, seed, logprobs)
        if sampling_mode is not None:
            check_mode(sampling_mode, loop.sampling_mode)
            loop = dataclasses.replace(loop, sampling_mode=sampling_mode)

        longest = int(np.max(batch.limit))
        needed = max(longest + self.loop.drafter.num_nodes, batch.tokens.shape[1])
        if capacity is not None and capacity < needed:
            raise ValueError(
                f"capacity is {capacity}; expected at least {needed} for these prompts and limits"
            )
        return self._call(loops.prefill, loop, batch, capacity)

    def step(self, state: GenerationState) -> Round:
        """Runs one compiled round. It consumes ``state`` and updates its caches in place.

        With a schedule the host reads the number of active rows and calls the program of that
        stage. It is compiled when a batch of this size first reaches the stage.

        Args:
            state: The state from :meth:`prefill` or from the last round. Its ``sampling`` may be
                replaced, also by scalars.

        Raises:
            ValueError: The state was consumed before, or a sampling parameter is out of range.
        """
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if any(array.is_deleted() for array in arrays):
            raise ValueError(
                "this state was consumed by the step before, which updated its caches in place; "
                "go on with the state that it returned, as in `state = decoder.step(state).state`"
            )

        batch = state.finish.shape[0]
        is_per_row = all(np.shape(value) == (batch,) for value in jax.tree.leaves(state.sampling))
        if not isinstance(state.sampling, SamplingParams) or not is_per_row:
            sampling = checked_sampling(state.sampling, batch)
            state = state.replace(sampling=place_rows(sampling, self.mesh))

        # The parameters of the latest step need no read from the device.
        last_sampling, sampling_mode = self._last
        if state.sampling is not last_sampling:
            sampling_mode = sampling_mode_of(to_host(state.sampling))

        loop = dataclasses.replace(self.loop, sampling_mode=sampling_mode)
        latest = self._step(loop, state)
        self._last = (latest.state.sampling, sampling_mode)
        return latest

    def _call(
        self,
        program: Callable[..., Any],
        loop: SpeculativeLoop,
        batch: Prompts,
        capacity: int | None = None,
    ) -> Any:
        """Calls a compiled program that takes prompts.

        The default capacity is what the prompts and their limits need.
        """
        if capacity is None:
            capacity = self._capacity_for(batch)
        with under(self.mesh):
            return program(loop, self.params, place_rows(batch, self.mesh), capacity=capacity)

    def _capacity_for(self, batch: Prompts) -> int:
        """Returns the number of slots per row that the prompts and their limits need."""
        longest = max(int(np.max(batch.limit)), batch.tokens.shape[1])
        # Room for a whole draft after the last root, so that no node is lost at the end of the
        # buffer.
        needed = longest + self.loop.drafter.num_nodes
        # A conversation has one row, and each of its turns would need new programs.
        is_coarse = needed > _COARSE and batch.tokens.shape[0] == 1
        return _round_up(needed, _COARSE if is_coarse else _BUCKET)

    def _compile(self, loop: SpeculativeLoop, batch: Prompts) -> None:
        """Compiles the prefill and the round of a batch side by side on a CPU.

        Their first calls find the programs. On a GPU each is compiled when it is called: the
        compiler measures kernels there, and two measurements would disturb each other. A loop with
        stages chooses its round later.
        """
        capacity = self._capacity_for(batch)
        shapes = (loop, batch.tokens.shape, batch.logprobs, capacity)
        if shapes in self._compiled or isinstance(loop, StagedLoop):
            return
        if jax.default_backend() != "cpu":
            return

        with under(self.mesh), concurrent.futures.ThreadPoolExecutor() as threads:
            prompts = place_rows(batch, self.mesh)
            prefill = loops.prefill.trace(loop, self.params, prompts, capacity=capacity)
            step = loops.step.lower(loop, self.params, prefill.out_info)
            programs = [prefill.lower(), step]
            for program in [threads.submit(lowered.compile) for lowered in programs]:
                program.result()
        self._compiled.add(shapes)

    def _step(self, loop: SpeculativeLoop, state: GenerationState) -> Round:
        """Runs one compiled round."""
        with under(self.mesh):
            return loops.step(loop.at(state), self.params, state)

    def batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | None,
        seed: int | Sequence[int],
        logprobs: int | None,
    ) -> tuple[SpeculativeLoop, Prompts, list[list[int]]]:
        """Returns the loop for this sampling, the batch on the device, and the prompts' token ids.

        The arguments are those of :meth:`generate`; all are checked. For callers that call the
        functions of :mod:`eagle3_jax.loop`.
        """
        rows = [self.target.encode(prompt) for prompt in _as_batch(prompts)]
        if not rows:
            raise ValueError("no prompts were given; give at least one")

        count = len(rows)
        most = self.target.max_positions
        budgets = _checked_budgets(max_new_tokens, count)
        _check_logprobs(logprobs, self.target, self.loop.verifier)
        sampling = checked_sampling(SamplingParams() if sampling is None else sampling, count)

        lengths = np.array([len(row) for row in rows], np.int32)
        # A limit beyond the last position has no effect, and may not fit into 32 bits.
        bounded_budgets = np.array([min(budget, most) for budget in budgets], np.int32)
        lengths_at_limit = lengths + bounded_budgets
        limit = np.minimum(lengths_at_limit, most).astype(np.int32)
        self._check_drafter_holds(int(limit.max()))

        padded_length = min(padded_prompt(int(lengths.max())), most)
        tokens = np.zeros((count, padded_length), np.int32)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row

        limit_reason = np.where(
            lengths_at_limit > limit, FinishReason.CAPACITY, FinishReason.LENGTH
        )
        stop_tokens = np.tile(np.array(self.stop_tokens, np.int32), (count, 1))
        batch = Prompts(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(lengths),
            limit=jnp.asarray(limit),
            limit_reason=jnp.asarray(limit_reason.astype(np.int32)),
            stop_tokens=jnp.asarray(stop_tokens),
            sampling=sampling,
            keys=row_keys(seed, count),
            logprobs=logprobs,
        )

        loop = dataclasses.replace(self.loop, sampling_mode=sampling_mode_of(sampling))
        return loop, batch, rows

    def _check_drafter_holds(self, longest: int) -> None:
        """Raises if a sequence of ``longest`` tokens is longer than the drafter was built for."""
        drafter = self.loop.drafter
        most = getattr(drafter, "max_positions", None)
        if most is not None and longest > most:
            raise ValueError(
                f"sequences of up to {longest} tokens were asked for, and {type(drafter).__name__}"
                f" was built for {most} positions; lower max_new_tokens, shorten the prompt or"
                " choose another drafter"
            )

    def _generate_until(
        self, stops: list[list[str]], loop: SpeculativeLoop, batch: Prompts, rows: list[list[int]]
    ) -> GenerationResult:
        """Generates round by round, until each row has a text that contains one of its ``stops``.

        The host reads every round, and ends such rows.
        """
        begin = time.perf_counter()
        state = self._call(loops.prefill, loop, batch)
        texts = [StoppedText(self.target.tokenizer, of_row) for of_row in stops]
        read = [len(row) for row in rows]
        while True:
            fields = to_host((state.tokens, state.length, state.finish))
            tokens, length, finish = map(np.array, fields)

            has_changed = False
            for index, text in enumerate(texts):
                new = tokens[index, read[index] : length[index]].tolist()
                pieces = text.add(new, FinishReason(int(finish[index])))
                if text.stop is not None and new:
                    # The answer ends with the token that completes the stop text.
                    length[index] = read[index] + len(pieces)
                    finish[index] = FinishReason.STOP
                    has_changed = True
                read[index] = int(length[index])
            if has_changed:
                changed = {"length": jnp.asarray(length), "finish": jnp.asarray(finish)}
                state = state.replace(**place_rows(changed, self.mesh))

            if not np.any(finish == FinishReason.RUNNING):
                break
            state = self._step(loop, state).state

        seconds = time.perf_counter() - begin
        result = self.result(state, rows, seconds=seconds)
        generations = [
            generation if text.stop is None else dataclasses.replace(generation, text=text.text)
            for generation, text in zip(result.rows, texts, strict=True)
        ]
        return dataclasses.replace(result, rows=generations)

    def text_of(self, tokens: list[int], reason: FinishReason = FinishReason.LENGTH) -> str | None:
        """Returns the text of new tokens without the stop token that ended them.

        It is ``None`` without a tokenizer.
        """
        if self.target.tokenizer is None:
            return None
        return self.target.tokenizer.decode(without_stop_token(tokens, reason))


def _checked_stop(
    stop: str | Sequence[str] | Sequence[Sequence[str]], count: int, target: LoadedTarget
) -> list[list[str]]:
    """Returns the texts that end each of ``count`` rows."""
    entries: list[Any] = [stop] if isinstance(stop, str) else list(stop)
    are_lists = [isinstance(entry, Sequence) and not isinstance(entry, str) for entry in entries]
    is_per_row = bool(entries) and all(are_lists)
    stops = [list(entry) for entry in entries] if is_per_row else [entries] * count

    if len(stops) != count:
        raise ValueError(f"{len(stops)} lists of stop texts for {count} prompts; give one each")
    for text in itertools.chain(*stops):
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop contains {text!r}; expected texts of at least one character")

    if any(stops) and target.tokenizer is None:
        raise ValueError(f"stop was given, but {target.name} has no tokenizer; use stop_tokens")
    return stops


def _checked_budgets(max_new_tokens: Any, count: int) -> list[int]:
    """Returns the number of new tokens of each of ``count`` rows."""
    budgets = [max_new_tokens] * count if np.ndim(max_new_tokens) == 0 else list(max_new_tokens)
    if len(budgets) != count:
        raise ValueError(
            f"{len(budgets)} values of max_new_tokens for {count} prompts; give one each"
        )
    for budget in budgets:
        if not is_whole(budget, 1):
            raise ValueError(f"max_new_tokens is {budget!r}; expected a whole number of at least 1")
    return budgets


def _check_logprobs(count: int | None, target: LoadedTarget, verifier: Verifier) -> None:
    """Raises if ``count`` is not a number of tokens, or their probabilities would mean nothing."""
    if count is None:
        return
    if not is_whole(count, 0) or count > target.vocab_size:
        raise ValueError(
            f"logprobs is {count!r}; expected a whole number from 0 to {target.vocab_size}, or None"
        )
    if isinstance(verifier, SimulatedAcceptance):
        raise ValueError(
            "logprobs were asked of SimulatedAcceptance, whose output is not a text of the target"
        )


def _check_size(drafter: Drafter[Any], target: LoadedTarget) -> None:
    """Raises if the draft is longer than any sequence of the target, before it is compiled."""
    most = target.max_positions
    if drafter.max_depth >= most:
        raise ValueError(
            f"a draft of {drafter.max_depth} tokens in a row does not fit {target.name}, which has"
            f" {most} positions; lower num_speculative_tokens or max_depth to at most {most - 1}"
        )
    if drafter.num_nodes > most:
        raise ValueError(
            f"a tree of num_nodes={drafter.num_nodes} does not fit {target.name}, which has {most}"
            f" positions; lower num_nodes to at most {most}"
        )


def _borrowed(params: LoopParams) -> dict[Any, Any]:
    """Returns the paths of the arrays that the drafter shares with the target, in both."""
    target = jax.tree_util.tree_leaves_with_path(params.target)
    paths = {id(leaf): path for path, leaf in target}
    drafter = jax.tree_util.tree_leaves_with_path(params.drafter)
    return {path: paths[id(leaf)] for path, leaf in drafter if id(leaf) in paths}


def _placed(
    params: LoopParams, model: TargetModel, drafter: Drafter[Any], mesh: Mesh | None
) -> LoopParams:
    """Returns the parameters on a mesh, if there is one."""
    if mesh is None:
        return params
    target_shardings = param_shardings(mesh, model, params.target)
    drafter_shardings = param_shardings(mesh, drafter, params.drafter)
    return place(params, LoopParams(target_shardings, drafter_shardings))


def _check_same_form(params: LoopParams, expected: LoopParams) -> None:
    """Raises unless both have the same parameters, each of the same shape and type."""
    for part, new, old in zip(LoopParams._fields, params, expected, strict=True):
        arrays = dict(jax.tree_util.tree_leaves_with_path(new))
        for path, leaf in jax.tree_util.tree_leaves_with_path(old):
            name = part + jax.tree_util.keystr(path)
            if path not in arrays:
                raise ValueError(f"{name} is missing; expected the parameters of the same model")
            form = _form(arrays.pop(path))
            if form != _form(leaf):
                raise ValueError(f"{name} is {form}; expected {_form(leaf)}, as before")
        for path in arrays:
            name = part + jax.tree_util.keystr(path)
            raise ValueError(f"{name} was not there before; expected the parameters of one model")


def _form(array: Any) -> str:
    return f"{jnp.result_type(array)}{list(jnp.shape(array))}"


def _invariant(target: LoadedTarget, drafter: Drafter[Any], mesh: Mesh | None) -> LoadedTarget:
    """Returns the target with a model whose bits depend on the text alone.

    Raises:
        ValueError: The model has no such form, or not for these drafts, weights or devices.
    """
    make = getattr(target.model, "invariant", None)
    if make is None:
        raise ValueError(
            f"invariant was given for {type(target.model).__name__}, which has no method"
            " invariant()"
        )

    if not declares_chain(drafter):
        raise ValueError(
            f"invariant was given for {type(drafter).__name__} with a tree, whose paths are summed"
            " in another order; draft a chain (num_speculative_tokens), or leave invariant out"
        )
    if mesh is not None:
        raise ValueError(
            "invariant was given for a mesh, which divides sums; use one device, or leave"
            " invariant out"
        )

    return dataclasses.replace(target, model=make(target.weights))


def _check_loaded(target: Any, drafter: Any) -> None:
    """Raises if a part is the name of a model, or a model without its arrays.

    The message says how to load it.
    """
    if isinstance(drafter, str):
        raise ValueError(
            f"drafter is {drafter!r}; expected a drafter: load_drafter({drafter!r}, target=target)"
            " reads one"
        )

    if not isinstance(target, LoadedTarget):
        described = type(target).__name__
        loader = "load_target, or LoadedTarget(model, params, ...),"
        if isinstance(target, str):
            described = repr(target)
            loader = f"load_target({target!r})"
        raise ValueError(f"target is {described}; expected a LoadedTarget: {loader} gives one")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns a list of prompts; the rows of an array ``[B T]`` are prompts."""
    if isinstance(prompts, np.ndarray | jax.Array):
        if prompts.ndim not in (1, 2):
            raise ValueError(
                f"prompts is an array of shape {prompts.shape}; expected [T], the token ids of one"
                " prompt, or [B, T]"
            )
        prompts = to_host(prompts).tolist()

    if not isinstance(prompts, Sequence):
        raise ValueError(
            f"prompts is {prompts!r:.40}; expected a text, token ids, or a list of such prompts"
        )

    are_token_ids = len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    is_single = isinstance(prompts, str) or are_token_ids
    return [prompts] if is_single else prompts  # type: ignore[list-item,return-value]


def padded_prompt(size: int) -> int:
    """Returns the length that prompts of up to ``size`` tokens are padded to.

    A target with fewer positions bounds it.
    """
    if size > _BUCKET // 2:
        return _round_up(size)
    power_of_two = 1 << (size - 1).bit_length()
    return max(_SHORTEST_PROMPT, power_of_two)


def _round_up(size: int, multiple: int = _BUCKET) -> int:
    return -(-size // multiple) * multiple
