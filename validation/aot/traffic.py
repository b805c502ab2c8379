"""Bytes that a launched instruction reads from and writes to the device's main memory, from its HLO text.

An upper bound where a kernel decides at run time how much it reads: attention over a cache counts the whole cache.
Gathers and slices count what they take, scatters and updates in place what they put. Reuse in a GPU's L2 cache is
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from validation.aot.hlo import Instruction, Module

_NAME = re.compile(r"%([\w.\-]+)")
_TAKES = frozenset(("gather", "dynamic-slice", "slice"))
_PUTS = frozenset(("scatter", "dynamic-update-slice"))
_RENAMES = frozenset(("bitcast", "tuple", "get-tuple-element"))


def traffic(module: Module, one: Instruction, sizes: dict[str, int]) -> int:
    """Bytes of one launched instruction.

    Args:
        module: The program.
        one: The instruction.
        sizes: Bytes of every array, by the name of the instruction that gives it.
    """
    written = sum(array.size for array in one.arrays)
    inside = module.inside(one)
    if not inside:
        operands = _operands(one)
        if one.op in _PUTS:
            return 2 * sizes.get(operands[-1], 0)
        return written + (written if one.op in _TAKES else sum(sizes.get(name, 0) for name in operands))
    by_name = {part.name: part for part in inside}
    puts = [part for part in inside if part.op in _PUTS]
    for part in puts:
        update = by_name.get(_operands(part)[2 if part.op == "scatter" else 1])
        written += _size(update) - _size(part)
    return max(written, 0) + sum(_read(part, inside) for part in inside if part.op == "parameter")


def _read(parameter: Instruction, inside: Sequence[Instruction]) -> int:
    """Bytes that a fusion reads of one of its arguments."""
    names, users = {parameter.name}, []
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
    return {one.name: _size(one) for lines in module.computations.values() for one in lines}


def _operands(one: Instruction) -> list[str]:
    return _NAME.findall(one.rest.partition(")")[0])


def _size(one: Instruction | None) -> int:
    return 0 if one is None else sum(array.size for array in one.arrays)
