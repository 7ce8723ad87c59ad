"""The plugin in an installation, and how NCCL is told where it is."""

import ctypes
import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from dynamiccl.agent.checks.doctor import checked, gather
from dynamiccl.envs.nccl.plugin import build
from dynamiccl.envs.nccl.plugin.bindings import take_slots_back
from dynamiccl.envs.nccl.plugin.build import LIBRARY, nccl_env, plugin_path


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


def test_a_plugin_that_cannot_be_loaded_is_told_by_the_loader_s_words(tmp_path, monkeypatch):
    """Before: "plugin built, no compiler needed", of one that needs a newer C library than the machine's."""
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    cached = plugin_path()
    assert build.load_fault() == "", "it is compiled at first use"
    (tmp_path / f"{LIBRARY}.build").write_text(build.build_of())
    (tmp_path / LIBRARY).write_bytes(b"of another machine")
    assert build.load_fault().startswith(f"{tmp_path / LIBRARY}: ")
    (tmp_path / LIBRARY).write_bytes(cached.read_bytes())
    assert build.load_fault() == ""
    monkeypatch.setenv("DYNAMICCL_PLUGIN", str(tmp_path / "gone.so"))
    assert "gone.so" in build.load_fault()


def test_a_linker_that_knows_no_optimization_of_the_whole_still_builds_the_plugin(tmp_path, monkeypatch):
    """clang without lld, say."""
    (cc := tmp_path / "cc").write_text(
        f'#!/bin/sh\ncase " $* " in *" {build.TOGETHER} "*) echo error: no plugin >&2; exit 1;; esac\nexec gcc "$@"\n'
    )
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    build.install_into(tmp_path / "lib")
    assert (tmp_path / "lib" / LIBRARY).stat().st_size > 10_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no installed library, and a compiler's name."""
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "INSTALLED", tmp_path / "lib")
    return tmp_path / "dynamiccl"


def compiles_as(monkeypatch, writes):
    """The compiler is ``writes(draft)``."""

    def compiler(command, **_):
        writes(Path(command[command.index("-o") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", compiler)


def test_two_hosts_with_one_home_and_one_process_number_build_at_the_same_time(cache, monkeypatch):
    """Containers: the launcher is process 1 in each. Before: half a library was renamed, and a traceback followed."""
    running = []

    def writes(draft):
        running.append(draft)
        draft.write_text("half")
        if len(running) == 1:
            assert plugin_path().read_text() == "whole"  # by the other host, within this moment
        draft.unlink(missing_ok=True)  # as linkers do
        draft.write_text("whole")

    compiles_as(monkeypatch, writes)
    assert plugin_path().read_text() == "whole" and len(running) == 2
    assert os.listdir(plugin_path().parent) == [LIBRARY]


def test_a_full_disk_is_said_in_one_line(cache, monkeypatch):
    def writes(draft):
        raise OSError(errno.ENOSPC, "No space left on device")

    compiles_as(monkeypatch, writes)
    with pytest.raises(build.PluginBuildError, match=r"No space left on device.*XDG_CACHE_HOME"):
        plugin_path()


def test_nodes_of_two_kinds_with_one_home_do_not_share_a_library(cache, monkeypatch):
    """One release of a compiler has one path and time on all of them. Before: the second node got the first's."""
    compiles_as(monkeypatch, lambda draft: draft.write_text("of this machine"))
    here, machine = plugin_path(), os.uname()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "uname", lambda: os.uname_result((*machine[:4], "another")))
        other_machine = plugin_path()
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert len({here, other_machine, plugin_path()}) == 3


def test_a_damaged_library_in_the_cache_is_told_too(cache, monkeypatch):
    """Before: "built at first use", of one that was there already and that nothing could load."""
    assert build.load_fault() == ""
    with monkeypatch.context() as stand_in:
        compiles_as(stand_in, lambda draft: draft.write_text("of another machine"))
        path = plugin_path()
    assert build.load_fault().startswith(f"{path}: ")
    assert checked(gather())["plugin"] == "built, but cannot be loaded"


PATH = f"/x/{LIBRARY}"


@pytest.mark.parametrize(
    ("release", "path", "named"),
    [
        (None, PATH, PATH),  # most releases take it, and where not the probe sees to it
        ((2, 26, 2), PATH, PATH),
        ((2, 27, 3), PATH, LIBRARY),
        ((2, 27, 5), PATH, PATH),
        ((2, 29, 7), PATH, PATH),
        ((2, 29, 7), "/" + 300 * "x" + PATH, LIBRARY),
    ],
)
def test_the_plugin_is_named_so_that_a_new_library_path_does_not_lose_it(monkeypatch, release, path, named):
    """Before: by its name, and `export LD_LIBRARY_PATH=...` in a job's script lost it without a word.

    Seen at 679c0ae, the plugin is named by its path, which NCCL 2.27.3 does not take; or by its name, which a new
    ``LD_LIBRARY_PATH`` loses: ``env`` prints a path, or a name.
    """
    monkeypatch.setattr(build, "nccl_release", lambda: release)
    for variable in ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"):
        monkeypatch.delenv(variable, raising=False)
        assert nccl_env(Path(path))[variable] == named
    assert nccl_env(Path(path))["LD_LIBRARY_PATH"].split(":")[0] == os.path.dirname(path)


def test_a_tuner_of_theirs_in_a_folder_of_our_name_is_asked_first_all_the_same(monkeypatch):
    """A virtual environment or a checkout is called dynamiccl. Before: their tuner was dropped without a word."""
    theirs = "/venvs/dynamiccl/lib/libnccl-tuner-site.so"
    for name in ("DYNAMICCL_PLUGIN", "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", theirs)
    assert nccl_env(Path(PATH))["DYNAMICCL_NEXT_TUNER"] == theirs
    for ours in (PATH, LIBRARY, "dynamiccl", "/copies/plugin.so"):
        monkeypatch.setenv("DYNAMICCL_PLUGIN", "/copies/plugin.so")
        monkeypatch.setenv("NCCL_TUNER_PLUGIN", ours)
        assert "DYNAMICCL_NEXT_TUNER" not in nccl_env(Path(PATH))


FOUND = """
import ctypes, os, sys
from pathlib import Path
from dynamiccl.envs.nccl.plugin.bindings import name_where_no_path_is_taken
name_where_no_path_is_taken(sys.argv[1])
named = {os.environ["NCCL_TUNER_PLUGIN"], os.environ["NCCL_PROFILER_PLUGIN"]}
for name in named:
    ctypes.CDLL(name).ncclTunerPlugin_v4
print(*named)
"""


def test_where_nccl_takes_no_path_it_finds_the_plugin_by_a_library_name_all_the_same():
    """As NCCL 2.27.3 asks the system for it: no folder of ours is on LD_LIBRARY_PATH."""
    env = {**os.environ, "DYNAMICCL_PLUGIN": str(plugin_path()), "LD_LIBRARY_PATH": "/nowhere"}
    env |= dict.fromkeys(("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"), str(plugin_path()))
    for release, said in (("2.27.3", LIBRARY), ("2.29.7", str(plugin_path())), ("-", str(plugin_path()))):
        out = subprocess.check_output([sys.executable, "-c", FOUND, release], env=env, text=True)
        assert out.split() == [said]


@pytest.mark.parametrize(
    ("variable", "value", "taken"),
    [
        ("NCCL_PROFILER_PLUGIN", "/opt/libnccl-profiler-inspector.so", True),
        ("NCCL_TUNER_PLUGIN", "libnccl-tuner-ofi.so", True),
        ("NCCL_PROFILER_PLUGIN", "/venvs/dynamiccl/lib/libnccl-profiler-inspector.so", True),
        ("NCCL_TUNER_PLUGIN", "/venvs/dynamiccl/lib/libnccl-tuner-ofi.so", True),
        ("NCCL_PROFILER_PLUGIN", "none", False),  # its user wants none
        ("NCCL_PROFILER_PLUGIN", "None", False),
        ("NCCL_PROFILER_PLUGIN", "", False),
        ("NCCL_PROFILER_PLUGIN", PATH, False),
    ],
)
def test_a_place_that_an_operator_has_taken_is_taken_back(monkeypatch, variable, value, taken):
    """A Slurm TaskProlog exports after our environment is set. Before: no collective was told, and nothing tuned."""
    for name in ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "DYNAMICCL_PLUGIN"):
        monkeypatch.setenv(name, PATH)
    monkeypatch.delenv("DYNAMICCL_NEXT_TUNER", raising=False)
    monkeypatch.setenv(variable, value)
    assert take_slots_back() == ({variable: value} if taken else {})
    assert os.environ[variable] == (PATH if taken else value)
    # A tuner of theirs is asked before ours.
    is_tuner = variable == "NCCL_TUNER_PLUGIN"
    assert os.environ.get("DYNAMICCL_NEXT_TUNER") == (value if is_tuner else None)
    os.environ.pop("DYNAMICCL_NEXT_TUNER", None)
    monkeypatch.delenv("DYNAMICCL_PLUGIN")
    monkeypatch.setenv(variable, value)
    assert take_slots_back() == {}  # nothing of ours was named
