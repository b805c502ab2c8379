"""What a command loads before it works, and that a second run compiles nothing: all counted."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import eagle3_jax
from eagle3_jax import conversion

ROOT = Path(__file__).parent.parent.parent
OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
HEAVY = (
    "jax",
    "flax",
    "numpy",
    "transformers",
    "torch",
    "orbax",
    "optax",
    "tokenizers",
    "jinja2",
    "matplotlib",
)


def fresh(code: str, **environment: str) -> list[str]:
    """The lines that a new interpreter prints last on running this."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))
    }
    variables |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def loaded_by(code: str) -> set[str]:
    lines = fresh(
        f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY} if name in"
        " sys.modules]))"
    )
    return set(json.loads(lines[-1]))


# Imports


def command(*arguments: str) -> str:
    return f"from eagle3_jax.cli import run\nassert run({list(arguments)}) == 0"


def test_help_and_misuse_load_nothing_heavy():
    lines = (
        "--version", "generate --help", "chat --help", "bench --help", "train head --help",
        "plan speedup"
    )  # fmt: skip
    misuse = "with contextlib.redirect_stderr(io.StringIO()):\n    assert run(['generate']) == 2"
    commands = "\n".join(command(*line.split()) for line in lines)
    assert loaded_by(f"import contextlib, io\nimport eagle3_jax\n{commands}\n{misuse}") == set()


def test_decoding_loads_no_training():
    code = (
        "import eagle3_jax as e3\nfrom eagle3_jax.conversion import read_target\n"
        "e3.load_drafter(target=e3.load_target())"
    )
    assert loaded_by(code) >= {"jax", "flax", "numpy", "tokenizers"}
    assert not loaded_by(code) & {"orbax", "torch", "transformers", "jinja2", "matplotlib"}


def test_every_public_name_is_found_and_no_other():
    for name in eagle3_jax.__all__:
        assert getattr(eagle3_jax, name) is not None
    assert len(eagle3_jax.__all__) > 50 and set(eagle3_jax.__all__) <= set(dir(eagle3_jax))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = eagle3_jax.nothing


@pytest.mark.parametrize("package", [eagle3_jax, conversion], ids=lambda package: package.__name__)
def test_no_public_name_is_a_modules_name_too(package):
    # Python sets an imported submodule on its package, over whatever has that name there.
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) <= {"drafters"}


# The compilation cache

GENERATE = [
    "generate", "--target", str(OFFICIAL / "target"), "--drafter", "none",
    "--prompt-ids", "[1, 17, 5]", "--max-new-tokens", "4", "--json",
]  # fmt: skip
COUNTED = """
import json, jax
from eagle3_jax.cli import run
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rsplit("/", 1)[-1]))
assert run({arguments}) == 0
counts = [seen.count("cache_misses"), seen.count("cache_hits")]
print(json.dumps([*counts, jax.config.jax_compilation_cache_dir]))
"""


def compiled_by(*arguments: str, **environment: str) -> tuple[int, int, str | None]:
    """How many programs were compiled, how many taken from the cache, and where that is."""
    return tuple(
        json.loads(fresh(COUNTED.format(arguments=[*GENERATE, *arguments]), **environment)[-1])
    )


def test_a_second_run_compiles_nothing(tmp_path):
    home = tmp_path / "caches"
    named = tmp_path / "named"
    misses, hits, where = compiled_by(XDG_CACHE_HOME=str(home))
    assert misses > 0 and hits == 0
    assert Path(where) == home / "eagle3-jax" / "compiled"
    files = sorted(path.name for path in Path(where).iterdir())
    assert any(name.startswith("jit_step") for name in files)

    assert compiled_by("--compilation-cache", where) == (0, misses, where)
    assert sorted(path.name for path in Path(where).iterdir()) == files

    # What an interrupted run left is compiled again, in silence: `fresh` refuses anything on the
    # standard error.
    for path in Path(where).glob("jit_step*"):
        path.write_bytes(path.read_bytes()[:100])
    compiled_by(XDG_CACHE_HOME=str(home))

    # Switched off, it is neither read nor written.
    assert compiled_by("--compilation-cache", "none", XDG_CACHE_HOME=str(named))[:2] == (0, 0)
    assert not named.exists()


def test_a_stream_compiles_each_program_once(tmp_path):
    """The prefill and the round are compiled side by side, and their calls find them."""
    code = """
import eagle3_jax as e3
from eagle3_jax.measure.timing import CompileClock
e3.keep_compiled_programs({where!r})
target = e3.load_target()
decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), num_speculative_tokens=2)
with CompileClock() as clock:
    chunks = list(decoder.stream("def fibonacci(n):", max_new_tokens=12))
print(clock.programs, clock.num_read)
text = decoder.generate("def fibonacci(n):", max_new_tokens=12).texts[0]
assert "".join(piece for chunk in chunks for piece in chunk.pieces) == text
"""
    programs, num_read = map(int, fresh(code.format(where=str(tmp_path)))[0].split())
    assert programs > 2 and num_read == 0
    programs, num_read = map(int, fresh(code.format(where=str(tmp_path)))[0].split())
    assert num_read == programs
    names = [path.name for path in tmp_path.glob("*-cache")]
    for program in ("jit_prefill", "jit_step", "jit_generate"):
        assert sum(name.startswith(program) for name in names) == 1


@pytest.mark.parametrize("limit", [None, "5000"])
def test_a_size_and_a_directory_that_jax_was_given_stay(tmp_path, limit):
    code = """
import jax
from eagle3_jax.devices.compilation import keep_compiled_programs
keep_compiled_programs(None)
print(jax.config.jax_compilation_cache_max_size, jax.config.jax_compilation_cache_dir)
"""
    home = str(tmp_path / "home")
    directory = str(tmp_path / "own")
    if limit is None:
        program = tmp_path / "home" / "eagle3-jax" / "compiled" / "jit_f-1-cache"
        program.parent.mkdir(parents=True)
        program.touch()
        assert fresh(code, XDG_CACHE_HOME=home) == [f"{2 * 2**30} {home}/eagle3-jax/compiled"]
        # Without the time of its last use, JAX before 0.12 would write nothing into this directory.
        assert program.with_name("jit_f-1-atime").exists()
    else:
        variables = {
            "JAX_COMPILATION_CACHE_MAX_SIZE": limit,
            "JAX_COMPILATION_CACHE_DIR": directory,
        }
        assert fresh(code, XDG_CACHE_HOME=home, **variables) == [f"{limit} {directory}"]

    (tmp_path / "file").touch()
    # The command works without a cache.
    assert fresh(code, XDG_CACHE_HOME=str(tmp_path / "file"))[0].endswith(" None")


def test_the_default_directory_follows_the_standard(monkeypatch, tmp_path):
    from eagle3_jax.files.writing import cache_directory

    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory("compiled") is None  # a user without a home directory has no cache
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, expected in (
        ("", tmp_path / ".cache"),
        ("relative/path", tmp_path / ".cache"),
        (str(tmp_path / "elsewhere"), tmp_path / "elsewhere"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory("compiled") == expected / "eagle3-jax" / "compiled"
