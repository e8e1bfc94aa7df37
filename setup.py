"""Compiles the core with mypyc if there is a C compiler; everything else is in pyproject.toml.

The core decides and simulates (`rrfp.compiled.sources`). Its sources are installed beside the
extensions and run without them, so a failed compilation does not fail the installation: the wheel
is then a pure one, `py3-none-any`.
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from rrfp import compiled  # noqa: E402 - it is read from here, not from an installation


class BuildCore(build_ext):
    """Builds the extensions, all or none, and writes the digest of their sources beside them."""

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "unix":
            for extension in self.extensions:
                # Direct calls between modules of one library save about 5% of a simulated step.
                own = extension.extra_compile_args
                extension.extra_compile_args = [*own, "-fno-semantic-interposition"]
        super().build_extensions()

    def run(self) -> None:
        package = ROOT / "rrfp" if self.inplace else Path(self.build_lib) / "rrfp"
        # Remove extensions of modules that are no longer compiled.
        (package / compiled.DIGEST_FILE).unlink(missing_ok=True)
        for old in package.rglob(f"*.{sys.implementation.cache_tag}*.so"):
            old.unlink()
        super().run()
        built = [Path(self.get_ext_fullpath(each.name)) for each in self.extensions]
        if built and all(each.exists() for each in built):
            package.mkdir(parents=True, exist_ok=True)
            (package / compiled.DIGEST_FILE).write_text(compiled.digest(ROOT / "rrfp") + "\n")
            return
        for path in built:
            path.unlink(missing_ok=True)


class BuildWheel(bdist_wheel):
    """Builds a pure wheel, `py3-none-any`, if the extensions were not compiled."""

    def run(self) -> None:
        self.run_command("build")
        if not any(Path(self.get_finalized_command("build").build_lib).rglob("*.so")):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


def core() -> list[Extension]:
    """The extensions; none with `RRFP_COMPILED=0` or without mypyc."""
    if os.environ.get(compiled.VARIABLE) == "0":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        print(f"rrfp: the core is not compiled ({error}); it runs interpreted")
        return []
    sources = [str(path.relative_to(ROOT)) for path in compiled.sources(ROOT / "rrfp")]
    extensions: list[Any] = mypycify(sources, opt_level="3", group_name="rrfp.core")
    for extension in extensions:
        extension.optional = True
    return extensions


setup(ext_modules=core(), cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel})
