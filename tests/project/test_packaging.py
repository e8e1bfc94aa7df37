"""Wheels have the right tags, hints name a command that works, and CI calls `.ci/run`."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rrfp.requirements import install_hint

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TIMEOUT_S = 600
QUIETLY = ("-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation")


def build_wheel(directory: Path, compiler: str | None) -> str:
    """Build the wheel with this C compiler, or with the default one; returns its name."""
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.so", "*.sha256", "__pycache__")
    shutil.copytree(ROOT / "rrfp", source / "rrfp", ignore=ignored)
    environment = {name: value for name, value in os.environ.items() if name != "RRFP_COMPILED"}
    if compiler is not None:
        environment["CC"] = compiler
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *QUIETLY, "-w", str(directory), str(source)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel.name


@pytest.mark.timeout(TIMEOUT_S)
def test_a_wheel_without_a_compiler_is_for_every_platform(tmp_path: Path) -> None:
    name = build_wheel(tmp_path, "/bin/false")
    assert name.endswith("-py3-none-any.whl")
    target = tmp_path / "installed"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            *QUIETLY,
            "--target",
            str(target),
            tmp_path / name,
        ],
        check=True,
        timeout=TIMEOUT_S,
    )
    assert [*target.rglob("*.so")] == []
    code = "import rrfp, rrfp.schedule.dispatcher; from rrfp.compiled import core; "
    code += "print(rrfp.__file__, core())"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout
    assert printed == f"{target / 'rrfp' / '__init__.py'} interpreted\n"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_compiled_wheel_is_for_one_platform(tmp_path: Path) -> None:
    name = build_wheel(tmp_path, None)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.search(rf"-{tag}-{tag}-(linux|macosx).*\.whl$", name)


def hints() -> set[str]:
    """The extras that the code names in calls of `install_hint`."""
    calls = re.compile(r"install_hint\(['\"](\w+)['\"]\)")
    sources = (ROOT / "rrfp").rglob("*.py")
    return {extra for path in sources for extra in calls.findall(path.read_text())}


def test_hints_name_extras_that_exist() -> None:
    assert hints() >= {"cuda", "nixl", "tls", "report", "tokenizers"}
    assert hints() <= EXTRAS.keys()
    assert install_hint("ui") == "pip install '.[ui]' in a checkout of rrfp"


def test_no_message_names_a_registry_that_lacks_rrfp() -> None:
    named = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "rrfp").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
        if re.search(r"pip install ['\"]?rrfp", path.read_text())
    ]
    assert named == []


def test_ci_runs_its_script_with_actions_of_fixed_versions() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    actions = re.findall(r"uses: (\S+)", workflow)
    assert len(actions) == 2
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action) for action in actions)
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]
    assert re.findall(r"^ +(3\.\d+)$", workflow, re.MULTILINE) == ["3.12", "3.11"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
