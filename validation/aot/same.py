"""Whether two compiled programs compute the target by the same kernels.

python -m validation.aot.same A.hlo B.hlo      # files that hold :func:`text_of` two programs

Every value of an optimized program gets a hash of how it is computed: operation, type, attributes,
called computations, and the hashes of its operands (a Merkle tree). Leaves are arguments by name.
So values with one hash have the same bits wherever a kernel always gives the same bits. Names of
instructions, their order, metadata and numbers of parameters do not matter; copies are looked
through. The tokens of a block are the drafter's business: a row of the target's embedding is a
leaf, whichever row it is. Both programs must be of one checkout: a Pallas kernel contains the path
of its source.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from validation.aot.hlo import Instruction, Module

# A hash, or that of every element of a tuple. That of an argument, and of its copies and bitcasts,
# ends with its name.
Value = str | tuple[Any, ...]

_OUTPUTS = "// outputs: "
_WRITTEN = re.compile(r"(\.state)?\.cache\.layers\[\d+\]\.\w+")
_EMBEDDING = "target['embedding']"
_OUTPUT_MATRIX = "target['head']['kernel']"
_FEATURES_MATRIX = "['head']['fc']['kernel']"
_COMMUTATIVE = frozenset(("add", "multiply", "maximum", "minimum", "and", "or", "xor"))
_LOOKUPS = frozenset(("gather", "dynamic-slice"))
_CALLED = re.compile(r"%([\w.\-]+)")
# Attributes that say where a value comes from, when it is computed, or how much the compiler
# believes that it costs.
_WITHOUT_EFFECT = re.compile(
    r", metadata=\{[^}]*\}|, control-predecessors=\{[^}]*\}"
    r'|, frontend_attributes=\{xla\.no_invariant_operands="[^"]*"\}|"reification_cost":\[[^\]]*\],?'
    r'|"(force_earliest_schedule|operation_queue_id|device_type)":("[^"]*"|\w+),?'
)


def text_of(program: jax.stages.Compiled) -> str:
    """Returns the optimized HLO of a program, after a line with the names of its outputs.

    HLO does not have these names.
    """
    tree = jax.tree.unflatten(program.out_tree, range(program.out_tree.num_leaves))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return f"{_OUTPUTS}{json.dumps(names)}\n{program.as_text()}"


def compared(text_a: str, text_b: str) -> list[str]:
    """Returns the names of the values that :func:`differences` compares.

    They are every array of the target's cache, ``logits``, and ``features`` if both programs pass
    them to a head.

    Raises:
        ValueError: A text is not from :func:`text_of`, or the programs do not compute the same
            values.
    """
    names = list(_read(text_a).target)
    other_names = list(_read(text_b).target)
    if {*names} - {"features"} != {*other_names} - {"features"}:
        raise ValueError(
            f"the programs compute other values: {', '.join(names)}, and {', '.join(other_names)}"
        )
    return [name for name in names if name in other_names]


def differences(text_a: str, text_b: str) -> list[str]:
    """Returns the names of the compared values that two programs compute by other kernels.

    Raises:
        ValueError: As :func:`compared` does.
    """
    a = _read(text_a)
    b = _read(text_b)
    return [
        name
        for name in compared(text_a, text_b)
        if a.hashes[a.target[name]] != b.hashes[b.target[name]]
    ]


def first_difference(text_a: str, text_b: str) -> str:
    """Returns two instructions that differ although their operands are the same.

    Empty if no value differs.

    Raises:
        ValueError: As :func:`compared` does.
    """
    names = differences(text_a, text_b)
    if not names:
        return ""
    a = _read(text_a)
    b = _read(text_b)
    pair = a.target[names[0]], b.target[names[0]]
    while operands := _differing_operands(a, b, *pair):
        pair = operands
    steps = (a.steps[pair[0]], b.steps[pair[1]])
    return "\n".join(f"{step.name} = {step.type} {step.op}({step.operands}" for step in steps)


class _Program(NamedTuple):
    """What is computed once in a round, or in a program without a loop of rounds."""

    steps: dict[str, Instruction]
    hashes: dict[str, Value]  #: Of every step.
    target: dict[str, str]  #: The step of each value of the target that is compared.


def _differing_operands(
    a: _Program, b: _Program, step_a: str, step_b: str
) -> tuple[str, str] | None:
    """Returns the first operands of two instructions that differ.

    ``None`` if the instructions themselves do.
    """
    inputs = a.steps[step_a].inputs, b.steps[step_b].inputs
    if a.steps[step_a].op != b.steps[step_b].op or len(inputs[0]) != len(inputs[1]):
        return None
    return next(
        (pair for pair in zip(*inputs, strict=True) if a.hashes[pair[0]] != b.hashes[pair[1]]), None
    )


@functools.lru_cache(maxsize=16)
def _read(text: str) -> _Program:
    first_line = text.partition("\n")[0]
    if not first_line.startswith(_OUTPUTS):
        raise ValueError(
            "the text does not begin with the names of its outputs; write it with text_of"
        )
    module = Module.parse(text)
    hasher = _Hasher(module)
    entry = module.computations[module.entry]
    arguments = {step.literal: _argument(step) for step in entry if step.op == "parameter"}
    steps = {step.name: step for step in entry}
    hashes = hasher.hashes(module.entry, arguments)
    outputs = module.root(module.entry).inputs

    # Of a program with a loop of rounds, one trip: what it carries has the names of the arguments
    # that it began as.
    if loop := next((step for step in entry if module.is_open_loop(step)), None):
        body = loop.attribute(r"body=%?([\w.\-]+)")
        computed = module.root(body).inputs
        results = [_origin(steps, output) for output in outputs]
        outputs = [computed[step.index] if step.inputs == [loop.name] else "" for step in results]
        hashes = hasher.hashes(body, {"0": hashes[loop.inputs[0]]})
        steps = {step.name: step for step in module.computations[body]}

    names = json.loads(first_line.removeprefix(_OUTPUTS))
    target = {
        name: step for name, step in zip(names, outputs, strict=True) if _WRITTEN.fullmatch(name)
    }
    if not all(target.values()):
        raise ValueError("a round does not compute every array of the cache")

    def readers(matrix: str) -> list[str]:
        """Returns the launched steps that read a matrix."""
        return [
            step.name
            for step in steps.values()
            if step.is_launched and any(_is(hashes[name], matrix) for name in step.inputs)
        ]

    # With a tied output matrix the last reader is the product, after the lookup of the tokens.
    products = {
        "logits": readers(_OUTPUT_MATRIX) or readers(_EMBEDDING),
        "features": readers(_FEATURES_MATRIX),
    }
    target |= {name: steps_of[-1] for name, steps_of in products.items() if steps_of}
    return _Program(steps, hashes, target)


class _Hasher:
    """Hashes of the steps of computations."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._computations: dict[str, str] = {}

    def hashes(self, computation: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
        """Returns the hash of every step of a computation.

        ``parameters`` has the hashes of its parameters, by their numbers.
        """
        hashes: dict[str, Value] = {}
        types = {}
        for step in self.module.computations[computation]:
            types[step.name] = step.type
            inputs = [hashes[name] for name in step.inputs]
            if step.op == "parameter":
                hashes[step.name] = parameters[step.literal]
            elif step.op == "tuple":
                hashes[step.name] = tuple(inputs)
            elif step.op == "get-tuple-element" and isinstance(inputs[0], tuple):
                hashes[step.name] = inputs[0][step.index]
            elif step.op == "copy" and types[step.inputs[0]] == step.type:
                hashes[step.name] = inputs[0]
            elif step.op in ("copy", "bitcast"):
                hashes[step.name] = f"{step.type} {inputs[0]}"
            elif step.op == "fusion":
                hashes[step.name] = self._fusion(step, inputs)
            else:
                hashes[step.name] = self._operation(step, inputs)
        return hashes

    def _operation(self, step: Instruction, inputs: list[Value]) -> str:
        if step.op in _LOOKUPS and _is(inputs[0], _EMBEDDING):
            inputs = inputs[:1]
        if step.op in _COMMUTATIVE:
            inputs = sorted(inputs, key=str)
        return _hash(step.type, step.op, step.literal, self._attributes(step), *inputs)

    def _fusion(self, step: Instruction, inputs: list[Value]) -> Value:
        """A fusion's hash is that of its expression, in which operands have no order."""
        computation = step.attribute(r"calls=%?([\w.\-]+)")
        parameters = {str(number): value for number, value in enumerate(inputs)}
        result = self.hashes(computation, parameters)[self.module.root(computation).name]
        attributes = self._attributes(step, but=computation)
        # The elements of a loop fusion are computed each for itself, whatever the fusion computes
        # besides.
        if isinstance(result, tuple) and "kind=kLoop" in step.operands:
            return tuple(_hash(element, attributes) for element in result)
        return _hash(result, attributes)

    def _attributes(self, step: Instruction, but: str = "") -> str:
        """Attributes with hashes in place of the names of computations.

        Nothing is in place of the computation ``but``.
        """

        def called(match: re.Match[str]) -> str:
            if match[1] == but:
                return ""
            is_computation = match[1] in self.module.computations
            return self._computation(match[1]) if is_computation else match[0]

        return _CALLED.sub(called, _WITHOUT_EFFECT.sub("", step.attributes))

    def _computation(self, name: str) -> str:
        if name not in self._computations:
            steps = self.module.computations[name]
            parameters = {
                step.literal: f"{step.type} {step.literal}"
                for step in steps
                if step.op == "parameter"
            }
            self._computations[name] = _hash(
                self.hashes(name, parameters)[self.module.root(name).name]
            )
        return self._computations[name]


def _hash(*parts: Value) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _is(value: Value, argument: str) -> bool:
    """Whether a value is an argument, or a copy or another view of it."""
    return isinstance(value, str) and value.endswith(argument)


def _argument(parameter: Instruction) -> str:
    name = parameter.attribute(r'op_name="([^"]*)"').replace("\\", "")
    if not name:
        raise ValueError(
            f"the argument {parameter.name} has no name; was the text written without metadata?"
        )
    # A drafter that wraps another has the parameters of the latter there.
    return name.replace("['inner']", "")


def _origin(steps: Mapping[str, Instruction], name: str) -> Instruction:
    """Returns the step that computes a value which others copy, or pass in a tuple."""
    step = steps[name]
    while step.op in ("copy", "bitcast", "get-tuple-element"):
        source = steps[step.inputs[0]]
        if step.op == "get-tuple-element":
            if source.op != "tuple":
                return step
            source = steps[source.inputs[step.index]]
        step = source
    return step


def main(arguments: Sequence[str]) -> int:
    """Prints what differs in two files. Returns 1 if anything does, 2 if they do not compare."""
    try:
        first, second = (Path(argument).read_text("utf-8") for argument in arguments)
        names = compared(first, second)
        others = differences(first, second)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"{len(names) - len(others)} of {len(names)} values are computed by the same kernels")
    if others:
        print(f"others: {', '.join(others)}\nfirst difference:\n{first_difference(first, second)}")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
