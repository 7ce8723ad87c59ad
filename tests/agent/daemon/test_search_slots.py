"""A site's cap on searches at a time: slots are files that processes lock."""

import errno
import os
import stat
import subprocess
import sys

import pytest
from command import invoke
from dynamiccl.agent.daemon.daemon import Daemon
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.daemon.search_slots import parsed, take

HOLDER = """
import sys
from dynamiccl.agent.daemon.search_slots import take
print(take(sys.argv[1]) is not None, flush=True)
sys.stdin.read()
"""


def holder(slots):
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, slots], **ends)
    return process, process.stdout.readline() == "True\n"


def test_at_most_n_hold_a_slot_and_a_killed_one_gives_it_back(tmp_path):
    slots = f"2:{tmp_path}"
    (first, has_first), (second, has_second), (third, has_third) = (holder(slots) for _ in range(3))
    assert (has_first, has_second, has_third) == (True, True, False)
    first.kill()
    first.wait()
    fourth, has_fourth = holder(slots)
    assert has_fourth
    for process in (second, third, fourth):
        process.communicate()


def test_a_slot_can_be_locked_by_other_users_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        fd = take(f"1:{tmp_path / 'slots'}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o666
    assert stat.S_IMODE((tmp_path / "slots").stat().st_mode) == 0o1777
    os.close(fd)


@pytest.mark.parametrize("text", ["4", "0:/x", "x:/x", ":/x", "4:", "-1:/x"])
def test_what_is_no_number_and_folder_is_refused(text):
    with pytest.raises(ValueError, match="N:FOLDER"):
        parsed(text)
    refused = invoke(["tune", f"--search-slots={text}", "--", "true"])
    assert refused.exit_code == 2 and "N:FOLDER" in refused.stderr


def test_a_tuner_without_a_slot_only_watches(folder, tmp_path):
    slots = f"1:{tmp_path / 'slots'}"
    other, _ = holder(slots)
    said = []
    asked = Request(out=tmp_path / "out", search_slots=slots, memory=None)
    daemon = Daemon(asked, folder, on_phase=said.append)
    assert daemon.request.budget > 0, "a node without rank 0 comes no further, and needs no slot"
    daemon._take_slot()
    assert daemon.tuner.config.budget == 0 and daemon.request.budget == 0
    assert any("only watches" in text for text in said)
    other.communicate()


def test_slots_that_cannot_be_used_mean_that_nothing_is_searched(folder, tmp_path):
    said = []
    asked = Request(out=tmp_path / "out", search_slots=f"1:{tmp_path / 'none' / 'slots'}", memory=None)
    daemon = Daemon(asked, folder, on_phase=said.append)
    daemon._take_slot()
    assert daemon.request.budget == 0
    assert any("No such file" in text for text in said)


def test_a_user_cannot_replace_the_sites_slots(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMICCL_TUNE_OPTIONS", f"--search-slots 4:{tmp_path}")
    asked = []
    monkeypatch.setattr("dynamiccl.agent.commands.tune._start", asked.append)
    told = invoke(["tune", "--search-slots", "100:/tmp", "--", "true"])
    assert asked[0]["search_slots"] == f"4:{tmp_path}" and "this site's --search-slots holds" in told.stderr


def test_who_only_watches_takes_no_slot(folder, tmp_path):
    asked = Request(out=tmp_path / "out", search_slots=f"1:{tmp_path / 'slots'}", memory=None, budget=0.0)
    Daemon(asked, folder)._take_slot()
    assert not (tmp_path / "slots").exists()


def test_a_lock_that_fails_is_no_file_system_without_locks(monkeypatch, tmp_path):
    """NFS gives EBADF for a file that is open for reading alone; that was taken for "nothing is limited"."""

    def refuses(fd, how):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuses)
    with pytest.raises(OSError, match="Bad file"):
        take(f"1:{tmp_path}")
