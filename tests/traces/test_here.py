"""Facts of the machine: each source fails in turn, and the job starts all the same."""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import invoke, start
from dynamiccl.agent.daemon.launcher import Plan
from dynamiccl.agent.daemon.memory import FACTS, Memory
from dynamiccl.agent.report.outputs import default_url
from dynamiccl.envs.nccl.plugin import build, installed
from dynamiccl.envs.nccl.steps import nvml
from dynamiccl.traces import header, here
from paths import DATA


class Started(Exception):
    """The job would begin now."""


def fails(error):
    def call(*_args, **_options):
        raise error

    return call


def told_of(package, version):
    """A metadata.version that knows one package, and fails as a folder without METADATA makes it fail."""
    plain = metadata.version

    def call(name):
        return version(name) if name == package else plain(name)

    return call


OWN_FOLDERS = (str(Path.home() / ".cache"), str(Path.home() / ".local"))
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
DENIED = PermissionError(errno.EACCES, "Permission denied")


def fails_in_own_folders(call, error):
    """``call``, which fails for the user's folders of caches and data."""

    def or_fail(path, *args, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(OWN_FOLDERS):
            raise error
        return call(path, *args, **options)

    return or_fail


NO_ENTRY = RuntimeError("Could not determine home directory.")
#: Source -> (object, attribute, what it does when asked). Each stands for machines that users have.
SOURCES = {
    "home": (Path, "home", fails(NO_ENTRY)),
    "expanduser": (Path, "expanduser", fails(NO_ENTRY)),
    "user's home in words": (os.path, "expanduser", lambda path: path),
    "temp folder": (
        tempfile,
        "gettempdir",
        fails(FileNotFoundError(errno.ENOENT, "No usable temporary directory")),
    ),
    "current folder": (os, "getcwd", fails(FileNotFoundError(errno.ENOENT, "No such file or directory"))),
    "package version": (
        metadata,
        "version",
        fails(AttributeError("'NoneType' object has no attribute 'get'")),
    ),
    "package version is nothing": (metadata, "version", lambda _name: None),
    "package metadata": (metadata, "distribution", fails(KeyError("Version"))),
    "where PyTorch lies": (util, "find_spec", fails(ValueError("torch.__spec__ is None"))),
    "machine": (os, "uname", fails(PermissionError(errno.EPERM, "no"))),
    "host": (platform, "node", fails(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"))),
    "kernel": (platform, "release", fails(OSError(errno.EPERM, "no"))),
    "free space": (shutil, "disk_usage", fails(OSError(errno.ENOSYS, "no"))),
    "terminal": (shutil, "get_terminal_size", lambda *_: os.terminal_size((0, 0))),
    "links": (os, "symlink", fails(OSError(errno.EOPNOTSUPP, "no links"))),
    "links of pathlib": (Path, "symlink_to", fails(OSError(errno.EOPNOTSUPP, "no links"))),
    "locks": (fcntl, "flock", fails(OSError(errno.ENOLCK, "No locks available"))),
    "git": (subprocess, "run", fails(FileNotFoundError(errno.ENOENT, "git"))),
    "folders on a read-only file system": (os, "mkdir", fails_in_own_folders(os.mkdir, READ_ONLY)),
    "folders of another user": (os, "mkdir", fails_in_own_folders(os.mkdir, DENIED)),
    "files on a read-only file system": (os, "open", fails_in_own_folders(os.open, READ_ONLY)),
    "files of another user": (os, "open", fails_in_own_folders(os.open, DENIED)),
    "GPUs": (nvml, "_nvml", fails(RuntimeError("Driver/library version mismatch"))),
    "GPUs, by another library's error": (nvml, "_nvml", fails(SystemError("no"))),
}


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Where a job would be started; the plugin lies there already."""
    shutil.copy(build.plugin_path(), tmp_path / "plugin.so")
    monkeypatch.setenv("DYNAMICCL_PLUGIN", str(tmp_path / "plugin.so"))
    monkeypatch.delenv("DYNAMICCL_MEMORY", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    plans = []

    def become(plan):
        plan.write()
        plans.append(plan)
        raise Started

    monkeypatch.setattr(Plan, "become", become)
    yield SimpleNamespace(out=tmp_path / "out", plans=plans)
    for plan in plans:
        shutil.rmtree(plan.run, ignore_errors=True)
        for fd in plan.locks:
            os.close(fd)


@pytest.mark.parametrize("source", list(SOURCES))
@pytest.mark.parametrize("cluster", [[], ["--cluster", "dgx-h100-2x8"]], ids=["nccl", "emulated"])
def test_a_job_starts_whichever_fact_cannot_be_had(job, monkeypatch, source, cluster):
    """Before: RuntimeError without a home (pytorch#140765, tesseract-core#460), AttributeError without METADATA
    (cpython#91216, pip#11352), OSError without locks."""
    with monkeypatch.context() as patch, pytest.raises(Started):
        patch.setattr(*SOURCES[source])
        invoke(["tune", "--out", job.out, *cluster, "--", sys.executable, "-c", "pass"])
    assert job.plans[0].command[0] == sys.executable and Path(job.plans[0].run, "request.json").exists()


@pytest.mark.parametrize("source", list(SOURCES))
def test_the_doctor_and_a_trace_s_header_say_what_is_not_known(monkeypatch, source):
    with monkeypatch.context() as patch:  # over before pytest asks for the terminal's width
        patch.setattr(*SOURCES[source])
        done, told = invoke(["doctor", "--json"]), header.new_header()
    assert done.exit_code in (0, 1) and done.stdout.startswith("{")
    assert told["format"] == header.FORMAT


def test_full_shared_memory_is_left_for_the_temp_folder(job, monkeypatch, tmp_path):
    """Before: no job started in a container whose /dev/shm was full."""
    plain = os.posix_fallocate
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def fallocate(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(fd, *args)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(Started):
        invoke(["tune", "--out", job.out, "--", sys.executable, "-c", "pass"])
    assert job.plans[0].run.startswith(str(tmp_path))


NO_ENTRY_C = """#include <pwd.h>
#include <stddef.h>
int getpwuid_r(uid_t user, struct passwd* entry, char* text, size_t n, struct passwd** found) {
  (void)user; (void)entry; (void)text; (void)n;
  *found = NULL;
  return 0;
}
"""


def library(folder, code):
    """A shared library of this code, to be loaded before all others."""
    (folder / "first.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "first.so", folder / "first.c"], check=True)
    return str(folder / "first.so")


@pytest.mark.parametrize("command", ["tune", "doctor", "env"])
def test_a_user_without_an_entry_in_passwd_and_without_home_has_his_job(tmp_path, monkeypatch, command):
    """h2o-llmstudio#974. Before: a traceback of Path.home(), and no job."""
    monkeypatch.delenv("HOME", raising=False)
    job = ["--", sys.executable, "-c", "print('ran')"]
    words = {"tune": ["tune", "--out", tmp_path / "out", *job], "doctor": ["doctor"], "env": ["env"]}[command]
    done = start(*words, LD_PRELOAD=library(tmp_path, NO_ENTRY_C))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout == "ran\n" or command != "tune"


def wheel(folder, name, version, text=None):
    """A package's metadata as pip leaves it; ``version`` None: the folder without METADATA."""
    info = folder / f"{name.replace('-', '_')}-{version or '2.28.9'}.dist-info"
    info.mkdir(parents=True)
    if version:
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{text or ''}"
        )


def torch_of(folder, cuda):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    (folder / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\n")


@pytest.mark.parametrize(
    ("cuda", "wheels", "release"),
    [
        ("12.8", {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.21.5"}, (2, 27, 3)),  # verl#6621
        ("13.0", {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}, (2, 28, 9)),
        ("12.8", {"nvidia-nccl-cu13": "2.21.5"}, None),  # returnn#1802: a left-over of another CUDA
        (None, {"nvidia-nccl-cu12": "2.27.3"}, None),  # a build for CPUs
        ("no torch", {"nvidia-nccl-cu12": "2.27.3"}, (2, 27, 3)),
        ("no torch", {"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.21.5"}, None),  # no guess
        ("12.8", {"nvidia-nccl-cu12": None}, None),  # without METADATA
        ("12.8", {"nvidia-nccl-cu12": "2.29"}, None),
    ],
)
def test_pytorch_s_cuda_decides_which_nccl_counts(tmp_path, monkeypatch, cuda, wheels, release):
    """Before: that of CUDA 13 won always, and the doctor refused the job by its release."""
    if cuda != "no torch":
        torch_of(tmp_path, cuda)
    for name, version in wheels.items():
        wheel(tmp_path, name, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(util, "find_spec", lambda name: _spec(tmp_path, name))
    assert installed.nccl_release({}) == release
    assert [copy.source for copy in installed.wheels()] == [
        n for n in wheels if cuda and n[-2:] == cuda[:2]
    ] or (cuda in (None, "no torch"))


def _spec(folder, name):
    path = folder / name / "__init__.py"
    return SimpleNamespace(origin=str(path)) if path.exists() else None


def test_copies_that_the_loader_is_told_of_are_reported(tmp_path, monkeypatch):
    """Before: a preloaded NCCL was not seen, and the wheel's release stood for it."""
    real = tmp_path / "other" / "libnccl.so.2.27.7"
    real.parent.mkdir()
    real.write_bytes(b"")
    (real.parent / "libnccl.so.2").symlink_to(real.name)
    monkeypatch.setattr(installed, "wheels", lambda: [installed.Copy("nvidia-nccl-cu13", (2, 28, 9))])
    env = {"LD_LIBRARY_PATH": f"/none:{real.parent}"}
    assert installed.nccl_release(env) is None  # either may be loaded: no trap by a guess
    assert [str(copy) for copy in installed.in_sight(env)] == [
        "2.28.9 (nvidia-nccl-cu13)",
        f"2.27.7 (LD_LIBRARY_PATH: {real.parent}/libnccl.so.2)",
    ]
    assert installed.nccl_release({"LD_PRELOAD": f"/x/libother.so:{real}"}) == (2, 27, 7)
    assert installed.nccl_release({"LD_PRELOAD": "/gone/libnccl.so.2"}) is None
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    told = invoke(["doctor"]).stdout
    assert "not known; in sight: 2.28.9 (nvidia-nccl-cu13); 2.27.7" in told


def test_a_build_folder_is_found_or_the_cure_is_named(monkeypatch):
    monkeypatch.setattr(here, "home", lambda: None)
    monkeypatch.setattr(tempfile, "gettempdir", fails(FileNotFoundError()))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(build.PluginBuildError, match="XDG_CACHE_HOME"):
        build.cache_folder()


@pytest.mark.parametrize("error", [READ_ONLY, DENIED], ids=["read-only", "denied"])
def test_folders_that_cannot_be_made_are_done_without(monkeypatch, tmp_path, error):
    """Of built files: those of the temp folder. Of the memory: the run begins from nothing, leaves nothing, says so."""
    home, temp, said = tmp_path / "home", tmp_path / "temp", []
    home.mkdir()
    temp.mkdir()
    plain = os.mkdir

    def mkdir(path, *args, **options):
        if os.fspath(path).startswith(str(home)):
            raise error
        plain(path, *args, **options)

    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.delenv("DYNAMICCL_MEMORY", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        assert build.cache_folder().is_relative_to(temp)
        memory = Memory(default_url(), "job", said.append)
        assert memory.url.startswith(str(home)) and memory.recall(dict.fromkeys(FACTS, "x"), []) == {}
        windows = SimpleNamespace(profiles=[])
        outcome = SimpleNamespace(failure="", kept=False, speedup=None, speedup_ci95=None)
        memory.leave(SimpleNamespace(outcome=outcome, decisions={}, windows=windows))
    assert len(said) == 1 and said[0].codes == ["not-left"] and error.strerror in str(said[0])


@pytest.mark.parametrize("error", [READ_ONLY, DENIED], ids=["read-only", "denied"])
def test_results_that_cannot_be_left_are_refused_in_one_line(job, monkeypatch, error):
    """Or the job runs untuned: see test_or_untuned.py."""
    plain = os.mkdir

    def mkdir(path, *args, **options):
        if os.fspath(path).startswith(str(job.out)):
            raise error
        plain(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        done = invoke(["tune", "--out", job.out / "inner", "--", sys.executable, "-c", "pass"])
    assert done.exit_code == 2 and not job.plans
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error:") and error.strerror in line


NO_LINKS_C = """#include <errno.h>
int symlink(const char* a, const char* b) {
  (void)a; (void)b;
  errno = EOPNOTSUPP;
  return -1;
}
int symlinkat(const char* a, int folder, const char* b) {
  (void)folder;
  return symlink(a, b);
}
"""


@pytest.mark.slow
def test_a_file_system_without_links_has_the_run_s_path_in_a_file(tmp_path, monkeypatch):
    """anomalib#2161, mmsegmentation#1587. Before: the tuner ended, `stop` said what was not so."""
    job = [sys.executable, "-c", "print('ran')"]
    env = {"LD_PRELOAD": library(tmp_path, NO_LINKS_C), "HOME": str(tmp_path)}
    done = start(
        "tune", "--no-memory", "--out", tmp_path / "out", "--cluster", "dgx-h100-2x8", "--", *job, **env
    )
    assert done.returncode == 0 and done.stdout == "ran\n", done.stderr
    assert "belongs to a run" not in done.stderr and "NO VERDICT" in done.stderr, done.stderr
    assert (tmp_path / "out" / "run").is_file() and not (tmp_path / "out" / "run").is_symlink()
    ended = start("stop", tmp_path / "out", **env)
    assert ended.returncode == 2 and "this run has ended" in ended.stderr
    (tmp_path / "latest").write_text("dynamiccl leads to out\n")
    for words in (["show", tmp_path / "latest"], ["top", tmp_path / "latest", "--once"]):
        assert invoke(words).exit_code == 0


# NCCL's configuration file --------------------------------------------------------------------------------------------

CONF = json.loads((DATA / "nccl_conf_2.28.9.json").read_text())


@pytest.mark.parametrize("row", CONF, ids=lambda row: row["name"])
def test_conf_lines_are_read_as_nccl_reads_them(tmp_path, monkeypatch, row):
    """The table is what NCCL 2.28.9's library put into its environment, line by line. Bytes are filed as latin-1."""
    path = tmp_path / "nccl.conf"
    path.write_bytes(row["text"].encode("latin-1"))
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    read = here.conf_lines(path.read_bytes())
    told = {
        os.fsencode(name).decode("latin-1"): os.fsencode(value).decode("latin-1")
        for name, value in read.items()
    }
    assert {name: told.get(name) for name in {*row["found"], "NCCL_PROTO", "NCCL_ALGO"}} == {
        name: row["found"].get(name) for name in {*row["found"], "NCCL_PROTO", "NCCL_ALGO"}
    }
    configured = here.configured()
    for name, value in read.items():
        if name not in os.environ:
            assert configured.get(name, "") == value


@pytest.mark.parametrize("row", [row for row in CONF if "ends" in row], ids=lambda row: row["name"])
def test_doctor_says_at_which_lines_nccl_ends_the_job(tmp_path, monkeypatch, row):
    """Of these lines it was seen: "Unrecognized element token", and no rank got a communicator."""
    (tmp_path / "nccl.conf").write_bytes(row["text"].encode("latin-1"))
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    told = json.loads(invoke(["doctor", "--json"]).stdout)
    must = {one["name"] for one in told["findings"] if one["must_change"]}
    assert must == ({"more than a value"} if row["ends"] else set())


def test_the_environment_comes_before_the_users_file_and_that_before_the_sites(tmp_path, monkeypatch):
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_ALGO=ring\nNCCL_PROTO=LL\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    found = here.configured()
    assert (found["NCCL_ALGO"], found["NCCL_PROTO"]) == ("ring", "Simple")


def test_nccl_does_not_ask_for_HOME(tmp_path, monkeypatch):
    """It reads the home folder of passwd: seen with NCCL 2.28.9's library."""
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=of_home\n")
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert here.configured().get("NCCL_ALGO") != "of_home"
