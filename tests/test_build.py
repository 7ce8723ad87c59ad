"""The plugin in an installation: in the package, one library under both names; and a cache that is kept small."""

import ctypes
import os
import subprocess
import sys
import time

import pytest
from dynamiccl.envs.nccl import build

BOTH = """
import ctypes, sys
libraries = [ctypes.CDLL(f"libnccl-{kind}-dynamiccl.so") for kind in sys.argv[1:]]
for symbol in ("ncclProfiler_v5", "ncclTunerPlugin_v5"):
    assert all(ctypes.c_void_p.in_dll(library, symbol).value for library in libraries)
print(len({ctypes.cast(library.dynamiccl_generation, ctypes.c_void_p).value for library in libraries}))
"""


@pytest.mark.parametrize("order", [("profiler", "tuner"), ("tuner", "profiler")])
def test_an_installed_plugin_is_one_library_under_both_names(tmp_path, order):
    """Two copies would not share a table. By name, as NCCL opens them, whichever comes first."""
    build.install_into(tmp_path)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", BOTH, *order], env=env, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


def test_the_installed_plugin_is_taken_where_it_is_of_these_sources(tmp_path, monkeypatch):
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    cached = build.plugin_path()
    assert cached.parent != tmp_path
    build.install_into(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")  # a compute node has none
    assert build.plugin_path() == tmp_path / build.LIBRARY
    library = ctypes.CDLL(str(build.plugin_path()))
    library.dynamiccl_build.restype = ctypes.c_char_p
    assert library.dynamiccl_build().decode() == build.build_of()
    (tmp_path / f"{build.LIBRARY}.build").write_text("of other sources")
    with pytest.raises(build.PluginBuildError, match="no C compiler"):
        build.plugin_path()


def test_builds_that_nobody_uses_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "none")
    cache = tmp_path / "dynamiccl"
    for name, days in (("old", 31), ("recent", 29)):
        (cache / name).mkdir(parents=True, mode=0o700)
        os.utime(cache / name, (time.time() - days * 86400,) * 2)
    cache.chmod(0o700)
    path = build.plugin_path()
    assert {p.name for p in cache.iterdir()} == {"recent", path.parent.name}
    os.utime(path.parent, (0, 0))
    assert build.plugin_path() == path and time.time() - path.parent.stat().st_mtime < 60  # used: kept
