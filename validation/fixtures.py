"""What is validated, and the rival that may be missing."""

from __future__ import annotations

import dataclasses

import pytest

from eagle3_jax.rivals.vllm.bridge import VLLM
from validation.setting import Setting
from validation.subject import Subject, choose
from validation.vllm.fixtures import NOTES, RELEASES


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config, setting: Setting) -> Subject:
    """Target, head and prompts; nothing is loaded before it is asked for, but the prompts are read."""
    reason = ""
    try:
        found = choose(
            gpu=setting.gpu,
            rehearsal=setting.rehearsal,
            target=setting.target,
            drafter=setting.drafter,
            prompt_files=setting.prompt_files,
        )
        pytestconfig.stash[NOTES]["subject"] = found.description
        pytestconfig.stash[RELEASES].add(found.release)
    except ValueError as error:
        reason = str(error)
    if reason:  # what was given does not fit; a traceback would bury the line that says why
        pytest.fail(reason, pytrace=False)
    return found


@dataclasses.dataclass(frozen=True)
class MaybeVLLM:
    """vLLM, or the reason why there is none, for checks of which it is only a part."""

    vllm: VLLM | None
    reason: str = ""


@pytest.fixture(scope="session")
def maybe_vllm(request: pytest.FixtureRequest) -> MaybeVLLM:
    try:
        return MaybeVLLM(request.getfixturevalue("vllm"))
    except pytest.skip.Exception as skipped:
        return MaybeVLLM(None, str(skipped.msg))
