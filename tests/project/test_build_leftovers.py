"""A build of the package takes nothing over from the build before."""

import importlib.util

import pytest
import setuptools
from paths import ROOT
from setuptools.command.build_py import build_py


@pytest.fixture
def setup_py(monkeypatch):
    """The module, without a build."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "315532800")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_compiler_that_fails_leaves_no_library_of_another_machine_in_the_wheel(
    setup_py, tmp_path, monkeypatch, capfd
):
    """Before: an aarch64 wheel with x86-64 libraries, and modules that were deleted."""
    lib = tmp_path / "dynamiccl/envs/nccl/plugin/lib"
    lib.mkdir(parents=True)
    (lib / "libnccl-tuner-dynamiccl.so").write_bytes(b"of the machine before")
    (tmp_path / "dynamiccl/envs/nccl/gone.py").write_text("")
    monkeypatch.setattr(build_py, "run", lambda self: (tmp_path / "dynamiccl").mkdir())
    monkeypatch.setenv("CC", "no-such-compiler")
    command = setup_py.WithPlugin(setuptools.Distribution())
    command.build_lib = str(tmp_path)
    command.run()
    assert "it will be compiled when first needed" in capfd.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["commit.txt"]
