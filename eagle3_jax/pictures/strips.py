"""Token strips: a text whose every token shows where it came from."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.pictures.style import ACCEPTED, BONUS, COLOURS, CORRECTED
from eagle3_jax.text import Pieces

PROMPT, FIRST = "prompt", "from the prefill"
_MARKS = {ACCEPTED: "solid", CORRECTED: "dashed", BONUS: "double", FIRST: "dotted"}  # the line below, for any eyes
_INK = {**COLOURS, FIRST: "#6b7280"}


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a strip.

    Attributes:
        piece: Its text.
        kind: ``"prompt"``, ``"from the prefill"``, ``"accepted"``, ``"corrected"`` (the target's own choice after a
            refusal) or ``"bonus"`` (the target's own choice after everything on the path was accepted).
        round: In which round it was emitted, from 1; 0 before the first.
    """

    piece: str
    kind: str
    round: int


def tokens_of(prompt: dict[str, Any], tokenizer: Tokenizer) -> list[Token]:
    """The tokens of one prompt of a :func:`~eagle3_jax.trace.record`, the prompt's own included.

    Args:
        prompt: One entry of ``Trace.prompts``.
        tokenizer: Of the target.
    """
    pieces = Pieces(tokenizer)
    found = [Token(piece, PROMPT, 0) for piece in pieces.of(prompt["prompt_ids"])]
    for index, one in enumerate(prompt["rounds"], start=1):
        if index == 1:
            found.append(Token(pieces.of([one["tokens"][0]])[0], FIRST, 0))
        accepted = [one["tokens"][node] for node in one["path"]]
        end = one["path"][-1] if one["path"] else 0
        last = CORRECTED if end in one["parents"] else BONUS
        emitted = [*accepted, one["next_token"]]
        kinds = [ACCEPTED] * len(accepted) + [last]
        found += [Token(piece, kind, index) for piece, kind in zip(pieces.of(emitted), kinds, strict=True)]
    return found


@dataclasses.dataclass(frozen=True)
class TokenStrip:
    """A strip that a notebook shows as HTML and a page takes as SVG (:meth:`svg`)."""

    tokens: Sequence[Token]
    caption: str = ""

    def _repr_html_(self) -> str:
        kinds = list(dict.fromkeys(token.kind for token in self.tokens if token.kind != PROMPT))
        spans = "".join(_span(token, number) for number, token in enumerate(self.tokens))
        legend = " &nbsp; ".join(f'<span style="{_css(kind)}">{kind}</span>' for kind in kinds)
        caption = f"<div>{html.escape(self.caption)}</div>" if self.caption else ""
        return (
            '<div style="background:#fff;color:#1f2328;padding:.6em .8em;border-radius:.4em;line-height:1.75;'
            'overflow-x:auto">'
            f'{caption}<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">{spans}</div>'
            f'<div style="font-size:.85em;margin-top:.4em">{legend}</div></div>'
        )

    def svg(self, *, columns: int = 72, size: float = 14.0) -> str:
        """The strip as an SVG drawing of its own, with an opaque ground, for pages that take no HTML."""
        advance, height, pad = 0.602 * size, 1.75 * size, 1.2 * size
        shapes, column, line = [], 0, 0
        for token in self.tokens:
            for part in _lines(token.piece):
                if part == "\n":
                    column, line = 0, line + 1
                    continue
                while part:
                    if column >= columns:
                        column, line = 0, line + 1
                    now, part = part[: columns - column], part[columns - column :]
                    shapes.append(_box(now, token.kind, pad + column * advance, pad + line * height, advance, size))
                    column += len(now)
        legend, x, y = [], pad, pad + (line + 1.6) * height
        for kind in dict.fromkeys(token.kind for token in self.tokens if token.kind != PROMPT):
            legend.append(_box(kind, kind, x, y, advance, size))
            x += (len(kind) + 2) * advance
        width, below = 2 * pad + columns * advance, y + height + pad / 2
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {below:.0f}" width="{width:.0f}" '
            f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="{size:g}" role="img">'
            f"<title>{html.escape(self.caption or 'tokens by origin')}</title>"
            f'<rect width="100%" height="100%" rx="8" fill="#ffffff"/>{"".join(shapes + legend)}</svg>\n'
        )


def _css(kind: str) -> str:
    if kind == PROMPT:
        return "color:#6b7280"
    ink = _INK[kind]
    return f"background:{ink}26;border-bottom:2px {_MARKS[kind]} {ink}"


def _span(token: Token, number: int) -> str:
    title = token.kind if token.round == 0 else f"{token.kind}, round {token.round}"
    return f'<span title="{title}" style="{_css(token.kind)}">{html.escape(token.piece)}</span>'


def _lines(piece: str) -> list[str]:
    """A piece, cut so that line ends stand alone."""
    return re.findall(r"\n|[^\n]+", piece.expandtabs(4))


def _box(text: str, kind: str, x: float, y: float, advance: float, size: float) -> str:
    width = len(text) * advance
    words = (
        f'<text x="{x:.1f}" y="{y + size:.1f}" textLength="{width:.1f}" xml:space="preserve" '
        f'fill="{"#6b7280" if kind == PROMPT else "#1f2328"}">{html.escape(text)}</text>'
    )
    if kind == PROMPT:
        return words if text.strip() else ""
    ink, dash = (
        _INK[kind],
        {"dashed": ' stroke-dasharray="4 2"', "dotted": ' stroke-dasharray="1 2"'}.get(_MARKS[kind], ""),
    )
    under = y + 1.3 * size
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{1.3 * size:.1f}" fill="{ink}" opacity="0.15"/>'
        f'<line x1="{x:.1f}" x2="{x + width - 1:.1f}" y1="{under:.1f}" y2="{under:.1f}" stroke="{ink}" '
        f'stroke-width="{3 if kind == BONUS else 2}"{dash}/>{words}'
    )


__all__ = ["Token", "TokenStrip", "tokens_of"]
