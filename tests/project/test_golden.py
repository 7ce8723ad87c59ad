"""What must not change while code is taken out or moved: an episode of each environment, a trace, other tools' files.

A change that is meant to alter one of them writes the data anew, and says in its commit why:
``PYTHONPATH=tests/helpers:tests/tools python tests/project/test_golden.py --write`` (all) or ``--write episodes``.
Whole numbers are kept as a digest; of others a few weighted sums are, so that the last digits of another machine do
not matter.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import make_profile
import numpy as np
import pytest
from dynamiccl.agent.commands.show import tell
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.live_env import LiveEnv
from dynamiccl.envs.replay_env import ReplayEnv
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim_env import SimEnv
from dynamiccl.traces.files import Trace
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.queries.consistency import audit
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob
from paths import DATA
from recordings_made import MADE

GOLDEN, RECORDING = DATA / "golden", DATA / "recordings" / "demo"


def digest(values):
    """Of whole numbers and flags."""
    whole = np.asarray(values)
    assert whole.dtype.kind in "iub", whole.dtype
    shape = str(whole.shape).encode()
    return hashlib.sha256(shape + np.ascontiguousarray(whole, dtype="<i8").tobytes()).hexdigest()[:16]


def sums(values):
    """Three sums of numbers under fixed random weights: another number anywhere changes them all."""
    flat = np.nan_to_num(np.asarray(values, float).ravel(), nan=-7.0, posinf=1e6, neginf=-1e6)
    weights = np.random.default_rng(0).standard_normal((3, len(flat)))
    return [len(flat), *(float(f"{total:.7g}") for total in weights @ flat)]


# -- an episode of each environment ------------------------------------------------------------------------------------


def story(env):
    """One episode under the rule, whole."""
    policy = ExpectedImprovement()
    observation, info = env.reset(seed=7)
    observations, infos, actions, rewards, over = [observation], [info], [], [], False
    while not over:
        action, _ = policy.predict(observation)
        observation, reward, over, _, info = env.step(action)
        observations.append(observation)
        infos.append(info)
        actions.append(action)
        rewards.append(reward)
    whole = {
        key: digest(np.array([i[key] for i in infos]))
        for key in ("slot", "masked", "action_mask", "steps", "table")
    }
    return {
        "turns": len(actions),
        "actions": digest(np.array(actions)),
        "observations": sums(observations),
        "rewards": sums(rewards),
        "infos": whole | {"lost": sums([i["lost"] for i in infos])},
        "in force": info["table"].tolist(),
    }


def fake():
    """A job whose step gets shorter by ring/ll128."""
    cost = {GATHER: 12, SCATTER: 7}

    def truth(decisions):
        return STEP_MS - sum(
            cost[slot] for slot, d in decisions.items() if (d.algo, d.proto) == ("ring", "ll128")
        )

    return FakeJob(truth, noise=0.01)


def episodes():
    """Simulated, recorded and live (on a job without processes)."""
    job = fake()
    live = story(LiveEnv(job))
    tables = [
        sorted((str(rule.func), rule.max_bytes, str(rule.decision)) for rule in t.rules) for t in job.tables
    ]
    live["published"] = hashlib.sha256(json.dumps(tables).encode()).hexdigest()[:16]
    live["confirmed"] = {str(slot): str(decision) for slot, decision in job.confirmed.items()}
    return {"sim": story(SimEnv(STANDARD.only("plain"))), "replay": story(ReplayEnv(RECORDING)), "live": live}


# -- a recorded trace --------------------------------------------------------------------------------------------------


def trace():
    """What ``show`` says of a recording, and the fingerprints of its slots."""
    read = Trace.read(RECORDING)
    told = json.loads(json.dumps(tell(read, RunSummary())))
    steps = {key: value for key, value in told["steps"].items() if not key.startswith("loss")}
    env = ReplayEnv(read)
    env.reset(seed=0)
    profiles = env.windows.profiles
    return {
        "steps": steps,
        **{key: told[key] for key in ("n_events", "slots", "tables")},
        "consistency": json.loads(json.dumps(vars(audit(read.events)))),
        "windows": len(told["windows"]),
        "profiles": [[str(p.slot), p.n_bytes, p.calls, round(p.call_us, 4), p.timed_by] for p in profiles],
        "fingerprints": [[round(float(x), 5) for x in p.fingerprint.vector()[0]] for p in profiles],
    }


# -- files of other tools ----------------------------------------------------------------------------------------------


def of_frames(read):
    """Events, steps and compute of a trace, each as text."""
    texts = {name: getattr(read, name).to_csv(index=False) for name in ("events", "steps", "compute")}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def imported():
    """The made job in each format, and a profile of a size that is read in several blocks."""
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "big.json")
        make_profile.write(profile, 6)
        told["several blocks"] = of_frames(read_recording([profile]))
        for name, (_, make, _) in MADE.items():
            place = Path(folder, name)
            place.mkdir()
            told[name] = of_frames(read_recording([make(place)], ranks_per_node=8))
    return told


PARTS = {"episodes": episodes, "trace": trace, "imported": imported}


def kept(part):
    return json.loads((GOLDEN / f"{part}.json").read_text())


def alike(found, told, where=""):
    """Everything equal; numbers with a point to six digits."""
    if isinstance(told, dict):
        assert found.keys() == told.keys(), where
        for key in told:
            alike(found[key], told[key], f"{where}/{key}")
    elif isinstance(told, list):
        assert len(found) == len(told), where
        for i, (one, other) in enumerate(zip(found, told, strict=True)):
            alike(one, other, f"{where}/{i}")
    elif isinstance(told, float):
        assert found == pytest.approx(told, rel=1e-6, abs=1e-6), where
    else:
        assert found == told, where


@pytest.fixture(scope="module")
def played():
    return json.loads(json.dumps(episodes()))


@pytest.mark.parametrize("env", ["sim", "replay", "live"])
def test_an_episode_of_each_environment_is_what_it_was(played, env):
    alike(played[env], kept("episodes")[env])


def test_a_recorded_trace_reads_as_it_did():
    alike(json.loads(json.dumps(trace())), kept("trace"))


def test_recordings_of_other_tools_give_the_events_that_they_did():
    alike(imported(), kept("imported"))


@pytest.mark.parametrize("change", [("sim", "rewards", 1), ("live", "turns", None)])
def test_a_change_is_seen(change):
    env, key, place = change
    told, other = kept("episodes"), kept("episodes")
    if place is None:
        other[env][key] += 1
    else:
        other[env][key][place] += 0.01
    with pytest.raises(AssertionError, match=f"{env}/{key}"):
        alike(other, told)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(f"python tests/project/test_golden.py --write [{'] ['.join(PARTS)}]")
    for part in sys.argv[2:] or PARTS:
        (GOLDEN / f"{part}.json").write_text(json.dumps(PARTS[part](), indent=1) + "\n")
        print(f"written: {GOLDEN / part}.json")
