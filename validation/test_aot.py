"""AOT: what a round becomes on an H200 or a TPU, compiled from shapes alone where there is neither.

A compiler's result, never a speed. Budgets are the counts in ``results/aot.json``, and five per
cent.

On a GPU the target's keys, values and logits are computed by the kernels of plain decoding in
blocks of the same size. They have the same bits if every kernel always gives the same bits, which
only a device can show.
"""

from __future__ import annotations

import collections
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest

from validation.aot.hlo import Counts, Module
from validation.aot.platforms import NotHere
from validation.aot.programs import OPTIONS, SERVED, SHIPPED, Case
from validation.aot.record import DEPTHS, Measured, budget, cases, load, measured
from validation.aot.same import compared, differences, first_difference
from validation.runs import Check
from validation.subject import CONTEXT

pytestmark = pytest.mark.level("AOT")

ALIASED = 0.99  # of the state's bytes
# Target, layers and batch with which drafts must leave the target's kernels as they are; every
# commit has the first.
SHAPES = [(SHIPPED, 12, 1), (SHIPPED, 12, 8), ("Llama-3.1-8B", 8, 1), ("Llama-3.1-8B", 8, 8)]
# Operations that add numbers, or may: a call is a kernel of Pallas or of a library.
PRODUCTS = ("dot", "custom-call")
SUMS = (*PRODUCTS, "reduce", "reduce-window", "all-reduce")
_MIB = 2**20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    platforms = option("--aot") or ["cuda:h200"]
    if "case" in metafunc.fixturenames:
        chosen = [
            case for platform in platforms for case in cases(platform, every=option("--aot-all"))
        ]
        metafunc.parametrize("case", chosen, ids=[case.name.replace(" ", "-") for case in chosen])
    elif "gpu" in metafunc.fixturenames:
        metafunc.parametrize("gpu", [name for name in platforms if name.startswith("cuda")][:1])
    if "target" in metafunc.fixturenames:
        metafunc.parametrize(
            ("target", "layers", "batch"), SHAPES if option("--aot-all") else SHAPES[:1]
        )


@functools.cache
def compile_once(case: Case) -> Measured | Exception:
    """Returns the facts of a case, or why it was not compiled; its checks share them."""
    try:
        return measured(case)[0]
    except (NotHere, ValueError, RuntimeError) as error:
        return error


@pytest.fixture
def compiled(case: Case) -> Measured:
    result = compile_once(case)
    if isinstance(result, NotHere):
        pytest.skip(str(result))
    if isinstance(result, Exception):
        pytest.fail(str(result), pytrace=False)
    return result


@pytest.fixture
def recorded(case: Case) -> Measured:
    row = load().get(case.name)
    if row is None:
        pytest.fail(f"no record has a row for {case.name}: {command(case)}", pytrace=False)
    return row


def test_the_host_has_no_part_in_it(compiled: Measured, recorded: Measured, check: Check) -> None:
    """No transfer and no call; a round chooses its kernels on the device, or as recorded."""
    counts = compiled.deep.counts
    check.number(host_operations=counts.host)
    assert counts.host == 0, "transfers to or calls of the host"
    assert counts.decisions <= recorded.deep.counts.decisions, (
        "loops and branches for which a GPU asks the host"
    )


def test_the_state_is_updated_in_place(compiled: Measured, check: Check) -> None:
    """``step`` returns its state in its argument's memory; in ``generate`` a loop has it."""
    if compiled.aliased is None:
        check.number(state="carried by the loop")
        return
    check.number(share_updated_in_place=round(compiled.aliased, 4))
    assert compiled.aliased >= ALIASED, (
        f"{compiled.aliased:.1%} of the state's bytes; is it still donated?"
    )


def test_nothing_large_is_copied(compiled: Measured, recorded: Measured, check: Check) -> None:
    """A round copies no cache and no embedding, and no more bytes than recorded."""
    counts = compiled.deep.counts
    check.number(copied_mib=round(counts.copied / _MIB, 1))
    assert counts.cache_writes == 0, "caches or embeddings are written, or sent, completely"
    assert counts.copied <= budget(recorded.deep.counts.copied), (
        f"{counts.copied:,} bytes are copied"
    )


def test_temporary_memory_is_bounded(compiled: Measured, recorded: Measured, check: Check) -> None:
    temporary = compiled.deep.memory["temp"]
    allowed = budget(recorded.deep.memory["temp"]) + _MIB
    check.number(
        temporary_mib=round(temporary / _MIB, 1), temporary_mib_allowed=round(allowed / _MIB, 1)
    )
    assert temporary <= allowed, (
        f"{temporary:,} bytes besides arguments and results, {allowed:,} are allowed"
    )


def test_launches_keep_within_their_budget(
    compiled: Measured, recorded: Measured, check: Check
) -> None:
    """Launches per layer, from two depths, and outside the layers."""
    check.number(launches_a_layer=compiled.per_layer(), launches_outside=compiled.outside())
    to_accept = f"to accept: {command(compiled.case)}"
    assert compiled.per_layer() <= budget(recorded.per_layer()), f"launches a layer; {to_accept}"
    assert compiled.outside() <= budget(recorded.outside()), f"launches outside; {to_accept}"


@pytest.mark.parametrize("family", SERVED)
def test_a_family_compiles_for_a_mesh_and_asks_the_host_for_nothing(
    gpu: str, family: str, check: Check
) -> None:
    """Its first layers; no cache is sent to other devices, and none is copied."""
    target, mesh = SERVED[family]
    counts, _ = compile_round(
        Case(platform=gpu, target=target, draft="chain3", mesh=mesh, layers=5)
    )
    check.number(launches=counts.launches)
    assert counts.host == 0, f"{counts}"
    # Loops over nodes carry recurrent states, which are not written in place.
    if family == "qwen3_next":
        assert counts.copied <= 8 * _MIB, f"{counts}"
    else:
        assert counts.cache_writes == 0, f"{counts}"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("program", "draft", "other_draft"),
    [
        ("run", "plain4", "chain3"),
        ("run", "chain3", "never3"),
        ("prefill", "plain4", "chain3"),  # without features, and with them
    ],
)
def test_drafts_leave_the_kernels_of_the_target_as_they_are(
    gpu: str, target: str, layers: int, batch: int, program: str, draft: str, other_draft: str,
    options: str, check: Check,
) -> None:  # fmt: skip
    """Every key, every value, the logits, and the features if both programs pass them to a head."""
    fixed = {
        "platform": gpu,
        "target": target,
        "layers": layers,
        "batch": batch,
        "program": program,
    }
    pair = [
        Case(**fixed, draft=name, options=options, prompt=CONTEXT, capacity=256)
        for name in (draft, other_draft)
    ]
    with ThreadPoolExecutor(len(pair)) as threads:
        texts = [text for _, text in threads.map(compile_round, pair)]

    names = compared(*texts)
    others = differences(*texts)
    check.number(values=len(names), by_the_same_kernels=len(names) - len(others))
    expected = [
        f".cache.layers[{layer}].{name}" for layer in range(layers) for name in ("keys", "values")
    ]
    assert names == [*expected, "logits", *["features"] * draft.startswith("chain")]
    assert not others, f"{', '.join(others)}\n{first_difference(*texts)}"


@pytest.mark.parametrize(("draft", "batch"), [("plain", 1), ("chain5", 8)])
def test_an_invariant_target_sums_in_its_own_kernels_only(
    gpu: str, draft: str, batch: int, check: Check
) -> None:
    """The compiler, which would choose by the number of rows, has no product or reduction."""
    layers = min(DEPTHS)
    fixed = {"program": "run", "layers": layers, "invariant": True, "prompt": CONTEXT}
    _, text = compile_round(Case(platform=gpu, draft=draft, batch=batch, **fixed))

    sums: collections.Counter[str] = collections.Counter()
    for computation in Module.parse(text).computations.values():
        for step in computation:
            scopes = step.attribute(r'op_name="([^"]*)"').split("/")
            # The logits are computed in the scope of verification, whose own reductions are maxima
            # and counts.
            is_of_target = "target" in scopes and step.op in SUMS
            if not is_of_target and not ("verify" in scopes and step.op in PRODUCTS):
                continue
            is_own = scopes[-1] == "pallas_call"
            sums[scopes[-2] if is_own else f"{step.op} in {'/'.join(scopes[-3:])}"] += 1

    check.number(**sums)
    assert sums == {
        "product": 4 * layers + 1,
        "norm": 2 * layers + 1,
        "flash_attention": layers,
        "join_splits": layers,
    }


@pytest.mark.parametrize("weights", ["fp8", "fp8-dynamic"])
def test_products_of_fp8_weights_are_what_the_compiler_makes_of_them(
    gpu: str, weights: str, check: Check
) -> None:
    """No FP8 kernel of the MLP is written in another type before it is multiplied."""
    case = Case(platform=gpu, draft="chain3", weights=weights, layers=min(DEPTHS))
    module = Module.parse(compile_round(case)[1])
    kernels = {(28672, 4096), (4096, 28672)}
    wide = [
        step
        for step, _ in module.steps(module.entry)
        if step.op in ("convert", "fusion", "copy")
        for array in step.arrays
        if array.dims in kernels and array.dtype in ("bf16", "f32")
    ]
    check.number(kernels_written_in_another_type=len(wide))
    assert not wide


@functools.cache
def compile_round(case: Case) -> tuple[Counts, str]:
    """Compiles a case at one depth, once for all checks. Returns its counts and its text."""
    try:
        row, text = measured(case, [None])
    except NotHere as reason:
        pytest.skip(str(reason))
    return row.deep.counts, text


def command(case: Case) -> str:
    """Returns the command that records a case."""
    names = ("platform", "target", "program", "draft", "batch")
    options = [f"--{name} {getattr(case, name)}" for name in names]
    options += ["--sampled"] * case.sampled + [f"--mesh {case.mesh}"] * bool(case.mesh)
    return f"python -m validation.aot {' '.join(options)} --record validation/results/aot.json"
