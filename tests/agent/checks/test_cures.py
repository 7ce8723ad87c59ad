"""What ``doctor`` says to do: it must not lead into the next refusal."""

import re

import pytest
from dynamiccl.agent.checks.doctor import TRAPS, examine
from dynamiccl.agent.checks.facts import Facts
from dynamiccl.agent.checks.faults import FAULTS
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RunEnds
from paths import ROOT


def refused_releases():
    return [fault for fault in FAULTS if fault.must_change and not fault.machine and fault.first > (2, 28)]


def named(cure):
    """Releases of NCCL that a cure names."""
    return [tuple(map(int, found.split("."))) for found in re.findall(r"\b2\.\d+(?:\.\d+)?\b", cure)]


def is_refused(release):
    """Whether ``doctor`` refuses it, or one of the patches of a release without a patch."""
    return any(
        fault.first <= release < fault.below or fault.first[: len(release)] == release
        for fault in refused_releases()
    )


def test_no_cure_names_a_release_that_is_refused():
    """Before: "use NCCL 2.30.3" and "use NCCL 2.30", whose first release can crash under a profiler."""
    assert is_refused((2, 30, 3)) and is_refused((2, 30)) and not is_refused((2, 30, 4))
    cures = [cure for _, _, _, cure, _ in TRAPS] + [fault.cure for fault in FAULTS]
    first_words = [cure.replace("a newer 2.30", "") for cure in cures]
    assert [cure for cure in first_words if any(map(is_refused, named(cure)))] == []
    assert any(map(named, cures))


@pytest.mark.parametrize(
    ("wheel", "cure"),
    [
        ("nvidia-nccl-cu12", "pip install nvidia-nccl-cu12==2.28.9"),
        ("nvidia-nccl-cu13", "pip install nvidia-nccl-cu13==2.28.9"),
        ("nvidia-nccl-cu11", "use NCCL 2.28.3 or newer"),  # there is none
        ("", "use NCCL 2.28.3 or newer"),  # of a container, or a system
    ],
)
def test_how_to_get_an_nccl_that_can_be_tuned_fits_the_installed_pytorch(wheel, cure):
    """Of 2.27 it was said that it can be tuned; where it told late, calls ran in two ways."""
    for nccl in ((2, 21, 5), (2, 27, 3), (2, 28, 2)):
        found = [
            one for one in examine(Facts(nccl=nccl, wheel=wheel)) if one.name in ("old NCCL", "no profiler")
        ]
        assert [one.must_change for one in found] == [True] and found[0].cure.startswith(cure)
    named = {one.name for one in examine(Facts(nccl=(2, 28, 3), wheel=wheel))}
    assert not named & {"old NCCL", "no profiler"}


def test_what_no_table_does_over_nodes_is_said_of_replacing():
    """Before: "no table has LL over nodes", though one may set the channels where NCCL itself runs LL."""
    words = " ".join(fault.what for fault in FAULTS)
    assert words.count("no table replaces another protocol by LL") == 2 and "no table has" not in words


def test_more_sockets_without_threads_are_said_to_change_nothing():
    """NCCL 2.28.9 opens NCCL_NSOCKS_PERTHREAD x NCCL_SOCKET_NTHREADS more sockets, and the latter is 0 by itself."""
    alone, both = {"NCCL_NSOCKS_PERTHREAD": "4"}, {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "1"}
    (found,) = [one for one in examine(Facts(alone)) if one.name == "sockets"]
    assert "NCCL_NSOCKS_PERTHREAD=4 alone changes nothing" in found.what and not found.must_change
    assert [one for one in examine(Facts(both)) if one.name == "sockets"] == []


def test_the_page_names_each_refusal_once_and_codes_that_there_are():
    """The table of whom to allow: a new refusal needs its place there."""
    told = (
        (ROOT / "OPERATING.md")
        .read_text("utf-8")
        .partition("<!-- allow -->\n")[2]
        .partition("<!-- /allow -->")[0]
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in told.splitlines()[2:]]
    named = [name.split(": ")[-1] for row in cells for name in re.split("[,;] ", row[2]) if name]
    refused = {name for name, *_, must_change in TRAPS if must_change}
    refused |= {fault.name for fault in FAULTS if fault.must_change}
    assert sorted(named) == sorted(refused)
    codes = {one.code for kind in (RunEnds, NotTuning, NotAgreeing) for one in kind}
    left = [code for row in cells for code in re.findall(r"`([\w-]+)`", row[3])]
    assert len(left) == len(set(left)) > 8 and set(left) <= codes
