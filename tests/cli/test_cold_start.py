"""What a command loads before it works, and that a second run compiles nothing: counted, never timed."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eagle3_jax
from eagle3_jax import conversion

ROOT = Path(__file__).parent.parent.parent
OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
HEAVY = ("jax", "flax", "numpy", "transformers", "torch", "orbax", "optax", "tokenizers", "matplotlib")


def fresh(code: str, **environment: str) -> list[str]:
    """The lines that a new interpreter prints last on running this."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    given |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def loaded_by(code: str) -> set[str]:
    lines = fresh(f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))")
    return set(json.loads(lines[-1]))


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert eagle3_jax.__version__ == project["version"]


# Imports


def command(*arguments: str) -> str:
    return f"from eagle3_jax.cli import run\nassert run({list(arguments)}) == 0"


@pytest.mark.parametrize(
    "code",
    [
        "import eagle3_jax",
        command("--version"),
        *(command(*line.split(), "--help") for line in ("", "generate", "bench", "train head", "plan", "plan cost")),
        command("plan", "speedup"),
        command("plan", "cost", "--price-per-hour", "1.4", "--tokens-per-second", "1700"),
        # Misuse is told before anything is loaded.
        "import contextlib, io\nfrom eagle3_jax.cli import run\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n    assert run(['generate']) == 2",
    ],
)
def test_nothing_heavy_is_loaded_by(code):
    assert loaded_by(code) == set()


def test_the_entry_point_stands_before_the_parser_is_loaded():
    # An interruption in the first tenth of a second is met by it.
    assert fresh("import eagle3_jax.cli, sys\nprint('typer' in sys.modules)") == ["False"]


def test_decoding_loads_no_training():
    code = (
        "import eagle3_jax as e3\nfrom eagle3_jax.conversion import read_target\n"
        "e3.load_drafter(target=e3.load_target())"
    )
    assert loaded_by(code) >= {"jax", "flax", "numpy", "tokenizers"}
    assert not loaded_by(code) & {"orbax", "torch", "transformers", "matplotlib"}


@pytest.mark.parametrize("package", [eagle3_jax], ids=lambda package: package.__name__)
def test_names_for_type_checkers_and_for_programs_are_the_same(package):
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    static = {
        alias.name: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module != package.__name__
    }
    assert {name: f"{package.__name__}.{module}" for name, module in package._HOME.items()} == static
    assert set(package.__all__) - {"drafters"} == set(static)
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))


def test_a_name_that_is_not_there_is_an_attribute_error():
    for package in (eagle3_jax, conversion):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
            _ = package.nothing


@pytest.mark.parametrize("package", [eagle3_jax, conversion], ids=lambda package: package.__name__)
def test_no_public_name_is_a_modules_name_too(package):
    # Python sets an imported submodule on its package, over whatever has that name there.
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) <= {"drafters"}


# The compilation cache

GENERATE = ["generate", "--target", str(OFFICIAL / "target"), "--drafter", "none",
            "--prompt-ids", "[1, 17, 5]", "--max-new-tokens", "4", "--json"]  # fmt: skip
COUNTED = """
import json, jax
from eagle3_jax.cli import run
seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rsplit("/", 1)[-1]))
assert run({arguments}) == 0
print(json.dumps([seen.count("cache_misses"), seen.count("cache_hits"), jax.config.jax_compilation_cache_dir]))
"""


def compiled_by(*arguments: str, **environment: str) -> tuple[int, int, str | None]:
    """How many programs were compiled, how many taken from the cache, and where that is."""
    return tuple(json.loads(fresh(COUNTED.format(arguments=[*GENERATE, *arguments]), **environment)[-1]))


def test_a_second_run_compiles_nothing(tmp_path):
    home, named = tmp_path / "caches", tmp_path / "named"
    misses, hits, where = compiled_by(XDG_CACHE_HOME=str(home))
    assert misses > 0 and hits == 0
    assert Path(where) == home / "eagle3-jax" / "compiled"
    files = sorted(path.name for path in Path(where).iterdir())
    assert any(name.startswith("jit_generate") for name in files)
    assert compiled_by("--compilation-cache", where) == (0, misses, where)
    assert sorted(path.name for path in Path(where).iterdir()) == files
    # What an interrupted run left is compiled again, in silence: `fresh` refuses anything on the standard error.
    for path in Path(where).glob("jit_generate*"):
        path.write_bytes(path.read_bytes()[:100])
    compiled_by(XDG_CACHE_HOME=str(home))
    # Switched off, it is neither read nor written.
    assert compiled_by("--compilation-cache", "none", XDG_CACHE_HOME=str(named))[:2] == (0, 0)
    assert not named.exists()


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.glob("*-cache")}


def test_the_cache_keeps_to_its_size_and_drops_what_was_not_used_for_longest(tmp_path):
    kept, other = tmp_path / "kept", "another-program-cache"
    misses, _, _ = compiled_by("--compilation-cache", str(kept))
    programs = sizes(kept)
    most = sum(programs.values()) + 15_000  # a program compiled again is not of the same size
    for path in kept.glob("*-atime"):  # as an earlier release left it: nothing says what was used when
        path.unlink()
    (kept / other).write_bytes(bytes(50_000))
    first = next(name for name in programs if name.startswith("jit_generate"))
    (kept / first).unlink()
    limited = {"JAX_COMPILATION_CACHE_MAX_SIZE": str(most)}
    # One program has to be compiled again; to make room for it goes what no run has asked for, and nothing else.
    assert compiled_by("--compilation-cache", str(kept), **limited) == (1, misses - 1, str(kept))
    assert sizes(kept).keys() == programs.keys()
    assert compiled_by("--compilation-cache", str(kept), **limited) == (0, misses, str(kept))


def test_the_size_is_ours_unless_jax_was_told_one(tmp_path):
    code = f"""
import jax
from eagle3_jax.cli._compiled import keep_compiled_programs
keep_compiled_programs({str(tmp_path)!r})
print(jax.config.jax_compilation_cache_max_size)
"""
    assert fresh(code) == [str(2 * 2**30)]
    assert fresh(code, JAX_COMPILATION_CACHE_MAX_SIZE="5000") == ["5000"]


def test_two_processes_prune_one_directory(tmp_path):
    code = f"""
import warnings, jax, jax.numpy as jnp
from eagle3_jax.cli._compiled import keep_compiled_programs
keep_compiled_programs({str(tmp_path)!r})
warnings.simplefilter("error")
for size in range(1, 25):
    jax.block_until_ready(jax.jit(lambda x: x * 2)(jnp.ones(size)))
"""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    given |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_MAX_SIZE": "20000"}
    command = [sys.executable, "-W", "always", "-c", code]
    both = [subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, complaints = process.communicate(timeout=120)
        assert (process.returncode, complaints) == (0, "")
    assert 0 < sum(sizes(tmp_path).values()) <= 20000


def test_a_directory_that_jax_was_given_is_left_alone(tmp_path):
    own = str(tmp_path / "own")
    _, _, where = compiled_by(JAX_COMPILATION_CACHE_DIR=own, XDG_CACHE_HOME=str(tmp_path / "caches"))
    assert where == own
    assert not (tmp_path / "caches").exists()


def test_the_default_directory_follows_the_standard(monkeypatch, tmp_path):
    from eagle3_jax.cli._compiled import default_directory

    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (
        ("", tmp_path / ".cache"),
        ("relative/path", tmp_path / ".cache"),
        (str(tmp_path / "elsewhere"), tmp_path / "elsewhere"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert default_directory() == expected / "eagle3-jax" / "compiled"


def test_without_a_home_nothing_is_written_where_nobody_looks(monkeypatch, tmp_path):
    import jax

    from eagle3_jax.cli._compiled import keep_compiled_programs

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        jax.config.update("jax_compilation_cache_dir", None)
        try:
            keep_compiled_programs(None)
            assert jax.config.jax_compilation_cache_dir is None
        finally:
            jax.config.update("jax_compilation_cache_dir", before)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused_and_a_default_one_is_done_without(monkeypatch, tmp_path, capsys):
    import jax

    from eagle3_jax.cli import run
    from eagle3_jax.cli._compiled import keep_compiled_programs

    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert run([*GENERATE, "--compilation-cache", str(in_the_way)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: --compilation-cache {in_the_way}: cannot be written; give another directory or 'none'\n"

    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        keep_compiled_programs(None)
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
