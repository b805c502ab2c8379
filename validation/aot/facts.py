"""What a compiled program of the loop does: launches, copies, collectives, work of the host."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from validation.aot.hlo import Array, Instruction, Module, Step

COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
SCOPES = ("propose", "target", "verify", "commit", "observe")
_HOST_MEMORY = 5
_FAST_MEMORY = 1
_TRANSFERS = ("infeed", "outfeed", "send", "recv")
_HOST_CALLS = re.compile(r"callback|MoveToHost|MoveToDevice|host", re.IGNORECASE)
# A fusion of nothing else moves or relabels what is there already.
_MOVES = frozenset(
    ("parameter", "constant", "copy", "transpose", "bitcast", "bitcast-convert", "convert", "reshape", "tuple",
     "get-tuple-element")
)  # fmt: skip
_NAME = re.compile(r"%([\w.\-]+)")
_TAKES = frozenset(("gather", "dynamic-slice", "slice"))
_PUTS = frozenset(("scatter", "dynamic-update-slice"))
_RENAMES = frozenset(("bitcast", "tuple", "get-tuple-element"))
_LARGE = 2**20  # bytes; smaller copies do not matter


@dataclasses.dataclass
class Part:
    """A part of a program: one round, a prefill, or what a generation does before its rounds."""

    launches: int = 0  #: Instructions that a device is given on their own, loops unrolled by known trip counts.
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)  #: Of these, how many of each opcode.
    #: Of these, how many belong to each named scope of a round; ``other`` for what has none.
    scopes: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Conditionals, and loops without a known trip count: a GPU asks the host which way to go. Such a loop is counted
    #: as if it ran once.
    decisions: int = 0
    host: int = 0  #: Transfers from and to the host, and calls into it.
    cache_copies: int = 0  #: Copies of a whole cache of a layer, or of anything of its shape.
    cache_rewrites: int = 0  #: Instructions that write a whole cache where an update in place would do.
    table_copies: int = 0  #: Copies of the embedding, whole.
    copied: int = 0  #: Bytes in all copies of a MiB and more.
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)  #: How many of each kind.
    cache_collectives: int = 0  #: Of these, how many give or take something of a cache's shape.
    cycles: int = 0  #: The TPU compiler's own estimate; 0 elsewhere.
    bytes: int = 0  #: Read from and written to main memory (:func:`traffic`); 0 in records without it.


def parts_of(text: str, *, rounds: bool, caches: Sequence[tuple[int, ...]], table: tuple[int, ...]) -> dict[str, Part]:
    """Facts of an optimised HLO module.

    Args:
        text: Of the module.
        rounds: Whether the program holds the loop of rounds. Its body is then the part ``round``, and everything else
            ``before``; otherwise all of the program is the part ``whole``.
        caches: Shapes of the caches, on one device and, where that is another, of the whole.
        table: Shape of the embedding on one device.

    Raises:
        ValueError: There is no loop of rounds.
    """
    module = Module.parse(text)
    if not rounds:
        return {"whole": _part(module, module.steps(module.entry), caches, table)}
    loops = module.open_loops()
    if not loops:
        raise ValueError("the program has no loop without a known trip count, so none of rounds")
    condition, body = module.loop(loops[0])
    round_steps = [*module.steps(condition), *module.steps(body)]
    return {
        "round": _part(module, round_steps, caches, table),
        "before": _part(module, module.steps(module.entry, loops=False), caches, table),
    }


def _part(module: Module, steps: Iterable[Step], caches: Sequence[tuple[int, ...]], table: tuple[int, ...]) -> Part:
    part = Part()
    kinds: collections.Counter[str] = collections.Counter()
    scopes: collections.Counter[str] = collections.Counter()
    collectives: collections.Counter[str] = collections.Counter()
    cached = {_sorted(dims) for dims in caches}
    tables = {_sorted(table)}
    sizes = sizes_of(module)
    for instruction, times in steps:
        part.decisions += times * (module.is_open_loop(instruction) or instruction.op == "conditional")
        if not instruction.is_launched:
            continue
        kinds[instruction.op] += times
        scopes[_scope(instruction)] += times
        part.host += times * is_of_the_host(instruction)
        part.cycles += times * instruction.estimated_cycles
        part.bytes += times * traffic(module, instruction, sizes)
        if kinds_here := collectives_of(module, instruction):
            for kind in kinds_here:
                collectives[kind] += times
            part.cache_collectives += times * any(_sorted(array.dims) in cached for array in instruction.arrays)
        elif (copied := copied_by(module, instruction)) is not None:
            part.copied += times * copied.size * (copied.size >= _LARGE)
            part.cache_copies += times * (_sorted(copied.dims) in cached)
            part.table_copies += times * (_sorted(copied.dims) in tables)
        elif _sorted_of_main(instruction) & cached and not _updates_in_place(module, instruction):
            part.cache_rewrites += times
    part.launches = sum(kinds.values())
    part.kinds = dict(kinds)
    part.scopes = dict(scopes)
    part.collectives = dict(collectives)
    return part


def kernels_that_add(text: str, scopes: Sequence[str] | None = None) -> collections.Counter[str]:
    """Canonical texts of the kernels that add floating-point numbers, with the number of launches of each.

    Two programs with equal kernels compute the same logits, bit for bit, if the device tiles them in the same way.

    Args:
        text: Of an optimised HLO module.
        scopes: Named scopes of a round, all of the program when ``None``. The target's last sum, its logits, is in the
            scope ``verify``.
    """
    module = Module.parse(text)
    counts: collections.Counter[str] = collections.Counter()
    for instruction, times in module.launches(module.entry):
        if (scopes is None or _scope(instruction) in scopes) and module.adds(instruction):
            counts[module.canonical(instruction)] += times
    return counts


def collectives_of(module: Module, instruction: Instruction) -> list[str]:
    """The collectives that an instruction is, or that a fusion holds, as an all-reduce on GPUs is since jax 0.11."""
    ops = (part.op.removesuffix("-start") for part in (instruction, *module.inside(instruction)))
    return [op for op in ops if op in COLLECTIVES]


def is_of_the_host(instruction: Instruction) -> bool:
    """Whether it waits for the host, or moves something there or back."""
    if instruction.op.removesuffix("-start") in _TRANSFERS or _HOST_CALLS.search(instruction.target):
        return True
    return any(array.space == _HOST_MEMORY for array in instruction.arrays)


def copied_by(module: Module, instruction: Instruction) -> Array | None:
    """The array that a copy writes to main memory; ``None`` for what is no copy.

    Nor is what goes to a TPU's VMEM, or comes back from there, unless it went there as a copy and nothing more.
    """
    if instruction.op in ("copy", "copy-start", "transpose", "bitcast-convert"):
        written = instruction.arrays[0]
    elif instruction.op == "fusion" and all(part.op in _MOVES for part in module.inside(instruction)):
        written = max(instruction.arrays, key=lambda array: array.size)
    else:
        return None
    changed = (
        instruction.op == "copy-start"
        and instruction.arrays[1].space == _FAST_MEMORY
        and not instruction.operands.startswith("%copy")
    )
    return None if written.space == _FAST_MEMORY or changed else written


def _updates_in_place(module: Module, instruction: Instruction) -> bool:
    if "output_to_operand_aliasing" in instruction.operands or instruction.op in _PUTS:
        return True
    return any(part.op in _PUTS for part in module.inside(instruction))


def _scope(instruction: Instruction) -> str:
    return next((scope for scope in instruction.traced_from.split("/") if scope in SCOPES), "other")


def _sorted_of_main(instruction: Instruction) -> set[tuple[int, ...]]:
    """Shapes of what it writes to main memory; what was in a TPU's VMEM for a while comes back by ``copy-start``."""
    return {
        _sorted(array.dims)
        for array in instruction.arrays
        if array.space != _FAST_MEMORY and instruction.op != "copy-start"
    }


def _sorted(dims: Sequence[int]) -> tuple[int, ...]:
    """A shape whatever the order of its axes and however many of one element it has."""
    return tuple(sorted(dim for dim in dims if dim > 1))


def traffic(module: Module, instruction: Instruction, sizes: dict[str, int]) -> int:
    """Bytes that a launched instruction reads from and writes to main memory.

    An upper bound where a kernel decides at run time how much it reads: attention over a cache counts the whole cache.
    Gathers and slices count what they take, scatters and updates in place what they put. Reuse in a GPU's L2 cache is
    ignored. ``sizes`` are those of :func:`sizes_of`.
    """
    written = sum(array.size for array in instruction.arrays)
    inside = module.inside(instruction)
    if not inside:
        operands = _operands(instruction)
        if instruction.op in _PUTS:
            return 2 * sizes.get(operands[-1], 0)
        return written + (written if instruction.op in _TAKES else sum(sizes.get(name, 0) for name in operands))
    by_name = {part.name: part for part in inside}
    puts = [part for part in inside if part.op in _PUTS]
    for part in puts:
        update = by_name.get(_operands(part)[2 if part.op == "scatter" else 1])
        written += _size(update) - _size(part)
    return max(written, 0) + sum(_read(part, inside) for part in inside if part.op == "parameter")


def _read(parameter: Instruction, inside: Sequence[Instruction]) -> int:
    """Bytes that a fusion reads of one of its arguments."""
    names = {parameter.name}
    users = []
    for part in inside:  # in order, so that a renamed array is known before it is used
        if names.isdisjoint(_operands(part)):
            continue
        if part.op in _RENAMES:
            names.add(part.name)
        else:
            users.append(part)
    read = 0
    for user in users:
        of_first = _operands(user)[0] in names
        if user.op in _PUTS and of_first:
            continue
        if not (user.op in _TAKES and of_first):
            return _size(parameter)
        read += _size(user)
    return min(read, _size(parameter))


def sizes_of(module: Module) -> dict[str, int]:
    """Bytes of what every instruction of a program gives, by its name."""
    return {instruction.name: _size(instruction) for lines in module.computations.values() for instruction in lines}


def _operands(instruction: Instruction) -> list[str]:
    return _NAME.findall(instruction.operands.partition(")")[0])


def _size(instruction: Instruction | None) -> int:
    return 0 if instruction is None else sum(array.size for array in instruction.arrays)
