"""What pyproject.toml cannot say: the module that ``import torch`` calls is a real file, and the plugin is compiled.

An editable installation would only point to the checkout, and where that is not mounted (a compute node) every ``import
torch`` of the environment would fail. So it gets a copy, beside the other installed modules. An installation that is
not editable has the C plugin in it, where there is a compiler; otherwise it is compiled when first needed.
"""

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LEAF = "dynamiccl_autoload"
# The same commit makes the same bytes: no file in a wheel has the time of its making. (1980: an archive knows no less.)
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


def plugin_build():
    """The module that compiles the plugin; the package that it is of is not installed yet."""
    spec = importlib.util.spec_from_file_location(
        "plugin_build", Path(__file__).parent / "envs/nccl/plugin/build.py"
    )
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


class WithData(Distribution):
    """Editable installations ask for this and install data files then; the base class has another name for it."""

    def has_data(self):
        """Whether there are data files."""
        return bool(self.data_files)


class ForThisMachine(Distribution):
    """Compiled code is of one platform."""

    def has_ext_modules(self):
        """Whether there is any."""
        return True


class ForAnyPython(bdist_wheel):
    """The compiled code knows nothing of Python: one wheel for all releases."""

    def get_tag(self):
        """(python, abi, platform): that which CC compiles for, e.g. linux_aarch64 by aarch64-linux-gnu-gcc."""
        tag = super().get_tag()[2]
        try:
            target = subprocess.check_output([*plugin_build().compiler(), "-dumpmachine"], text=True)
        except (RuntimeError, OSError, subprocess.CalledProcessError):
            return "py3", "none", tag
        return "py3", "none", tag.removesuffix(platform.machine()) + target.partition("-")[0]


class WithPlugin(build_py):
    """Compiles the plugin into the package that is being built."""

    def find_package_modules(self, package, package_dir):
        """As the base class, but what else lies beside the package at the root is not in it."""
        found = super().find_package_modules(package, package_dir)
        return [m for m in found if package != "dynamiccl" or m[1] in ("__init__", "__main__")]

    def run(self):
        """As the base class, then the plugin.

        What a build before has left goes first: it may be of another machine, or of modules that are no more.
        """
        shutil.rmtree(Path(self.build_lib) / "dynamiccl", ignore_errors=True)
        super().run()
        self._note_commit()
        build = plugin_build()
        try:
            build.install_into(Path(self.build_lib) / "dynamiccl/envs/nccl/plugin/lib")
        except (build.PluginBuildError, OSError) as error:
            print(f"dynamiccl: {error}; it will be compiled when first needed", file=sys.stderr)

    def _note_commit(self):
        """``dynamiccl --version`` names it; a source archive without a history has none."""
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            head = subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL)
            (Path(self.build_lib) / "dynamiccl/commit.txt").write_text(head)


if "editable_wheel" in sys.argv:
    folder = sysconfig.get_path("purelib", vars={"base": "", "platbase": ""}).strip("/")
    setup(distclass=WithData, data_files=[(folder, [f"{LEAF}.py"])])
else:
    setup(
        py_modules=[LEAF],
        distclass=ForThisMachine,
        cmdclass={"build_py": WithPlugin, "bdist_wheel": ForAnyPython},
    )
