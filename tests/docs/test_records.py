"""Every number and table on the pages is that of a committed record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import certificates
import chat_model
import equal_text
import experiments
import gpu
import policy_runs
import printed
import pytest
import speeds
import validated
import write_tables

from eagle3_jax.training.methods import RECIPES
from validation.runs import load

ROOT = Path(__file__).resolve().parent.parent.parent


def page(name: str) -> str:
    """A page as one line, so that a quotation may be broken anywhere."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", write_tables.tables())
def test_the_tables_of_a_page_are_their_records(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == write_tables.filled(text, write_tables.tables()[page]), (
        "run python docs/recorded/write_tables.py"
    )


def test_what_a_certificate_would_have_found_is_quoted_whole() -> None:
    sees = [
        "an acceptance 20 % too willing where drafts are likely",
        "acceptance where draft and target are 25 % apart",
    ]
    assert (
        certificates.reason({"verdict": "lossless", "sees": sees}) == "20 % too willing; 25 % apart"
    )


def check_quoted(name: str, *quotations: str) -> None:
    text = page(name)
    assert [words for words in quotations if words not in text] == [], name


def test_the_readme_quotes_the_h100() -> None:
    (chain,) = (
        row for report, row in gpu.rows() if (report["batch_size"], row["name"]) == (1, "chain K=5")
    )
    plain_steps = {
        name: gpu.FIGURES[name]["round_in_bases"]["median"] for name in ("chain", "verify 6")
    }

    check_quoted(
        "README.md",
        f"With version {gpu.RECORD['version']}, on one {gpu.RECORD['device']} in bfloat16",
        f"with K=5 writes {chain['decode_tokens_per_second']['median']:,.0f} tokens/s",
        f"{chain['ratio']['median']:.2f} times plain decoding",
        f"a round of K=5 takes {plain_steps['chain']:.2f} plain steps",
        f"a verification of 6 tokens {plain_steps['verify 6']:.2f} (random weights)",
    )

    copied = next(
        fact["tb_per_second"] for fact in gpu.RECORD["facts"] if fact["name"] == "bandwidth, copy"
    )
    read = gpu.FIGURES["step_bytes"] / gpu.FIGURES["plain"]["seconds_per_round"]["median"] / 1e12
    check_quoted("docs/gpu.md", f"A plain step reads {read / copied:.0%} of what a copy moves")


def test_the_page_quotes_the_h200() -> None:
    measured = gpu.H200["h200"]
    programs = [measured["bits"][f"programs of the {part}"] for part in ("prefill", "rounds")]
    assert {(result["values"], len(result["by other kernels"])) for result in programs} == {(25, 0)}

    comparisons = [
        result
        for name, result in measured["bits"].items()
        if not name.startswith(("programs", "clocks"))
    ]

    assert all(
        not result["texts that part"] and not result["arrays that differ"] for result in comparisons
    )
    ((texts, values),) = {(result["texts"], result["values"]) for result in comparisons}

    read = [measured["weights"]["step_bytes"][kind] for kind in ("fp8", "int8")]
    seconds = [
        measured["weights"][f"{kind}, plain"]["seconds_per_round"]["median"]
        for kind in ("fp8", "int8")
    ]
    copied = measured["weights"]["copy_bytes_per_second"]
    (share,) = {f"{count / time / copied:.0%}" for count, time in zip(read, seconds, strict=True)}

    quick = gpu.H200["validation"]
    assert {
        name for name, level in quick["levels"].items() if level["verdict"] == "passed (quick)"
    } == {"L3", "L4"}
    assert not quick["failed"]
    exact, rounded = (
        next(check["numbers"] for check in quick["passed"] if check["name"].startswith(name))
        for name in ("texts are equal but for ties", "texts in bfloat16")
    )

    check_quoted(
        "docs/gpu.md",
        f"all {len(comparisons)} comparisons are equal, each in {texts} texts of 128 new tokens and"
        f" in {values:,} keys",
        f"reads half the bytes, at {share} of a copy's speed",
        f"float32 {2 * exact['prompts']} texts of vLLM are equal in {exact['tokens']:,} tokens",
        f"In bfloat16 {rounded['texts_that_part']} of {2 * rounded['prompts']} part",
    )


def test_the_numbers_quote_the_chat_model() -> None:
    figures = chat_model.RECORD["rounds"]["figures"]
    milliseconds = lambda name: figures[name]["milliseconds"]
    prefills = [f"int8, prefill of {count}" for count in chat_model.PREFILLS]
    ratios = [
        f"{milliseconds(name) / milliseconds(f'{name}, products alone'):.2f}" for name in prefills
    ]

    divergence = chat_model.RECORD["divergence"]
    texts = chat_model.RECORD["texts"]
    starts = {
        (row["weights"], row["compiled_programs"]): row
        for row in chat_model.RECORD["start"]["rows"]
    }
    cold = starts["int8", "cold"]
    warm_seconds = starts["int8", "warm"]["first_character_seconds"]

    check_quoted(
        "docs/numbers.md",
        f"four rows in `int8`** spends {figures['int8, 4 rows']['outside_products']:.0%} outside"
        " products",
        f"A prefill takes {' and '.join(ratios)} times its products.",
        f"over {divergence['tokens']:,} tokens of greedy answers to {divergence['prompts']}"
        " prompts",
        "mean {mean_nats:.4f}, median {median_nats:.4f}, 99th percentile {p99_nats:.3f}.".format(
            **divergence
        ),
        f"likeliest token is the same for {divergence['same_likeliest_token']:.1%}.",
        f"Of the answers of 32 tokens, {divergence['equal_texts']} are equal.",
        f"the likeliest one of transformers: {texts['equal']} of {texts['prompts']} equal.",
        f"in `int8`: {cold['first_character_seconds']:.0f} s, and {warm_seconds:.0f} s once the"
        " programs are compiled.",
        f"Peak memory: {cold['peak_megabytes']:,} MB.",
    )


VALIDATION = load(validated.RECORD)


def test_the_record_of_the_validation_has_every_check_of_today() -> None:
    assert not validated.missing(VALIDATION)
    assert not VALIDATION.environment["git"]["dirty"]


def test_every_level_of_the_record_of_the_validation_passed() -> None:
    assert [line for line in VALIDATION.incomplete() if not line.startswith("L7 not run")] == []


def test_the_page_of_the_validation_quotes_its_record() -> None:
    run = validated.Record(VALIDATION)
    exact = ("the pair agrees with vllm token for token", "a random model of an odd shape")
    total = lambda name: sum(run.total("L5", words, name) for words in exact)
    (rounded,) = run.checks("L5", "the pair agrees with vllm in bfloat16")
    heads = run.checks("L8", "a head of every variation")
    largest_difference = max(abs(check.numbers["draft_logits_apart"]) for check in heads)

    sampled = [
        check.numbers
        for check in run.checks("L6", "sampled tokens follow")
        if check.numbers["τ at T=1"] > 1
    ]
    sequences, tokens = (
        run.total("L2", words, "tests") for words in ("sequences follow", "millions of tokens")
    )

    check_quoted(
        "docs/validation.md",
        f"{total('distinct_positions'):,} distinct positions in float32 ({total('tokens_scored'):,}"
        " scorings)",
        f"odd shapes: {total('disagreements')} disagreements, {total('ties')} ties. In bfloat16"
        " {distinct_positions:,} ({tokens_scored:,}): {ties} ties within two units in the"
        " last place, {disagreements} disagreements.".format(**rounded.numbers),
        f"{run.total('L3', 'refused drafts leave every bit', 'bytes_compared') / 1e6:.0f} MB of"
        " caches",
        f"{run.total('L3', 'speculation equals plain', 'tokens'):,} greedy tokens equal plain"
        " decoding",
        f"each of {run.total('L8', 'every round accepts what vllm accepts', 'rounds'):,} rounds"
        " accepts as many",
        f"{sum(check.numbers['rounds'] for check in heads):,} rounds of {len(heads)} kinds of"
        " EAGLE-3 head",
        f"agree to {largest_difference * 1e5:.1f}·10⁻⁵",
        f"whole sequences in {sequences} tests",
        f"from millions of tokens, in {tokens}.",
        f"{sum(numbers['tokens'] for numbers in sampled):,} tokens of a chain",
        f"largest |z| {max(numbers['largest_z'] for numbers in sampled):.1f}.",
    )


def test_the_gain_of_sampled_drafts_is_its_record() -> None:
    likeliest, sampled = (
        speeds.accepted(f"chain K=4, {way}", "code")["mean_acceptance_length"]
        for way in ("likeliest", "sampled")
    )
    for name in ("docs/command_line.md", "docs/choosing.md"):
        check_quoted(name, f"from {likeliest:.2f} to {sampled:.2f}")


def test_the_numbers_quote_llama_cpp() -> None:
    ratios = {name: row["ratio"]["median"] for name, row in speeds.CHAT.rows.items()}
    llama_cpp = ratios["llama.cpp, weights of the file"]
    check_quoted(
        "docs/numbers.md",
        f"{llama_cpp:.1f} times our plain decoding on the weights of the file",
        f"{llama_cpp / ratios['ngram+chain K=3']:.1f} times our fastest speculation",
        f"In float32 it is {ratios['llama.cpp, float32']:.2f} times as fast",
    )


def test_choosing_quotes_its_records() -> None:
    lengths = speeds.CHAT.rows
    tau = lambda name: lengths[name]["acceptance"]["mean_acceptance_length"]
    ratio = lambda row: f"{row['ratio']['median']:.2f}"
    chains = [(k, f"chain K={k}", lengths[f"chain K={k}"]) for k in (2, 3, 4, 5)]

    tree = lengths["tree N=8 G=4"]
    large = speeds.SMALL.rows["tree N=60 G=8"]
    head, ngram, both = (
        speeds.CHAT.rows[name] for name in ("chain K=3", "n-gram K=4", "ngram+chain K=3")
    )
    of_task = {part["task"]: part["ratio"]["value"] for part in ngram["tasks"]}
    shares = [
        f"{share:.2f}"[1:]
        for share in speeds.accepted("chain K=5", "code")["acceptance_per_position"]
    ]

    check_quoted(
        "docs/choosing.md",
        *(
            f"{k}: ({tau(name):.2f}, {row['verify_cost']:.2f}, {row['draft_cost']:.3f})"
            for k, name, row in chains
        ),
        f"a tree of 8 nodes has τ {tau('tree N=8 G=4'):.2f} and costs {tree['verify_cost']:.2f}"
        f" plain steps: {ratio(tree)} times plain decoding, less than a chain of three",
        f"costs the small pair {large['verify_cost']:.2f} plain steps: [{ratio(large)}]",
        f"K=3 reaches {ratio(head)} times plain decoding, n-grams {ratio(ngram)}",
        f"(`--drafter ngram+HEAD`) {ratio(both)} |",
        f"`ngram` reaches {of_task['humaneval']:.2f} times",
        f"on those of MT-bench {of_task['mt_bench']:.2f}",
        f"{shares[0]} accept the first token, {shares[2]} the third and {shares[4]} the fifth",
    )


def test_choosing_quotes_the_methods_at_equal_text() -> None:
    texts = equal_text.RECORD["texts"]
    speeds_of = equal_text.RECORD["speeds"]
    trained = equal_text.RECORD["trained"]
    (steps,) = {run["steps"] for run in trained}
    low, high = sorted({run["learning_rate"] for run in trained})
    assert {equal_text.runs(method)[0]["learning_rate"] for method in RECIPES} == {high}

    rows = speeds_of["rows"]
    prompts = speeds_of["prompts"]
    assert {row["same_texts"] for row in rows} == {prompts["code"] + prompts["prose"]}
    drafts = equal_text.drafts()
    fastest = sorted(rows, key=lambda row: -row["ratio"]["median"])
    assert fastest[0]["ratio"]["median"] < 1
    assert [(row["method"], row["draft"]) for row in fastest[:2]] == [
        ("mtp", "K=3"),
        ("medusa", "K=3"),
    ]
    costs = equal_text.verify_costs()
    assert [method for method in drafts if equal_text.tau(drafts[method][-1]) > costs["K=5"]] == [
        "mtp"
    ]
    draft_of = {
        (row["method"], row["draft"]): row["num_draft_steps"] * row["draft_cost"] for row in rows
    }
    assert draft_of["dflash2", "K=3"] > costs["K=3"]
    ratios = [
        row["ratio"]["median"]
        * (costs[row["draft"]] + draft_of[row["method"], row["draft"]])
        / equal_text.tau(row)
        for row in rows
    ]
    lower = [f"{100 * (1 - ratio):.0f}" for ratio in (max(ratios), min(ratios))]
    eagle3 = [
        f"{drafts['eagle3'][-1]['tasks'][kind]['mean_acceptance_length']:.2f}"
        for kind in ("code", "prose")
    ]
    shipped = [
        f"{speeds.accepted('chain K=5', kind)['mean_acceptance_length']:.2f}"
        for kind in ("code", "prose")
    ]
    check_quoted(
        "docs/choosing.md",
        f"{texts['texts']} texts with {texts['supervised_tokens']:,} tokens to learn",
        f"one pass of {steps} steps",
        f"the rates {low:g} and {high:g}",
        f"Every measured ratio is {lower[0]} to {lower[1]} % lower than the predicted one",
        f"has τ {' and '.join(shipped)} on code and prose with K=5, this one"
        f" {' and '.join(eagle3)}",
    )


def test_the_page_about_rollouts_says_what_its_record_shows() -> None:
    reached = {
        (line["step"], line["rows"], way)
        for line in policy_runs.timed()
        for way, measured in line["ways"].items()
        if way not in ("plain", "Tunix's vanilla sampler") and measured["speedup"]["median"] >= 1
    }
    assert {step for step, _, _ in reached} == {100}
    assert max(rows for _, rows, _ in reached) == 8
    assert all(way.startswith("refreshed head") for _, _, way in reached)

    ratios = [
        line["ways"][way]["speedup"]["median"]
        * (cost["v"] + cost["K"] * cost["c"])
        / line["ways"][way]["tokens_per_round"]
        for line in policy_runs.timed()
        for way, cost in line["costs"].items()
    ]
    furthest = max(*ratios, *(1 / ratio for ratio in ratios))
    check_quoted("docs/rollouts.md", f"by a factor of {furthest:.2f} at most")


def test_the_algorithm_quotes_the_run_of_its_pictures() -> None:
    run = json.loads((ROOT / "docs" / "pictures" / "real_run.json").read_text(encoding="utf-8"))
    assert run["same_as_plain"]
    check_quoted(
        "docs/algorithm.md",
        f"{run['rounds']} rounds wrote {run['new_tokens']} tokens, the first of them in the"
        " prefill.",
        f"τ is {run['mean_acceptance_length']:.2f} tokens per round",
        f"accepted {run['accepted']} of {run['drafted']} drafted tokens",
        f"The filled parts are accepted: {run['accepted_with_probability']:.2f} of the mass",
        f"Of its {run['tree_nodes']} nodes, the root included, {run['tree_accepted']} were"
        " accepted",
    )

    assert (run["tree_added"] == "bonus") == (
        "the target added a bonus token" in page("docs/algorithm.md")
    )


def test_the_peak_memory_of_a_command_is_never_that_of_the_process_that_times_it() -> None:
    with pytest.raises(ValueError, match="more memory than the command"):
        experiments.timed_command(["true"])


@pytest.mark.slow
def test_a_rehearsal_of_the_canonical_benchmark_has_every_row_of_the_table(tmp_path: Path) -> None:
    """It downloads a model; vLLM and llama.cpp, which are not asked, are named."""
    sizes = "--max-prompts 3 --max-new-tokens 4 --repeats 1"
    experiments.main(["speed", *sizes.split(), "--output", str(tmp_path / "speed.json")])
    record = json.loads((tmp_path / "speed.json").read_text())

    rivals = ("vLLM", "llama.cpp")
    expected = [name for name in speeds.CHAT.rows if not name.startswith(rivals)]
    assert [row["name"] for row in record["report"]["rows"]] == expected
    assert [line.partition(":")[0] for line in record["not_measured"]] == [*rivals]
    assert all(row["lossless"] for row in record["report"]["rows"])


@pytest.mark.slow
def test_the_first_program_prints_what_is_shown_below_it() -> None:
    """It downloads a model; ``docs/recorded/printed.py`` writes the page again."""
    _, words = printed.shown()
    assert printed.printed() == words


def test_pages_install_from_a_checkout() -> None:
    """The package is on no index."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md"]
    for path in pages:
        # The site is built in these.
        if not {"_build", "repository"} & {*path.parts}:
            text = path.read_text(encoding="utf-8")
            assert re.findall(r"pip install[^`#\n]*?\beagle3-jax\b", text) == [], path
