"""Compiles the core with mypyc where a C compiler is there; everything else is in pyproject.toml.

The core is what decides and simulates (`rrfp.compiled.SOURCES`). Its sources are installed beside
what is compiled and run where that is missing, so a failed compilation is no failed installation.
"""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from rrfp import compiled  # noqa: E402 - it is read from here, not from an installation


class BuildCore(build_ext):
    """Builds the extensions, and says beside them of which sources they are."""

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "unix":
            for extension in self.extensions:
                # Modules of one library call each other directly: some 5% of a simulated step.
                own = extension.extra_compile_args
                extension.extra_compile_args = [*own, "-fno-semantic-interposition"]
        super().build_extensions()

    def run(self) -> None:
        package = ROOT / "rrfp" if self.inplace else Path(self.build_lib) / "rrfp"
        # A module that is no longer compiled must not leave what it was compiled to.
        (package / compiled.DIGEST_FILE).unlink(missing_ok=True)
        for old in package.rglob(f"*.{sys.implementation.cache_tag}*.so"):
            old.unlink()
        super().run()
        built = [Path(self.get_ext_fullpath(each.name)) for each in self.extensions]
        if built and all(each.exists() for each in built):
            package.mkdir(parents=True, exist_ok=True)
            (package / compiled.DIGEST_FILE).write_text(compiled.digest(ROOT / "rrfp") + "\n")


def core() -> list[Extension]:
    """The extensions; none with `RRFP_COMPILED=0`, and none where mypyc is not there."""
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


setup(ext_modules=core(), cmdclass={"build_ext": BuildCore})
