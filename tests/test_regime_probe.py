"""The linear probe on the LSTM's state: what it names, and that it can be wrong."""

import numpy as np
import pytest
from dynamiccl.agent.policy import LstmPolicy
from dynamiccl.agent.regime_probe import Linear, fingerprints, read, regime_of, states, untrained
from dynamiccl.envs.sim.job_family import HELD_OUT, STANDARD
from dynamiccl.envs.sim.works import works_of


@pytest.fixture(scope="module")
def policy():
    return LstmPolicy.load()


def test_every_workload_has_a_regime():
    named = {name: regime_of(name) for kind in (STANDARD, HELD_OUT) for name in works_of(kind.works).names}
    assert set(named.values()) == {"zero-1", "zero-2", "zero-3", "fsdp2"}
    assert all(regime in name for name, regime in named.items())


def test_a_linear_classifier_names_what_can_be_told_apart_and_nothing_else():
    rng = np.random.default_rng(0)
    names = np.array(["a", "b", "c"])[rng.integers(0, 3, 600)]
    told = np.stack([names == "a", names == "b"], axis=1) + 0.1 * rng.normal(size=(600, 2))
    nothing = rng.normal(size=(600, 4))
    x = np.concatenate([told, nothing], axis=1)
    assert (Linear(x[:300], names[:300])(x[300:]) == names[300:]).mean() > 0.99
    assert (Linear(nothing[:300], names[:300])(nothing[300:]) == names[300:]).mean() < 0.5


def test_the_state_of_a_job_is_the_one_that_the_policy_had(policy):
    some = read(STANDARD, 5, 3, policy)
    assert len(some.seen) == len(some.regime) == 3
    found, state = states(policy, some.seen), None
    for observation in some.seen[1]:
        _, state = policy.predict(observation[None], state)
    np.testing.assert_array_equal(found[1], np.concatenate([state[0][0], state[1][0]]))
    assert fingerprints(some.seen).shape[0] == 3
    assert not np.allclose(found, states(untrained(policy), some.seen))
