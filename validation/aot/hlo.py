"""Counts in the text of a compiled program: launches, copies, and work of the host.

The text of the optimized HLO is the only public form of a compiled program. Nothing here knows
about decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*")
# The type of a tuple ends where an opcode follows; layouts of TPUs have parentheses too, but no
# blank after them.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(
    r"(?:condition|body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

# Instructions without cost: they name arrays that exist already.
_FREE = frozenset(
    ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "opt-barrier",
     "add-dependency", "replica-id", "partition-id", "domain")
)  # fmt: skip
# Instructions that only choose the next computation. A fusion is one kernel, whatever it calls.
_CONTROL = frozenset(("while", "conditional", "call", "async-start"))
_COPIES = frozenset(("copy", "copy-start", "transpose", "bitcast-convert"))
# A fusion of nothing else moves or relabels an array.
_MOVES = frozenset(
    ("parameter", "constant", "copy", "transpose", "bitcast", "bitcast-convert", "convert",
     "reshape", "tuple", "get-tuple-element")
)  # fmt: skip
_UPDATES = frozenset(("scatter", "dynamic-update-slice"))
_TRANSFERS = frozenset(("infeed", "outfeed", "send", "recv"))
_HOST_CALLS = re.compile(
    r'custom_call_target="[^"]*(?:callback|MoveToHost|MoveToDevice|host)', re.IGNORECASE
)
_FAST_MEMORY = 1  # a TPU's VMEM
_HOST_MEMORY = 5
_LARGE = 2**20  # bytes; smaller copies do not matter


class Array(NamedTuple):
    """An array that an instruction writes."""

    dtype: str  #: As HLO writes it: ``bf16``, ``s32``.
    dims: tuple[int, ...]
    space: int  #: Memory space; 0 is the main memory of the device.

    @property
    def size(self) -> int:
        """Bytes; elements smaller than a byte count as one."""
        bits = 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.dims) * max(bits // 8, 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str  #: Type of the result, as written.
    op: str
    operands: str  #: Operands and attributes, as written.
    is_root: bool = False  #: Whether it is the result of its computation.

    @property
    def literal(self) -> str:
        """The number of a parameter, or the value of a constant; empty if there are operands."""
        return "" if self.inputs else self.operands.partition(")")[0]

    @property
    def attributes(self) -> str:
        """What follows the operands."""
        return self.operands.partition(")")[2]

    @functools.cached_property
    def inputs(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.operands.partition(")")[0])

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """Arrays of the result; those of a ``copy-start`` are its destination and its source."""
        arrays = []
        for dtype, dims, layout in _ARRAY.findall(self.type):
            space = _SPACE.search(layout)
            shape = tuple(int(dim) for dim in dims.split(",") if dim)
            arrays.append(Array(dtype, shape, int(space[1]) if space else 0))
        return arrays

    @property
    def written(self) -> list[Array]:
        """Arrays that it writes to main memory.

        An array that was computed in a TPU's VMEM is not written again when a ``copy-start`` brings
        it back.
        """
        if self.op == "copy-start":
            destination, source = self.arrays[:2]
            returns = source.space == _FAST_MEMORY and not self.operands.startswith("%copy")
            return [] if returns or destination.space == _FAST_MEMORY else [destination]
        return [array for array in self.arrays if array.space != _FAST_MEMORY]

    @property
    def index(self) -> int:
        """Which element of a tuple a ``get-tuple-element`` takes."""
        return int(self.attribute(r"index=(\d+)"))

    def attribute(self, pattern: str | re.Pattern[str]) -> str:
        """Returns the first group of a pattern in operands and attributes, if any."""
        match = re.search(pattern, self.operands)
        return match[1] if match else ""

    @property
    def is_launched(self) -> bool:
        """Whether a device receives it as a kernel, a copy or a library call."""
        return self.op not in _FREE | _CONTROL and not self.op.endswith(("-done", "-update"))

    @property
    def uses_host(self) -> bool:
        """Whether it waits for the host, or moves an array from or to it."""
        if self.op.removesuffix("-start") in _TRANSFERS:
            return True
        if self.op == "custom-call" and _HOST_CALLS.search(self.operands):
            return True
        return any(array.space == _HOST_MEMORY for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Module:
        """Reads the text of a module."""
        computations: dict[str, list[Instruction]] = {}
        instructions: list[Instruction] = []
        entry = ""
        for line in text.splitlines():
            if header := _COMPUTATION.fullmatch(line):
                instructions = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif match := _INSTRUCTION.match(line):
                root, *parts = match.groups()
                instructions.append(Instruction(*parts, is_root=bool(root)))
        return cls(computations, entry)

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is that of a computation."""
        return next(
            instruction for instruction in self.computations[computation] if instruction.is_root
        )

    def steps(self, computation: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction that a computation reaches, and how often it runs.

        A loop with a known trip count is unrolled, and one without counts as one trip. Every branch
        counts.
        """
        for instruction in self.computations[computation]:
            yield instruction, times
            for called in self._called(instruction):
                yield from self.steps(called, times * (self.trip_count(instruction) or 1))

    def _called(self, instruction: Instruction) -> list[str]:
        if instruction.op not in _CONTROL:
            return []
        called = _CALLED.findall(instruction.operands)
        if self.trip_count(instruction) is not None:
            called.remove(instruction.attribute(r"condition=%?([\w.\-]+)"))
        return called + re.findall(r"[\w.\-]+", instruction.attribute(_BRANCHES))

    def trip_count(self, instruction: Instruction) -> int | None:
        """Returns the trip count of a ``while``; ``None`` if unknown, and for other instructions.

        GPU programs contain it. In TPU programs it is the constant that a counter is compared with.
        """
        if instruction.op != "while":
            return None
        if known := instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
            return int(known)

        condition = self.computations[instruction.attribute(r"condition=%?([\w.\-]+)")]
        by_op = {step.op: step for step in condition}
        if len(condition) != 4 or by_op.keys() != {
            "compare",
            "constant",
            "get-tuple-element",
            "parameter",
        }:
            return None

        limit = by_op["constant"].attribute(r"^(\d+)\)")
        return int(limit) if limit and "direction=LT" in by_op["compare"].operands else None

    def is_open_loop(self, instruction: Instruction) -> bool:
        """Whether it is a loop with an unknown trip count."""
        return instruction.op == "while" and self.trip_count(instruction) is None

    def round_steps(self) -> list[tuple[Instruction, int]]:
        """Returns :meth:`steps` of the largest loop with an unknown trip count, the loop of rounds.

        Raises:
            ValueError: There is no such loop.
        """
        loops = [
            instruction
            for instruction in self.computations[self.entry]
            if self.is_open_loop(instruction)
        ]
        if not loops:
            raise ValueError(
                "the program has no loop without a known trip count, so none of rounds"
            )

        trips = (
            [step for called in self._called(loop) for step in self.steps(called)] for loop in loops
        )
        return max(trips, key=len)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions in a fusion; none for other instructions."""
        is_fusion = instruction.op in ("fusion", "fusion-start")
        return self.computations[instruction.attribute(_CALLED)] if is_fusion else []

    def copies(self, instruction: Instruction) -> bool:
        """Whether an instruction only moves or relabels an array."""
        fused = self.fused(instruction)
        return instruction.op in _COPIES or (
            bool(fused) and all(part.op in _MOVES for part in fused)
        )

    def updates_in_place(self, instruction: Instruction) -> bool:
        """Whether an instruction writes into an array that exists already."""
        if "output_to_operand_aliasing" in instruction.operands:
            return True
        return any(part.op in _UPDATES for part in (instruction, *self.fused(instruction)))


@dataclasses.dataclass
class Counts:
    """Counts of one round, or of a program without a loop of rounds."""

    #: Kernels, copies and library calls; loops are unrolled by known trip counts.
    launches: int = 0
    #: Conditionals, and loops without a known trip count: a GPU asks the host which way to go.
    decisions: int = 0
    host: int = 0  #: Transfers from and to the host, and calls into it, in the whole program.
    #: Instructions that write a whole cache, or the embedding, instead of updating it in place.
    cache_writes: int = 0
    copied: int = 0  #: Bytes in all copies of a MiB and more.


def count(text: str, shapes: Iterable[tuple[int, ...]], *, rounds: bool = False) -> Counts:
    """Counts what an optimized HLO module does.

    Args:
        text: The text of the module.
        shapes: Shapes that no instruction should write completely: of caches and of the embedding.
        rounds: Whether to count one trip of the loop of rounds, and not the program.
    """
    module = Module.parse(text)
    program = list(module.steps(module.entry))
    caches = {_sorted(shape) for shape in shapes}
    counts = Counts(
        host=sum(times for step, times in program if step.is_launched and step.uses_host)
    )

    for instruction, times in module.round_steps() if rounds else program:
        if module.is_open_loop(instruction) or instruction.op == "conditional":
            counts.decisions += times
        if not instruction.is_launched:
            continue

        counts.launches += times
        written = instruction.written
        # A collective that sends a cache to other devices writes all of it too.
        writes_cache = any(_sorted(array.dims) in caches for array in written)
        if writes_cache and not module.updates_in_place(instruction):
            counts.cache_writes += times
        if module.copies(instruction):
            counts.copied += times * sum(array.size for array in written if array.size >= _LARGE)

    return counts


def _sorted(dims: Iterable[int]) -> tuple[int, ...]:
    """A shape without the order of its axes, and without axes of one element."""
    return tuple(sorted(dim for dim in dims if dim > 1))
