"""Optimised HLO, read from its text: what is launched, how often, and which arrays it makes.

The text is the only public form of a compiled program. Nothing here knows about decoding.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*")
# A tuple's type ends where an opcode follows; layouts of TPUs have parentheses too, but no blank after them.
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
# Attributes that say where an instruction comes from, and not what it computes.
_ORIGIN = re.compile(r', (?:metadata|sharding|frontend_attributes)=\{(?:"(?:\\.|[^"\\])*"|[^{}"])*\}')

# What costs nothing: names for arrays that are there already.
FREE = frozenset(
    ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "opt-barrier", "add-dependency",
     "replica-id", "partition-id", "domain")
)  # fmt: skip
# What only says which computation is next. A fusion is one kernel, whatever it calls.
_CONTROL = frozenset(("while", "conditional", "call", "async-start"))
_BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")


class Array(NamedTuple):
    """An array that an instruction gives."""

    dtype: str  #: As HLO writes it: ``bf16``, ``s32``.
    dims: tuple[int, ...]  #: Its shape.
    space: int = 0  #: Memory space; 0 is the device's main memory, 1 a TPU's VMEM, 5 the host's.

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype.startswith(("f", "bf"))

    @property
    def size(self) -> int:
        """Bytes; those below a byte count as one."""
        width = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.dims) * max(width // 8, 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str  # of its result, as written
    op: str
    operands: str  # operands and attributes, as written

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """What it gives; of a ``copy-start`` the first is its destination, of a collective's the last."""
        return tuple(
            Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim), _space(layout))
            for dtype, dims, layout in _ARRAY.findall(self.type)
        )

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a pattern in the operands and attributes."""
        match = re.search(pattern, self.operands)
        return match[1] if match else None

    @property
    def is_launched(self) -> bool:
        """Whether a device is given it on its own."""
        return self.op not in FREE and self.op not in _CONTROL and not self.op.endswith(("-done", "-update"))

    @property
    def fused(self) -> str | None:
        """The computation of a fusion."""
        return self.attribute(r"calls=%?([\w.\-]+)") if self.op in ("fusion", "fusion-start") else None

    @property
    def target(self) -> str:
        """Of a custom call; empty for others."""
        return self.attribute(r'custom_call_target="([^"]*)"') or "" if self.op == "custom-call" else ""

    @property
    def estimated_cycles(self) -> int:
        """The TPU compiler's own estimate; 0 where it gives none."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def traced_from(self) -> str:
        """Where in the traced program it comes from, as ``jit(step)/target/dot_general``; empty if unknown."""
        return self.attribute(r'op_name="([^"]*)"') or ""


class Step(NamedTuple):
    """An instruction that is come to."""

    instruction: Instruction
    times: int  # in one run of the computation it was found from


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Read the text of a module.

        Raises:
            ValueError: It has no entry computation.
        """
        computations: dict[str, list[Instruction]] = {}
        entry = None
        current = None
        for line in text.splitlines():
            if line.startswith("}"):
                current = None
            elif match := _COMPUTATION.fullmatch(line):
                current = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(Instruction(*match.groups()))
        if entry is None:
            raise ValueError("the text is no HLO module: it has no ENTRY")
        return cls(computations, entry)

    def steps(self, computation: str, *, loops: bool = True, times: int = 1) -> Iterator[Step]:
        """Every instruction that one run of a computation comes to, those of the computations it calls among them.

        A loop with a known trip count is unrolled; one without counts once, with its condition, or not at all. Of a
        conditional, every branch counts.

        Args:
            computation: Its name.
            loops: Whether loops without a known trip count count.
            times: How often the computation runs.
        """
        for instruction in self.computations.get(computation, ()):
            if self.is_open_loop(instruction) and not loops:
                continue
            yield Step(instruction, times)
            for called in self._called(instruction):
                yield from self.steps(called, loops=loops, times=times * (self.trip_count(instruction) or 1))

    def launches(self, computation: str) -> Iterator[Step]:
        """Those of :meth:`steps` that a device is given on their own."""
        return (step for step in self.steps(computation) if step.instruction.is_launched)

    def _called(self, instruction: Instruction) -> list[str]:
        if instruction.op == "while":
            condition, body = self.loop(instruction)
            return [condition, body] if self.is_open_loop(instruction) else [body]
        if instruction.op == "conditional":
            return _branches(instruction)
        if instruction.op in ("call", "async-start"):
            return [instruction.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)") or ""]
        return []

    def trip_count(self, instruction: Instruction) -> int | None:
        """Returns the trip count of a ``while``; ``None`` for other instructions, and if it is unknown.

        GPU programs say it. In those of TPUs it is the constant that a counter, from zero by one, is compared with.
        """
        if instruction.op != "while":
            return None
        known_count = instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        if known_count is not None:
            return int(known_count)
        condition = self.computations.get(self.loop(instruction)[0], [])
        if sorted(step.op for step in condition) != ["compare", "constant", "get-tuple-element", "parameter"]:
            return None
        least = next(step for step in condition if step.op == "constant").operands.partition(")")[0]
        counts = any(step.attribute(r"direction=(LT)") for step in condition)
        return int(least) if counts and least.isdecimal() else None

    def is_open_loop(self, instruction: Instruction) -> bool:
        """Whether it is a loop with an unknown trip count."""
        return instruction.op == "while" and self.trip_count(instruction) is None

    def loop(self, instruction: Instruction) -> tuple[str, str]:
        """Condition and body of a ``while``."""
        return (
            instruction.attribute(r"condition=%?([\w.\-]+)") or "",
            instruction.attribute(r"body=%?([\w.\-]+)") or "",
        )

    def open_loops(self) -> list[Instruction]:
        """The loops of the entry with an unknown trip count, largest body first."""
        loops = [instruction for instruction in self.computations[self.entry] if self.is_open_loop(instruction)]
        return sorted(loops, key=lambda instruction: -sum(1 for _ in self.launches(self.loop(instruction)[1])))

    def products(self) -> dict[tuple[str, ...], int]:
        """Counts matrix products by the types of their operands, in all computations, each once."""
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        for computation in self.computations.values():
            types = {instruction.name: instruction.arrays[0].dtype for instruction in computation if instruction.arrays}
            for instruction in computation:
                if instruction.op == "dot":
                    operands = re.findall(r"%?([\w.\-]+)", instruction.operands.partition(")")[0])
                    counts[tuple(types[name] for name in operands if name in types)] += 1
        return dict(counts)

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """What a fusion fuses; nothing for other instructions."""
        return self.computations.get(instruction.fused or "", [])

    def adds(self, instruction: Instruction) -> bool:
        """Whether an instruction adds floating-point numbers in an order that its kernel chooses.

        Products do, library calls and Triton kernels may, and so may reductions by addition and fusions of these.
        """
        if instruction.op in ("dot", "custom-call"):
            return True
        if (reducer := instruction.attribute(r"to_apply=%?([\w.\-]+)")) is not None:
            return any(part.op == "add" and part.arrays[0].is_float for part in self.computations.get(reducer, ()))
        return any(self.adds(part) for part in self.inside(instruction))

    def canonical(self, instruction: Instruction) -> str:
        """An instruction, its attributes and what it calls, without the names of operands and without metadata.

        Two kernels with the same text compute the same bits from the same inputs.
        """
        return self._canonical(instruction, {})

    def _canonical(self, instruction: Instruction, names: dict[str, str]) -> str:
        text = _CALLED.sub(lambda match: match[0].partition("=")[0], _ORIGIN.sub("", instruction.operands))
        text = f"{instruction.type} {instruction.op}({_NAME.sub(lambda match: names.get(match[1], '_'), text)}"
        for called in _CALLED.findall(instruction.operands):
            inner: dict[str, str] = {}
            lines = []
            # Parameters first, by number: the order in which a computation lists them says nothing.
            for part in sorted(self.computations.get(called, ()), key=_parameter_number):
                lines.append(self._canonical(part, inner))
                inner[part.name] = f"v{len(inner)}"
            text += " {" + "\n".join(lines) + "}"
        return text


def _parameter_number(instruction: Instruction) -> float:
    return int(instruction.operands.partition(")")[0]) if instruction.op == "parameter" else math.inf


def _space(layout: str) -> int:
    match = _SPACE.search(layout)
    return int(match[1]) if match else 0


def _branches(instruction: Instruction) -> list[str]:
    listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    if listed is not None:
        return [name.strip().lstrip("%") for name in listed.split(",")]
    return _BRANCHES.findall(instruction.operands)
