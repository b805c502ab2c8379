"""Builds the wheel, installs it alone into a fresh environment, and uses it there.

``python tests/helpers/wheel.py`` (``make wheel-check``) needs what pip needs, so it is not a
test of the fast suite. It takes about a minute when pip has the packages at hand. Before a release
``--extras plot,convert,gguf,serve,tunix,cuda --sdist`` does it with each extra, and from the sdist.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LARGEST = 57e6  # bytes of a wheel; the bundled pair is 25 MB of it, and the head of SmolLM2 29 MB

IMPORT_ALL = """
import importlib, pkgutil, eagle3_jax
for module in pkgutil.walk_packages(eagle3_jax.__path__, "eagle3_jax."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # `eagle3 serve` and rollouts need their extras
        assert error.name in ("starlette", "uvicorn", "prometheus_client", "tunix"), module.name
assert "site-packages" in eagle3_jax.__file__
assert "eagle3_jax.conversion.targets" in __import__("sys").modules
"""
PICKLE = """
import pathlib, torch
from eagle3_jax import conversion
from eagle3_jax.files.sources import bundled
from safetensors.torch import load_file
folder = pathlib.Path("pickled")
folder.mkdir()
torch.save(load_file(bundled("target") / "model.safetensors"), folder / "pytorch_model.bin")
(folder / "config.json").write_text((bundled("target") / "config.json").read_text())
assert conversion.read_target(folder).config == conversion.read_target(bundled("target")).config
"""


SERVE = """
import httpx
import eagle3_jax as e3
from eagle3_jax.server.local import serving
target = e3.load_target()
decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target))
with serving(decoder, model="pair", slots=1, capacity=64) as url:
    body = {"model": "pair", "prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=300).json()
assert answer["choices"][0]["text"], answer
"""


class Environment:
    """A fresh virtual environment and an empty directory to work in."""

    def __init__(self, folder: Path, name: str) -> None:
        self.bin = folder / name / "bin"
        self.work = folder / f"{name}-work"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)

    def pip(self, *arguments: object) -> None:
        command = [
            self.bin / "python", "-m", "pip", "-q", "--disable-pip-version-check",
            *map(str, arguments),
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    def run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.bin / program, *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.work, env=environment, capture_output=True, text=True
        )

    def works(self, program: str, *arguments: object) -> str:
        done = self.run(program, *arguments)
        assert done.returncode == 0, (program, arguments, done.stdout, done.stderr)
        return done.stdout

    def names_extra(self, extra: str, *arguments: object) -> None:
        """Checks that a command fails with one line that names the missing extra."""
        done = self.run("eagle3", *arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert f"eagle3-jax[{extra}]" in done.stderr, done.stderr


def check_contents(wheel: Path, sdist: Path) -> None:
    """Checks that the files of the wheel and of the sdist are exactly those that users need."""
    assert wheel.stat().st_size < LARGEST, wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = listed.stdout.split("\n")

    # `conversion` is at the top of the repository and is installed as a part of the library, where
    # no module of a user's own can stand in its way.
    expected = {name for name in tracked if name.startswith("eagle3_jax/")} - {
        "eagle3_jax/conversion"
    }
    expected |= {f"eagle3_jax/{name}" for name in tracked if name.startswith("conversion/")}
    assert inside == expected, inside ^ expected

    assert {
        "eagle3_jax/assets/target/model.safetensors",
        "eagle3_jax/assets/eagle3/config.json",
    } <= inside

    with tarfile.open(sdist) as archive:
        unpacked = {name.partition("/")[2] for name in archive.getnames()}
    assert inside <= unpacked, inside - unpacked
    top = {Path(name).parts[0] for name in unpacked}
    promised = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]) | {
        "pyproject.toml",
        "PKG-INFO",
    }
    assert promised <= top <= promised | {".gitignore"}, top ^ promised


def check_alone(fresh: Environment) -> None:
    """Generates, inspects, plans and converts without extras; errors name the missing one."""
    fresh.works("python", "-c", IMPORT_ALL)
    # A user's own module of that name, in the directory that Python looks into first.
    (fresh.work / "conversion.py").write_text("raise ImportError('this is not the library')")
    fresh.works("python", "-c", "import eagle3_jax as e3; e3.load_drafter(target=e3.load_target())")

    row = json.loads(
        fresh.works("eagle3", "generate", "def f(x):", "--max-new-tokens", "8", "--json")
    )
    assert row["token_ids"] and row["text"], row

    pair = [json.loads(line) for line in fresh.works("eagle3", "inspect", "--json").splitlines()]
    assert [model["loadable"] for model in pair] == [True, True]
    target, head = (model["source"] for model in pair)
    assert "site-packages" in target

    assert json.loads(fresh.works("eagle3", "plan", "memory", "--json"))["fits"] is True
    fresh.works("eagle3", "convert", head, "head", "--to", "vllm", "--target", target)

    pickled = fresh.work / "pickle"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    fresh.names_extra("convert", "inspect", pickled)


def check_certificates(fresh: Environment, wheel: Path) -> None:
    """Runs the command of certificates where only numpy, scipy and httpx are."""
    fresh.pip("install", "numpy", "scipy", "httpx")
    fresh.pip("install", "--no-deps", wheel)
    done = fresh.run("python", "-m", "eagle3_jax.certify", "--url", "http://127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.startswith("error: no server answers"), done


# What shows that an extra brings what it promises.
PROGRAMS = {
    "plot": "import jinja2, matplotlib",
    "convert": PICKLE,
    "gguf": "import gguf, eagle3_jax.conversion.gguf",
    "serve": SERVE,
    "tunix": "from eagle3_jax.tunix import SpeculativeRollout",
    "cuda": "",  # resolved, not installed: it is gigabytes, and needs a GPU
}


def check_extra(fresh: Environment, wheel: Path, extra: str) -> None:
    """Installs the wheel with an extra, and uses what it brings."""
    source = f"{wheel}[{extra}]"
    if not PROGRAMS[extra]:
        fresh.pip("install", "--dry-run", source)
        return
    fresh.pip("install", "--no-compile", source)
    fresh.works("python", "-m", "pip", "check")
    fresh.works("python", "-c", PROGRAMS[extra])


def main() -> None:
    """Builds, inspects, installs and uses the wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help=f"some of {','.join(PROGRAMS)}")
    parser.add_argument("--sdist", action="store_true", help="install and use the sdist, too")
    options = parser.parse_args()
    extras = [extra for extra in options.extras.split(",") if extra]
    if unknown := set(extras) - set(PROGRAMS):
        parser.error(f"unknown {', '.join(unknown)}; the extras are {', '.join(PROGRAMS)}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        builder = Environment(folder, "build")
        builder.pip("install", "--no-compile", *PROJECT["build-system"]["requires"])
        build = [builder.bin / "python", "-m", "hatchling", "build", "-d", folder / "dist"]
        subprocess.run(build, cwd=ROOT, check=True)

        (wheel,) = (folder / "dist").glob("*.whl")
        (sdist,) = (folder / "dist").glob("*.tar.gz")
        check_contents(wheel, sdist)
        print("built, and holds what it should", flush=True)

        fresh = Environment(folder, "fresh")
        fresh.pip("install", "--no-compile", wheel)
        fresh.works("python", "-m", "pip", "check")
        check_alone(fresh)
        print("generates, inspects, plans and converts", flush=True)
        check_certificates(Environment(folder, "bare"), wheel)
        print("certifies with numpy, scipy and httpx alone", flush=True)

        if options.sdist:
            from_source = Environment(folder, "sdist")
            from_source.pip("install", "--no-compile", sdist)
            check_alone(from_source)
            print("does so from the sdist", flush=True)
        for extra in extras:
            check_extra(Environment(folder, extra), wheel, extra)
            print(f"{extra} brings what it promises", flush=True)


if __name__ == "__main__":
    main()
