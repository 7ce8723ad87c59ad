"""OUT/tuner.log: times, levels, no secrets, and nothing that can end the tuner."""

import logging
import re

from dynamiccl.agent.daemon.log import LOG, log, open_log

LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR) +\S.*$")


def lines(folder):
    return (folder / LOG).read_text(encoding="utf-8").splitlines()


def say_all():
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "said at %d", level)
    logging.getLogger("dynamiccl.live").warning("a part of ours")


def test_all_that_is_said_is_written_with_its_level(tmp_path):
    close = open_log(tmp_path)
    say_all()
    close()
    say_all()  # nobody listens any more
    found = lines(tmp_path)
    assert all(LINE.match(line) for line in found)
    assert [line.split()[1] for line in found] == ["DEBUG", "INFO", "WARNING", "ERROR", "WARNING"]


def test_a_later_tuner_of_the_run_goes_on_in_the_same_file(tmp_path):
    for _ in range(2):
        close = open_log(tmp_path)
        log.info("here")
        close()
    assert len(lines(tmp_path)) == 2


def test_secrets_and_line_ends_of_others_do_not_reach_it(tmp_path):
    close = open_log(tmp_path)
    log.info("job: %s", "python train.py --hf-token hf_abcdefghijklmnopqrstuv --lr 0.1")
    log.warning(
        "WANDB_API_KEY=0123456789abcdef python t.py https://user:hunter2@host/x\n2026-01-01 forged line"
    )
    close()
    text = (tmp_path / LOG).read_text()
    assert (
        "hf_abc" not in text
        and "0123456789abcdef" not in text
        and "hunter2" not in text
        and "--lr 0.1" in text
    )
    assert text.count("***") == 3 and len(text.splitlines()) == 2


def test_a_full_disk_costs_the_line_and_no_more(tmp_path, capfd):
    (tmp_path / LOG).symlink_to("/dev/full")
    close = open_log(tmp_path)
    log.info("x" * 100_000)
    close()
    assert capfd.readouterr() == ("", "")


def test_it_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("dynamiccl.agent.daemon.log.MOST_BYTES", 1000)
    close = open_log(tmp_path)
    for i in range(200):
        log.info("line %d", i)
    close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2100
    assert lines(tmp_path)[-1].endswith("line 199")
