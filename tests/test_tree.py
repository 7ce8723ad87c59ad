"""The network among the ranks: where it listens, whom it lets in, and what a lost connection is."""

import socket
import threading
import time

import pytest
from dynamiccl.envs.nccl.agreement import interfaces
from dynamiccl.envs.nccl.agreement.tree import FAN_OUT, Tree, children, parent


class Values(dict):
    """A store of one process; counts how often it was asked for something that may not be there."""

    asked = 0

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        self.asked += 1
        return all(key in self for key in keys)

    def get(self, key):
        return self[key].encode()


def opened(n_ranks, store=None):
    """All ranks' trees, open."""
    store = Values() if store is None else store
    trees = [Tree(rank, n_ranks, store, "127.0.0.1") for rank in range(n_ranks)]
    for tree in trees:
        tree.open(5)
    for tree in trees:
        while tree.missing():
            list(tree.receive(1))
    return trees


def test_every_rank_has_one_parent_and_few_children():
    for n in (1, 2, 17, 18, 1000):
        below = [child for rank in range(n) for child in children(rank, n)]
        assert sorted(below) == list(range(1, n))
        assert all(r in children(parent(r), n) for r in range(1, n))
        assert max(len(children(r, n)) for r in range(n)) <= FAN_OUT


def test_messages_of_any_size_pass_whole_and_in_order():
    zero, one, two = opened(3)
    big = bytes(range(256)) * 20_000
    sender = threading.Thread(target=lambda: [one.up(1, b"small"), one.up(2, big), one.up(3)])
    sender.start()
    got = []
    end = time.monotonic() + 10
    while len(got) < 3 and time.monotonic() < end:
        for message in zero.receive(0.1):
            got.append(message)
            break  # the rest is not lost
        if one._above.outgoing:
            list(one.receive(0))
    sender.join()
    assert got == [(1, 1, b"small"), (1, 2, big), (1, 3, b"")]
    zero.down(9, b"word")
    assert list(one.receive(5)) == [(0, 9, b"word")] == list(two.receive(5))
    for tree in (zero, one, two):
        tree.close()


def test_a_lost_connection_is_noticed_at_once():
    zero, one = opened(2)
    one.close()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="rank 0 has lost rank 1"):
        list(zero.receive(10))
    assert time.monotonic() - began < 5
    zero.close()


def test_a_stranger_is_not_let_in():
    """Who does not know the secret from the store is dropped; the child that does comes in after it."""
    store = Values()
    zero = Tree(0, 2, store, "127.0.0.1")
    zero.open(5)
    port = zero._listener.getsockname()[1]
    for words in (b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n12345", b"DCCLNET1" + bytes(16) + (1).to_bytes(4, "little")):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(words)
            list(zero.receive(1))
            list(zero.receive(1))
            assert stranger.recv(1) == b""
    assert zero.missing() == [1]
    one = Tree(1, 2, store, "127.0.0.1")
    one.open(5)
    while zero.missing():
        list(zero.receive(1))
    one.close()
    zero.close()


def test_a_parent_that_never_comes_is_named_in_time():
    store = Values()
    one = Tree(1, 2, store, "127.0.0.1")
    with pytest.raises(TimeoutError, match="rank 0 took no optimizer step"):
        one.open(2.5)
    one.close()
    assert store.asked <= 10, "ever more rarely"


HOST = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "10.1.0.5"), ("docker0", "172.17.0.1"), ("ib0", "10.2.0.5")]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ["10.1.0.5"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth0"}, ["10.2.0.5"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["10.0.0.5", "10.1.0.5"]),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, ["10.1.0.5"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, OSError),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo,eth"}, ["10.2.0.5"]),
        ({"NCCL_SOCKET_IFNAME": "^=eth0,eth1,lo,docker0"}, ["10.2.0.5"]),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, OSError),
    ],
)
def test_the_jobs_choice_of_an_interface_is_ours(env, expected):
    if expected is OSError:
        with pytest.raises(OSError, match="SOCKET_IFNAME"):
            interfaces.named(HOST, env)
    else:
        assert interfaces.named(HOST, env) == expected


def test_this_hosts_addresses_are_found_and_a_name_is_never_looked_up(monkeypatch):
    assert ("lo", "127.0.0.1") in interfaces.addresses()
    monkeypatch.setattr(socket, "gethostname", lambda: pytest.fail("the hosts file may say 127.0.1.1"))
    bind, offered = interfaces.reachable("127.0.0.1", {})
    assert bind == "" and not any(address.startswith("127.") for address in offered)
    assert interfaces.reachable("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"}) == ("127.0.0.1", ["127.0.0.1"])
