"""Ranks compare their code, not its version."""

import shutil
import sys

from dynamiccl.envs.nccl.agreement.sources import DIGEST, FILES, digest_of
from dynamiccl.envs.nccl.probe import probe


def test_a_changed_byte_is_another_code_and_a_copy_is_the_same(tmp_path):
    copies = []
    for number, path in enumerate(FILES):
        (tmp_path / str(number)).mkdir()
        copies.append(tmp_path / str(number) / path.name)
        shutil.copy(path, copies[-1])
    assert len(DIGEST) == 12 and digest_of(tuple(copies)) == DIGEST
    copies[3].write_bytes(copies[3].read_bytes() + b"\n")
    assert digest_of(tuple(copies)) not in (DIGEST, "")


def test_without_sources_there_is_no_digest(tmp_path):
    assert digest_of(()) == digest_of((tmp_path / "nowhere.py",)) == ""


def test_it_covers_what_a_rank_runs():
    loaded = {name for name in sys.modules if name.startswith("dynamiccl.envs.nccl.")}
    ours = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert probe and loaded and {name.rpartition(".")[2] for name in loaded} <= ours
