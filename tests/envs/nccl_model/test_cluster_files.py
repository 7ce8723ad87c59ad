"""Clusters in another size: presets take the graphs of their kind, a file's cluster keeps its own."""

import json
import re
from pathlib import Path

import pytest
from dynamiccl.agent.commands import emulation
from dynamiccl.envs.nccl_model.clusters import cluster, preset_names, resize
from dynamiccl.envs.replay.recordings import cluster_in


def test_a_file_that_is_named_like_a_preset_is_none(tmp_path):
    """Before: ``dgx-h100-ours.toml`` in two nodes was the shipped dgx-h100-2x8."""
    file = tmp_path / "dgx-h100-ours.toml"
    graph = "{ channels = 4, bw_intra = 5.0, bw_inter = 5.0 }"
    file.write_text(f'like = "dgx-h100-1x8"\nring = {graph}\ncomm_channels = 4\n')
    ours = cluster(str(file))
    grown = resize(ours, 2)
    assert (grown.name, grown.n_nodes) == ("dgx-h100-ours-2x8", 2)
    assert grown.ring == ours.ring and grown.comm_channels == 4
    again = resize(grown, 1)
    assert (again.name, again.ring) == ("dgx-h100-ours-1x8", ours.ring)


def test_a_file_with_the_name_of_a_preset_is_none(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "dgx-h100-1x8"\nlike = "dgx-h100-1x8"\ncomm_channels = 4\n')
    assert resize(cluster(str(file)), 2).comm_channels == 4
    file.write_text('like = "dgx-a100-2x8"\n')
    assert resize(cluster(str(file)), 4).name == "mine-4x8"  # before: "-4x8"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nccl = 2.28", "mine: nccl is a text in quotes, not 2.28"),
        ("ring = 5", "mine: ring is a table with channels, bw_intra and bw_inter, not 5"),
        ("n_nodes = 2.5", "mine: n_nodes is a whole number, not 2.5"),
        ("n_nodes = true", "mine: n_nodes is a whole number, not True"),
        ("collnet = 1", "mine: collnet is true or false, not 1"),
        ("ring = { channels = 16.5, bw_intra = 5, bw_inter = 5 }", "mine, ring: channels is a whole number"),
        (
            "ring = { channels = 16, bw_intra = '5', bw_inter = 5 }",
            "mine, ring: bw_intra is a number, not '5'",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(line, why, tmp_path):
    """Before: a traceback, or a cluster of two and a half nodes."""
    file = tmp_path / "mine.toml"
    file.write_text(f'like = "dgx-h100-1x8"\n{line}\n')
    with pytest.raises(ValueError, match=re.escape(why)):
        cluster(str(file))


def test_a_cluster_is_like_a_preset_and_not_like_a_file(tmp_path):
    """Before: a file that was like itself was read without end."""
    file = tmp_path / "mine.toml"
    file.write_text(f'like = "{file}"\n')
    with pytest.raises(ValueError, match="like is the name of a preset"):
        cluster(str(file))


@pytest.mark.parametrize("name", [name for name in preset_names() if name.endswith(("-1x8", "-2x8"))])
def test_presets_take_the_graphs_of_their_kind(name):
    c = cluster(name)
    other = 2 if c.n_nodes == 1 else 1
    kind = name.removesuffix(f"-{c.n_nodes}x8")
    pair = f"{kind}-{other}x8"
    grown = resize(resize(c, nccl="2.27.5"), other)
    like = cluster(pair) if pair in preset_names() else c
    assert (grown.name, grown.ring, grown.nccl) == (pair, like.ring, "2.27.5")
    assert resize(resize(c, 4 * other), c.n_nodes).ring == c.ring  # there and back


def test_a_file_goes_on_by_its_whole_path_and_what_it_says_is_kept(tmp_path, monkeypatch):
    """Before: as typed, and nothing: ranks in another folder were not emulated, and a replay took an H100."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('like = "dgx-a100-2x8"\nnic_gbs = 7.0\n')
    emulated, facts = emulation("mine.toml")
    monkeypatch.chdir("/")
    assert cluster(emulated.cluster).nic_gbs == 7.0
    Path(emulated.cluster).unlink()
    found = cluster_in({"cluster": emulated.cluster, **json.loads(json.dumps(facts))})
    assert (found.name, found.generation, found.nic_gbs) == ("mine", "A", 7.0)
