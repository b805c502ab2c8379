"""Token strips: a text that shows the origin of every token."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.text.tokens import Pieces
from pictures.style import ACCEPTED, BONUS, COLOURS, CORRECTED

PROMPT = "prompt"
FIRST = "from the prefill"
UNDRAFTED = "undrafted"
# The line below a token, so that color is not the only mark.
_MARKS = {
    ACCEPTED: "solid",
    CORRECTED: "dashed",
    BONUS: "double",
    UNDRAFTED: "dotted",
    FIRST: "dotted",
}
_INK = {**COLOURS, FIRST: "#6b7280", UNDRAFTED: "#6b7280"}


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a strip."""

    piece: str  #: Its text.
    #: ``"prompt"``, ``"from the prefill"``, ``"accepted"``, ``"corrected"`` (the target's choice
    #: after a rejection), ``"bonus"`` (the target's choice after a completely accepted path) or
    #: ``"undrafted"`` (the round had no draft).
    kind: str
    round: int  #: Number of the round that added the token, from 1; 0 before the first round.


def tokens_of(prompt: dict[str, Any], tokenizer: Tokenizer) -> list[Token]:
    """Lists the tokens of one recorded prompt, those of the prompt included.

    Args:
        prompt: One entry of ``Trace.prompts`` of :func:`~eagle3_jax.measure.trace.record`.
        tokenizer: The target's tokenizer.
    """
    pieces = Pieces(tokenizer)
    tokens = [Token(piece, PROMPT, 0) for piece in pieces.decode(prompt["prompt_ids"])]

    for index, round_ in enumerate(prompt["rounds"], start=1):
        if index == 1:
            tokens.append(Token(pieces.decode([round_["tokens"][0]])[0], FIRST, 0))

        accepted = [round_["tokens"][node] for node in round_["path"]]
        end = round_["path"][-1] if round_["path"] else 0
        last = (
            UNDRAFTED
            if len(round_["tokens"]) == 1
            else CORRECTED
            if end in round_["parents"]
            else BONUS
        )
        emitted = [*accepted, round_["next_token"]]
        kinds = [ACCEPTED] * len(accepted) + [last]
        tokens += [
            Token(piece, kind, index)
            for piece, kind in zip(pieces.decode(emitted), kinds, strict=True)
        ]
    return tokens


@dataclasses.dataclass(frozen=True)
class TokenStrip:
    """A strip, shown as HTML in a notebook and as SVG on a page (:func:`svg`)."""

    tokens: Sequence[Token]
    caption: str = ""

    def _repr_html_(self) -> str:
        kinds = list(dict.fromkeys(token.kind for token in self.tokens if token.kind != PROMPT))
        spans = "".join(map(_span, self.tokens))
        legend = " &nbsp; ".join(f'<span style="{_css(kind)}">{kind}</span>' for kind in kinds)
        caption = f"<div>{html.escape(self.caption)}</div>" if self.caption else ""
        return (
            '<div style="background:#fff;color:#1f2328;padding:.6em .8em;border-radius:.4em;'
            f'line-height:1.75;overflow-x:auto">{caption}'
            '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">'
            f"{spans}</div>"
            f'<div style="font-size:.85em;margin-top:.4em">{legend}</div></div>'
        )


def svg(lanes: Sequence[tuple[str, TokenStrip]], *, seconds_per_round: float | None = None) -> str:
    """Draws strips below each other as one SVG.

    Args:
        lanes: Heading and strip of each.
        seconds_per_round: Time between rounds in a repeating animation. Without animation support,
            all tokens are visible. Default: no animation.
    """
    rounds = max((token.round for _, strip in lanes for token in strip.tokens), default=0)
    pen = _Pen()
    kinds = dict[str, None]()

    for heading, strip in lanes:
        if heading:
            pen.words(heading)
        for token in strip.tokens:
            animated = seconds_per_round is not None and token.round > 0
            pen.token(token, _appear(token.round, rounds, seconds_per_round) if animated else "")
            if token.kind != PROMPT:
                kinds[token.kind] = None
        pen.gap()
    pen.legend(list(kinds))

    caption = html.escape(
        next((strip.caption for _, strip in lanes if strip.caption), "tokens by origin")
    )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {pen.width:.0f} {pen.height:.0f}" '
        f'width="{pen.width:.0f}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        f'font-size="{pen.size:g}" role="img"><title>{caption}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>{"".join(pen.shapes)}</svg>\n'
    )


def _appear(number: int, rounds: int, seconds_per_round: float) -> str:
    """Makes the tokens of a round appear at their time in a repeating animation."""
    length = seconds_per_round * (rounds + 1) + 3.0  # the whole picture stays for 3 s
    start = seconds_per_round * number / length
    return (
        f'<animate attributeName="opacity" values="0;1" keyTimes="0;{start:.4f}" '
        f'calcMode="discrete" dur="{length:.2f}s" repeatCount="indefinite"/>'
    )


class _Pen:
    """Writes tokens one after the other and breaks lines."""

    columns = 72  # characters of a line
    size = 14.0  # pixels of the font
    advance = 0.602 * size
    line = 1.75 * size
    pad = 1.2 * size

    def __init__(self):
        self.x = 0
        self.y = self.pad
        self.shapes = list[str]()

    @property
    def width(self) -> float:
        return 2 * self.pad + self.columns * self.advance

    @property
    def height(self) -> float:
        return self.y + self.pad

    def token(self, token: Token, animation: str) -> None:
        boxes = []
        for part in re.findall(r"\n|[^\n]+", token.piece.expandtabs(4)):
            if part == "\n":
                self._break()
                continue

            while part:
                if self.x >= self.columns:
                    self._break()
                now = part[: self.columns - self.x]
                part = part[self.columns - self.x :]
                boxes.append(self._box(now, token.kind))
                self.x += len(now)

        shapes = "".join(boxes)
        self.shapes.append(f"<g>{animation}{shapes}</g>" if animation else shapes)

    def words(self, text: str) -> None:
        self.shapes.append(
            f'<text x="{self.pad:.1f}" y="{self.y + self.size:.1f}" font-weight="bold" '
            f'fill="#1f2328" font-family="system-ui, sans-serif">{html.escape(text)}</text>'
        )
        self._break()

    def gap(self) -> None:
        self._break()
        self.y += 0.6 * self.line

    def legend(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if self.x + len(kind) > self.columns:
                self._break()
            self.shapes.append(self._box(kind, kind))
            self.x += len(kind) + 2
        self._break()

    def _break(self) -> None:
        self.x = 0
        self.y = self.y + self.line

    def _box(self, text: str, kind: str) -> str:
        x = self.pad + self.x * self.advance
        width = len(text) * self.advance
        size = self.size
        color = "#6b7280" if kind == PROMPT else "#1f2328"

        words = (
            f'<text x="{x:.1f}" y="{self.y + size:.1f}" textLength="{width:.1f}" '
            f'xml:space="preserve" fill="{color}">{html.escape(text)}</text>'
        )
        if kind == PROMPT:
            return words if text.strip() else ""

        ink = _INK[kind]
        under = self.y + 1.3 * size
        dash = {"dashed": ' stroke-dasharray="4 2"', "dotted": ' stroke-dasharray="1 2"'}.get(
            _MARKS[kind], ""
        )

        return (
            f'<rect x="{x:.1f}" y="{self.y:.1f}" width="{width:.1f}" height="{1.3 * size:.1f}" '
            f'fill="{ink}" opacity="0.15"/>'
            f'<line x1="{x:.1f}" x2="{x + width - 1:.1f}" y1="{under:.1f}" y2="{under:.1f}" '
            f'stroke="{ink}" stroke-width="{3 if kind == BONUS else 2}"{dash}/>{words}'
        )


def _css(kind: str) -> str:
    if kind == PROMPT:
        return "color:#6b7280"
    ink = _INK[kind]
    return f"background:{ink}26;border-bottom:2px {_MARKS[kind]} {ink}"


def _span(token: Token) -> str:
    title = token.kind if token.round == 0 else f"{token.kind}, round {token.round}"
    return f'<span title="{title}" style="{_css(token.kind)}">{html.escape(token.piece)}</span>'
