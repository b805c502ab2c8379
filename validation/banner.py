"""What is said at the top of a page that not everything was there for."""

from __future__ import annotations

import dataclasses
import html


@dataclasses.dataclass(frozen=True)
class Part:
    """A thing that the numbers depend on.

    Attributes:
        name: Such as ``device``.
        real: Whether it is what the notebook is about; otherwise something stands in.
        text: What it is, or what stands in and why.
    """

    name: str
    real: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Banner:
    """What is real here, and what is a stand-in."""

    parts: tuple[Part, ...]

    @property
    def missing(self) -> tuple[Part, ...]:
        """What has a stand-in."""
        return tuple(part for part in self.parts if not part.real)

    @property
    def headline(self) -> str:
        """In a sentence."""
        if not self.missing:
            return "Everything here is real: these numbers are this machine's own."
        names = ", ".join(part.name for part in self.missing)
        return f"Stand-ins here: {names}. No number of theirs may be quoted as one of the real thing."

    def __str__(self) -> str:
        """For terminals and logs."""
        lines = [f"  {'real    ' if part.real else 'STAND-IN'}  {part.name}: {part.text}" for part in self.parts]
        return "\n".join([self.headline, *lines])

    def _repr_html_(self) -> str:
        edge = "#d97634" if self.missing else "#2a9d74"
        rows = "".join(
            f"<tr><td style='white-space:nowrap'>{'&#10003; real' if part.real else '&#9888; stand-in'}</td>"
            f"<td><b>{html.escape(part.name)}</b></td><td style='text-align:left'>{html.escape(part.text)}</td></tr>"
            for part in self.parts
        )
        return (
            f"<div class='eagle3-banner' style='border-left:6px solid {edge};padding:.4em 1em;margin:.5em 0;"
            f"background:{edge}14'><b>{html.escape(self.headline)}</b><table>{rows}</table></div>"
        )
