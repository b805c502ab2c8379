"""Conversations that a chat model writes by itself, as training text for its draft head.

The model continues its chat template from the beginning of a user's turn, and writes the turn. Then
it continues the conversation from the beginning of the answer, and writes the answer (Magpie, arXiv
2406.08464). Nothing is downloaded.

Tokens are sampled by temperature alone. Top-k and top-p sort the vocabulary. On a CPU that takes
longer than the rest of a round: 32 rows of SmolLM2-135M take 325 ms without it and 760 ms with it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from eagle3_jax.decode import LoadedTarget, SpeculativeDecoder
from eagle3_jax.engine.engine import Engine, ended
from eagle3_jax.prompts.request import Request
from eagle3_jax.training.texts import Text, document_hash
from eagle3_jax.types import SamplingMode

_SENTINEL = "The text of the user"
# Tokens.
_SHORTEST_TURN = 4
# An answer loops if its last tokens have few distinct runs of four tokens; 64 tokens have up to 61.
_LOOP_TOKENS = 64
_LOOP_RUN = 4
_FEWEST_RUNS = 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTextConfig:
    """Lengths and sampling of the text.

    Raises:
        ValueError: A value is out of range.
    """

    length: int = 352  #: Maximum number of tokens of a conversation.
    user_length: int = 96  #: Maximum number of tokens of a user's turn; a longer one is dropped.
    slots: int = 32  #: Number of rows that are decoded at once.
    user_temperature: float = 0.9  #: Temperature of users' turns.
    temperature: float = 0.7  #: Temperature of the sampled answers.
    greedy_share: float = 0.5  #: Share of the answers that are decoded greedily.
    seed: int = 0  #: Random seed, 0 or more.
    #: Beginnings of users' turns. Half of the turns get one of them at random, and the model goes
    #: on.
    openings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("user_length", self.user_length >= _SHORTEST_TURN, f"at least {_SHORTEST_TURN}"),
            ("user_temperature", 0 < self.user_temperature < math.inf, "more than 0, and finite"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more, and finite"),
            ("greedy_share", 0 <= self.greedy_share <= 1, "0 to 1"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {expected}")


def around_user(target: LoadedTarget) -> tuple[list[int], int]:
    """Returns the token ids before a user's text, and the token that ends this text.

    Args:
        target: A target with a chat template and a tokenizer.

    Raises:
        ValueError: The target lacks one of them, or the template does not contain the user's text.
    """
    messages = [{"role": "user", "content": _SENTINEL}]
    # Raises if the target lacks a tokenizer or a template.
    target.apply_chat_template(messages)
    assert target.chat_template is not None and target.tokenizer is not None
    before, _, after = target.chat_template.render(messages).partition(_SENTINEL)
    if not before or not after or _SENTINEL in after:
        raise ValueError(
            f"the chat template of {target.name} does not write a user's text once, unchanged, with"
            " something before and after it, so the model cannot write this text; use"
            " conversations from a file"
        )

    prefix, suffix = target.tokenizer.encode_batch([before, after], add_special_tokens=False)
    end = suffix.ids[0]
    if end not in target.stop_tokens and end not in target.tokenizer.get_added_tokens_decoder():
        raise ValueError(
            f"the chat template of {target.name} ends a user's text by {suffix.tokens[0]!r}, which"
            " is not a special token, so the model cannot tell where its text ends; use"
            " conversations from a file"
        )
    return prefix.ids, end


class _Plan(NamedTuple):
    """The random choices of one conversation."""

    opening: list[int]  #: Token ids that begin the user's turn.
    user_seed: int
    temperature: float  #: Temperature of the answer.
    answer_seed: int


class Conversations:
    """Conversations that a target writes: an iterable of :class:`Text`.

    They come in the order in which they end. A text has the token ids of ``apply_chat_template``
    for the user's turn and then those of the answer, stop token included. The answer is learnt. The
    document is the user's turn.

    Conversation ``i`` depends on ``i`` and the seed only, so parts of a larger set can be written
    in any order. Only whether a turn is a duplicate depends on the other conversations of the same
    part.

    Example::

        texts = Conversations(target, OwnTextConfig(), 1000)
        for text in texts:
            ...
        print(texts.dropped)

    Attributes:
        dropped: Number of conversations that were dropped so far, by reason. ``too long``: the
            user's turn did not end within ``user_length`` tokens, or left no room for an answer.
            ``too short``: the turn has fewer than 4 tokens, or no text. ``duplicate``: another
            conversation has the same turn. ``loop``: the answer repeats itself at its end.
    """

    def __init__(self, target: LoadedTarget, config: OwnTextConfig, count: int, *, first: int = 0):
        """Prepares the conversations; nothing is compiled yet.

        Args:
            target: A target with a chat template and a tokenizer.
            config: Lengths and sampling.
            count: Number of conversations to try.
            first: Number of the first of them.

        Raises:
            ValueError: The target cannot write a user's turn (:func:`around_user`), a conversation
                does not fit into ``length`` or the target, or an opening is as long as a whole
                turn.
        """
        if count < 0 or first < 0:
            raise ValueError(
                f"{count} conversations from number {first} were asked for; expected 0 or more of"
                " both"
            )
        self.dropped: collections.Counter[str] = collections.Counter()
        self._target = target
        self._config = config
        self._numbers = range(first, first + count)

        self._prefix, end = around_user(target)
        self._stop_tokens = (*target.stop_tokens, end)
        assert target.tokenizer is not None
        self._tokenizer = target.tokenizer

        self._openings = [
            self._tokenizer.encode(text, add_special_tokens=False).ids for text in config.openings
        ]
        for text, opening in zip(config.openings, self._openings, strict=True):
            if len(opening) >= config.user_length:
                raise ValueError(
                    f"the opening {text!r:.60} has {len(opening)} tokens; expected fewer than the"
                    f" {config.user_length} of user_length"
                )

        needed = len(self._prefix) + config.user_length + 1
        if config.length < needed:
            raise ValueError(
                f"length is {config.length}; expected at least {needed} for a user's turn in the"
                f" chat template of {target.name}"
            )
        _check_length(target, config)

    def __iter__(self) -> Iterator[Text]:
        self.dropped.clear()
        engine = _engine(self._target, self._config, self._stop_tokens)
        numbers = iter(self._numbers)
        # By request id of the user's turn, and by request id of the answer.
        plans: dict[int, _Plan] = {}
        questions: dict[int, Text] = {}
        known: set[int] = set()

        while True:
            for number in itertools.islice(numbers, engine.free):
                plan = self._plan(number)
                request = Request(
                    self._prefix + plan.opening,
                    # The rest of the turn, and the token that ends it.
                    max_new_tokens=self._config.user_length - len(plan.opening) + 1,
                    temperature=self._config.user_temperature,
                    seed=plan.user_seed,
                )
                plans[engine.submit(request)] = plan
            if engine.idle:
                return

            for request_id, tokens in ended(engine.tick()):
                if request_id in plans:
                    plan = plans.pop(request_id)
                    question = self._question(plan.opening, tokens, known)
                    if question is not None:
                        room = self._config.length - len(question.tokens)
                        request = Request(
                            question.tokens, room, plan.temperature, seed=plan.answer_seed
                        )
                        questions[engine.submit(request)] = question
                else:
                    question = questions.pop(request_id)
                    if _loops(tokens):
                        self.dropped["loop"] += 1
                    else:
                        learn = question.learn + [True] * len(tokens)
                        yield Text(question.tokens + tokens, learn, question.document)

    def _plan(self, number: int) -> _Plan:
        rng = np.random.default_rng([self._config.seed, number])
        temperature, answer_seed = _answer_sampling(self._config, rng)
        user_seed = int(rng.integers(2**32))
        opening: list[int] = []
        if self._openings and rng.random() < 0.5:
            opening = self._openings[rng.integers(len(self._openings))]
        return _Plan(opening, user_seed, temperature, answer_seed)

    def _question(self, opening: list[int], tokens: list[int], known: set[int]) -> Text | None:
        """Returns the conversation up to the answer, or counts why there is none.

        Args:
            opening: Token ids that the turn was begun with.
            tokens: Token ids that the model wrote after the opening.
            known: Documents of earlier turns; this one is added.
        """
        if not tokens or tokens[-1] not in self._stop_tokens:
            self.dropped["too long"] += 1
            return None

        turn = opening + tokens[:-1]
        text = self._tokenizer.decode(turn).strip()
        if len(turn) < _SHORTEST_TURN or not text:
            self.dropped["too short"] += 1
            return None

        document = document_hash(text)
        if document in known:
            self.dropped["duplicate"] += 1
            return None
        known.add(document)

        prompt = self._target.apply_chat_template([{"role": "user", "content": text}])
        if len(prompt) >= self._config.length:
            self.dropped["too long"] += 1
            return None
        return Text(prompt, [False] * len(prompt), document)


def answers(
    target: LoadedTarget, prompts: Iterable[list[int]], config: OwnTextConfig, *, first: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Lets a target answer prompts, for example to rewrite the answers of conversations.

    Args:
        target: The target.
        prompts: Token ids of prompts that end where an answer begins. They are read as rows become
            free.
        config: ``length``, ``slots``, ``temperature``, ``greedy_share`` and ``seed`` are used.
        first: Number of the first prompt for its random numbers, if the prompts are a part of a
            larger set.

    Yields:
        The number of the prompt, from 0, and the token ids of its answer, stop token included, in
        the order in which they end. There are none if the answer repeats itself at its end, or if
        the prompt has ``length`` tokens or more. An answer depends on its prompt, its number and
        the seed only.

    Raises:
        ValueError: ``length`` is more than the target holds, or a prompt is empty or has an id
            outside the vocabulary.
    """
    engine = _engine(target, config, target.stop_tokens)
    waiting = enumerate(prompts)
    # By request id.
    numbers: dict[int, int] = {}

    while True:
        taken = list(itertools.islice(waiting, engine.free))
        for number, prompt in taken:
            room = config.length - len(prompt)
            if room < 1:
                yield number, []
                continue
            temperature, seed = _answer_sampling(
                config, np.random.default_rng([config.seed, first + number])
            )
            request = Request(prompt, max_new_tokens=room, temperature=temperature, seed=seed)
            numbers[engine.submit(request)] = number
        if engine.idle and not taken:
            return

        for request_id, tokens in ended(engine.tick()):
            yield numbers.pop(request_id), [] if _loops(tokens) else tokens


def _check_length(target: LoadedTarget, config: OwnTextConfig) -> None:
    if config.length > target.max_positions:
        raise ValueError(
            f"length is {config.length}, and {target.name} holds {target.holds}; lower length"
        )


def _engine(target: LoadedTarget, config: OwnTextConfig, stop_tokens: tuple[int, ...]) -> Engine:
    _check_length(target, config)
    decoder = SpeculativeDecoder(target, stop_tokens=stop_tokens)
    capacity = config.length + decoder.loop.drafter.num_nodes
    return Engine(
        decoder,
        slots=config.slots,
        capacity=capacity,
        sampling_mode=SamplingMode.TEMPERATURE,
        prefill_rows=8,
    )


def _answer_sampling(config: OwnTextConfig, rng: np.random.Generator) -> tuple[float, int]:
    """Returns the temperature and the seed of an answer."""
    greedy = rng.random() < config.greedy_share
    return 0.0 if greedy else config.temperature, int(rng.integers(2**32))


def _loops(tokens: list[int]) -> bool:
    """Whether an answer repeats itself at its end; one of fewer than 64 tokens does not."""
    last = tokens[-_LOOP_TOKENS:]
    runs = {tuple(last[start : start + _LOOP_RUN]) for start in range(len(last) - _LOOP_RUN + 1)}
    return len(last) == _LOOP_TOKENS and len(runs) < _FEWEST_RUNS
