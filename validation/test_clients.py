"""L6, from outside: clients that people use are pointed at our server.

The acceptance that ``vllm bench serve`` reads from ``/metrics`` is that of the answers themselves.
"""

from __future__ import annotations

import json

import pytest

from eagle3_jax import SpeculativeDecoder
from validation.engines.vllm.client import bench_serve, run
from validation.fixtures import vllm_interpreter
from validation.runs import Check
from validation.subject import Setting, Subject, some_prompts

pytestmark = pytest.mark.level("L6")

K = 3
NEW_TOKENS = 24
OPENAI = """
import json, sys
from openai import BadRequestError, OpenAI

url, prompt = sys.argv[1:3]
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
options = {"model": model, "prompt": json.loads(prompt), "max_tokens": 12, "temperature": 0}
text = client.completions.create(**options).choices[0].text
stream = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
chunks = list(stream)
try:
    client.completions.create(**options, n=2)
    refused = None
except BadRequestError as error:
    refused = error.param
streamed = "".join(choice.text for chunk in chunks for choice in chunk.choices)
usage = chunks[-1].usage.completion_tokens
print(json.dumps({"text": text, "streamed": streamed, "usage": usage, "refused": refused}))
"""


def test_clients_are_answered(
    pytestconfig: pytest.Config, check: Check, subject: Subject, setting: Setting
) -> None:
    pytest.importorskip("uvicorn", reason="our server needs uvicorn, of the extra `serve`")
    from eagle3_jax.server.local import serving

    python = str(vllm_interpreter(pytestconfig))
    target, drafter = subject.pair("float32")
    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=K)
    (prompt,) = some_prompts(subject, 1)
    expected = decoder.generate([prompt], max_new_tokens=12).texts[0]
    count = 8 if setting.quick else 48
    with serving(decoder, model=str(subject.target_directory), slots=4, capacity=256) as url:
        answer = json.loads(run([python, "-c", OPENAI, url, json.dumps(prompt)]))
        bench = bench_serve(
            python, url, "--model", str(subject.target_directory), "--dataset-name", "random",
            "--random-input-len", "24", "--random-output-len", str(NEW_TOKENS),
            "--num-prompts", str(count), "--max-concurrency", "8",
        )  # fmt: skip
    assert answer == {"text": expected, "streamed": expected, "usage": 12, "refused": "n"}
    check.number(**{name: bench[name] for name in ("completed", "failed", "total_output_tokens")})
    assert (bench["completed"], bench["failed"]) == (count, 0)
    assert bench["total_output_tokens"] == count * NEW_TOKENS
    check.number(acceptance_length=bench["spec_decode_acceptance_length"])
    assert 1 < bench["spec_decode_acceptance_length"] < 1 + K
