"""``eagle3 certify``: whether a server's speculation is lossless."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.bench.tables import Table
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import JsonOption, announce_input
from eagle3_jax.cli._printing import Page, print_page
from eagle3_jax.cli._progress import spinner

if TYPE_CHECKING:
    from eagle3_jax.certify import Certificate, Test

EXAMPLE = """\b
Examples, the second with the key of the server in EAGLE3_API_KEY:
  eagle3 certify --url http://localhost:8000
  eagle3 certify --url https://host:8000 --model meta-llama/Llama-3.1-8B-Instruct --requests 4096 --output report"""

_FORM = "an object with 'prompt' (a text) or 'prompt_ids' (token ids)"
_DEFAULT_PROMPTS = (
    "The three most common mistakes of beginners are",
    "Once upon a time, in a village by the sea,",
    "def parse_date(text):\n",
    "Question: Why is the sky blue?\nAnswer:",
    "The history of the bicycle begins in",
    "To make bread, you need",
    "In 1969,",
    "SELECT name, count(*) FROM",
    "Dear Sir or Madam,\n\n",
    "My favourite book is",
    "The committee decided that",
    "Here is a list of ten animals:\n1.",
)


def certify(
    *,
    url: Annotated[str, typer.Option(help="Address of the server, such as http://localhost:8000.")],
    plain_url: Annotated[
        str | None,
        typer.Option(help="The same model without speculation, for a server that reports no log-probabilities."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model. Default: the first that it serves.")] = None,
    key: Annotated[str | None, typer.Option(envvar="EAGLE3_API_KEY", help="Key of the server.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts ('prompt', 'prompt_ids'). Default: twelve short texts.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Sampled answers; 0 for none.", min=0, max=1_000_000)] = 512,
    greedy_requests: Annotated[int, typer.Option(help="Greedy answers; 0 for none.", min=0, max=1_000_000)] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2, max=100_000)] = 32,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled answers.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Likeliest tokens to keep; 0 keeps all.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="Mass of the nucleus to keep.")] = 1.0,
    reports: Annotated[
        Literal["raw", "processed"],
        typer.Option(help="Reported log-probabilities: 'raw', or 'processed' after temperature, top-k and top-p."),
    ] = "raw",
    logprobs: Annotated[int, typer.Option(help="Log-probabilities of each position.", min=2, max=1000)] = 20,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.", min=1, max=4096)] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the first request.", min=0, max=2**31)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.1)] = 120.0,
    output: Annotated[
        Path | None, typer.Option(help="New directory for certificate.json and certificate.html.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge whether a server's speculation is lossless.

    Compares what the server writes with the distribution that it reports. No draft reaches the first token of an
    answer, so it shows whether the reports can be trusted.

    Exits with 0 if no test finds a deviation, with 1 if one does, and with 3 if the reports do not describe the
    sampler. Ctrl-C: what was answered until then is judged.
    """
    from eagle3_jax.certify import Client, Plan, Sampling
    from eagle3_jax.certify import certify as judge_server

    if not requests and not greedy_requests:
        raise Misuse("--requests 0 and --greedy-requests 0 leave nothing to judge")
    if output is not None and output.exists():
        raise Misuse(f"--output {output} exists already; name a new directory")
    plan = Plan(
        prompts=_read_prompts(prompts) if prompts is not None else _DEFAULT_PROMPTS,
        sampling=Sampling(temperature, top_k, top_p, processed=reports == "processed"),
        num_requests=requests,
        max_new_tokens=max_new_tokens,
        num_greedy=greedy_requests,
        num_reported=logprobs,
        concurrency=concurrency,
        seed=seed,
    )
    plan.sampling.check(logprobs)
    with spinner("asking the server who it is") as now:
        client = Client(url, model=model, key=key, timeout=timeout)
        plain = None if plain_url is None else Client(plain_url, key=key, timeout=timeout)
        certificate = judge_server(client, plan, plain=plain, on_progress=now.say)
    certificate = dataclasses.replace(certificate, command=_command())
    print_page(Page(certificate.to_json(), _text(certificate)), as_json=as_json)
    if output is not None:  # last, so that a full disk does not lose the verdict
        certificate.write(output)
    if certificate.verdict.exit_code:
        raise typer.Exit(certificate.verdict.exit_code)


def _read_prompts(path: Path) -> list[str | list[int]]:
    """Returns the texts or token ids of a file."""
    from eagle3_jax.files.prompts import read_requests

    announce_input(path)
    requests = read_requests(path, max_new_tokens=1)
    for request in requests:
        if not request.prompt or request.messages or request.options:
            raise Misuse(f"{request.where}expected {_FORM}, and nothing else that an answer depends on")
    return [request.prompt for request in requests]


def _command() -> str:
    """Returns the command line, without the key and the directory of the report."""
    hidden = ("--key", "--output")
    words = [
        word
        for before, word in itertools.pairwise(["eagle3", *sys.argv[1:]])
        if before not in hidden and word.partition("=")[0] not in hidden
    ]
    return shlex.join(["eagle3", *words])


def _text(certificate: Certificate) -> list[Any]:
    """Returns the verdict, the tests and the notes."""
    minutes, seconds = divmod(round(certificate.seconds), 60)
    requests = f"{certificate.requests} answers in {minutes} min {seconds} s"
    lost = f"; {certificate.lost} requests failed" if certificate.lost else ""
    return [
        f"{certificate.headline}: {certificate.reason}.\n",
        _table("Tokens that drafts may reach", certificate.tests, certificate.level),
        _table("First tokens, which no draft reaches", certificate.first_tokens, certificate.level),
        f"\n{requests}{lost}. A test fails below p = {certificate.level:.1g}.",
        *certificate.notes,
    ]


def _table(title: str, tests: list[Test], level: float) -> Table:
    rows: list[list[Any]] = []
    for test in tests:
        sees = "" if test.sees is None else f"{test.sees:.1%}"
        result = "failure" if test.p_value < level else "ok"
        rows.append([test.name, result, f"{test.p_value:.2g}", f"{test.tokens:,}", sees, test.detail])
    return Table(title, ["test", "result", "p", "tokens", "sees", "detail"], rows)
