"""A pool of requests for the rows of one running batch. A row that ends is given to the next request."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax import loop as loops
from eagle3_jax.checks import check_mode, sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder, padded_prompt
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.state import GenerationState
from eagle3_jax.types import FinishReason, SamplingMode, SamplingParams

# Prompts that are prefilled together. On CPUs a row of a larger group costs no less, and each size is compiled.
_LARGEST_GROUP = 8


@dataclasses.dataclass(frozen=True)
class PoolRequest:
    """One prompt, its limit and its sampling."""

    tokens: list[int]  #: Token ids of the prompt.
    max_new_tokens: int  #: Maximum number of new tokens.
    temperature: float = 0.0  #: 0 is greedy.
    top_k: int = 0  #: Number of most likely tokens to keep; 0 keeps all.
    top_p: float = 1.0  #: Mass of the smallest set of most likely tokens to keep.
    seed: int = 0  #: Random seed, 0 to 2^32 - 1.


class Pool:
    """Decodes requests in a fixed number of rows.

    The tokens of a request are those that ``decoder.generate`` returns for it, regardless of the other rows. (With a
    schedule this holds for greedy requests.)

    Example::

        pool = Pool(decoder, slots=8, capacity=512)
        pool.submit(PoolRequest(prompt, max_new_tokens=64))
        while not pool.idle:
            for ticket, tokens in pool.tick():
                print(ticket, tokens)
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        slots: int,
        capacity: int,
        sampling_mode: SamplingMode = SamplingMode.TRUNCATED,
    ):
        """Makes an empty pool; nothing is compiled yet.

        Args:
            decoder: Target, drafter, stop tokens, and the rounds between two reads by the host.
            slots: ``B``, rows of the batch.
            capacity: Tokens per row: prompt, new tokens and one draft (``num_nodes``, 1 without a drafter).
            sampling_mode: The work that requests may need. Without top-k and top-p, ``TEMPERATURE`` saves their sort.

        Raises:
            ValueError: There is no slot, or the decoder has a mesh.
        """
        if slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        if decoder.mesh is not None:
            raise ValueError("the decoder has a mesh, and a pool runs on one device; leave the mesh out")
        self._decoder = decoder
        self._loop = dataclasses.replace(decoder.loop, sampling_mode=sampling_mode)
        self._slots = slots
        self._most = min(capacity - decoder.loop.drafter.num_nodes, decoder.target.max_positions)
        self._capacity = padded_prompt(capacity)
        self._waiting: collections.deque[tuple[int, PoolRequest]] = collections.deque()
        self._running: dict[int, tuple[int, PoolRequest]] = {}  # by slot
        self._num_submitted = 0
        self._state: GenerationState | None = None

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._running

    @property
    def free(self) -> int:
        """Number of slots that the waiting requests leave free."""
        return max(0, self._slots - len(self._running) - len(self._waiting))

    def submit(self, request: PoolRequest) -> int:
        """Adds a request. It begins at the next :meth:`tick` that finds a free slot for it.

        Returns:
            The ticket of the request: the number of requests before it.

        Raises:
            ValueError: The target does not accept the prompt, the prompt and its limit are longer than a row, or the
                sampling needs another mode.
        """
        length = len(self._decoder.encode(request.tokens))
        if length + request.max_new_tokens > self._most:
            raise ValueError(
                f"the prompt has {length} tokens and is given {request.max_new_tokens} more, and a row of the pool "
                f"holds {self._most}; shorten one of them or build the pool with a larger capacity"
            )
        params = SamplingParams(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
        check_mode(self._loop.sampling_mode, sampling_mode_of(params))
        ticket = self._num_submitted
        self._num_submitted += 1
        self._waiting.append((ticket, request))
        return ticket

    def tick(self) -> list[tuple[int, list[int]]]:
        """Gives free slots to waiting requests, runs ``rounds_per_check`` rounds and returns what has ended.

        Returns:
            For each request that ended, its ticket and its new tokens, stop token included.

        Raises:
            ValueError: A sampling parameter, seed or limit of a waiting request is out of range.
        """
        while self._waiting and len(self._running) < self._slots:
            self._begin_group()
        state = self._state
        if state is None or not self._running:
            return []
        for _ in range(self._loop.rounds_per_check):
            state = loops.step(self._loop.at(state), self._decoder.params, state).state
        self._state = state
        length, finish = to_host((state.length, state.finish))
        ended = [slot for slot in self._running if finish[slot] != FinishReason.RUNNING]
        if not ended:
            return []
        tokens = to_host(state.tokens)
        results = []
        for slot in ended:
            ticket, request = self._running.pop(slot)
            results.append((ticket, tokens[slot, len(request.tokens) : length[slot]].tolist()))
        return results

    def _begin_group(self) -> None:
        """Prefills the first waiting request, together with others of its padded length, and inserts them."""
        size = padded_prompt(len(self._waiting[0][1].tokens))
        same_size = [entry for entry in self._waiting if padded_prompt(len(entry[1].tokens)) == size]
        free = [slot for slot in range(self._slots) if slot not in self._running]
        most = min(len(same_size), len(free), _LARGEST_GROUP)
        count = 1 << (most.bit_length() - 1)  # a power of two, so that few programs are compiled
        group = same_size[:count]
        slots = free[:count]
        requests = [request for _, request in group]
        sampling = SamplingParams(
            temperature=np.array([request.temperature for request in requests]),
            top_k=np.array([request.top_k for request in requests]),
            top_p=np.array([request.top_p for request in requests]),
        )
        prompts = [request.tokens for request in requests]
        rows = self._decoder.prefill(
            prompts,
            max_new_tokens=[request.max_new_tokens for request in requests],
            sampling=sampling,
            seed=[request.seed for request in requests],
            capacity=self._capacity,
            sampling_mode=self._loop.sampling_mode,
        )
        if self._state is None:
            self._state = _ended_copies(rows, self._slots)
        self._state = _insert(self._state, rows, jnp.asarray(slots, jnp.int32))
        self._waiting = collections.deque(entry for entry in self._waiting if entry not in group)
        self._running.update(zip(slots, group, strict=True))


@functools.partial(jax.jit, static_argnames=("count",))
def _ended_copies(rows: GenerationState, count: int) -> GenerationState:
    """Returns ``count`` rows that have ended. They are copies of the first of ``rows``, so every leaf is valid."""
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros((count,), jnp.int32)], rows)
    return copies.replace(finish=jnp.full((count,), int(FinishReason.LENGTH), jnp.int32))


@functools.partial(jax.jit, donate_argnames=("state",))
def _insert(state: GenerationState, rows: GenerationState, slots: Int[Array, " R"]) -> GenerationState:
    """Returns the state with ``rows`` in place of its rows ``slots``. It consumes ``state``."""
    return jax.tree.map(lambda live, new: live.at[slots].set(new), state, rows)
