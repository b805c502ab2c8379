"""Token strips say where each token came from, and change nothing of the text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.pictures.strips import Token, TokenStrip, tokens_of
from eagle3_jax.pictures.style import ACCEPTED, BONUS, CORRECTED
from eagle3_jax.trace import Trace, record

PROMPT = "def read_config(filename, encoding=None):\n"


@pytest.fixture(scope="module", params=["a chain", "a tree"])
def run(request: pytest.FixtureRequest) -> tuple[e3.SpeculativeDecoder, Trace]:
    target = e3.load_target()
    tree = e3.DynamicTree(num_nodes=8, max_depth=4, top_k=2)
    how = {"a chain": {"num_speculative_tokens": 3}, "a tree": {"tree": tree}}[request.param]
    decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), stop_tokens=(), **how)
    return decoder, record(decoder, [PROMPT], max_new_tokens=[40], sampling=e3.SamplingParams(), seed=0)


def test_the_pieces_of_a_strip_are_prompt_and_text(run: tuple[e3.SpeculativeDecoder, Trace]) -> None:
    decoder, trace = run
    tokens = tokens_of(trace.prompts[0], decoder.target.tokenizer)
    text = "".join(token.piece for token in tokens)
    assert text.startswith(PROMPT + trace.result.texts[0])  # a round may go on beyond the limit of the output


def test_the_kinds_of_a_strip_are_counted_as_the_loop_counts_them(run: tuple[e3.SpeculativeDecoder, Trace]) -> None:
    """``num_accepted_tokens`` accepted, and one of the target's own for every round."""
    decoder, trace = run
    kinds = [token.kind for token in tokens_of(trace.prompts[0], decoder.target.tokenizer)]
    stats = trace.result.stats
    assert kinds.count(ACCEPTED) == stats.num_accepted_tokens
    assert kinds.count(CORRECTED) + kinds.count(BONUS) == stats.num_drafts
    assert kinds.count("from the prefill") == 1
    if decoder.loop.is_chain:  # a bonus is what follows a chain that was accepted whole
        assert kinds.count(BONUS) == np.asarray(stats.num_accepted_tokens_per_pos)[-1]


def test_a_drawing_is_valid_xml_with_the_same_text() -> None:
    tokens = [Token('a <b> & "c"\n', "prompt", 0), Token("\tx = 1\n\n", ACCEPTED, 1), Token("long" * 30, BONUS, 1)]
    strip = TokenStrip(tokens, "what & why")
    root = xml.fromstring(strip.svg(columns=40))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "".join(texts[: -2 if texts[-1] == BONUS else None]) == 'a <b> & "c"' + "    x = 1" + "long" * 30
    assert max(map(len, texts)) <= 40
    shown = re.sub(r"<[^>]*>", "", strip._repr_html_())
    assert "what &amp; why" in shown and "&lt;b&gt;" in shown
