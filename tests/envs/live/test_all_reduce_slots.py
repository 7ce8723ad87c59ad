"""All-reduces as slots of a running job: where the job's option says so, and under the algorithm that NCCL picks."""

import numpy as np
import pytest
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.live.job_ends import NothingToTune
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.traces.assemble import Offer
from dynamiccl.traces.reasons import NotTuning
from dynamiccl.traces.records import Decision, Slot
from dynamiccl.traces.spaces import config_of, decision_of
from fake_job import COST, STEP_MS, FakeJob

SUM = Slot(16, 2, "all_reduce", 28)
LL128 = Decision("ring", "ll128", 8)


class DdpJob(FakeJob):
    """Gathers and all-reduces, of 8 calls a step each."""

    def __init__(self, step_ms, all_reduce, ran=("ring", "simple"), registered=False, **options):
        super().__init__(step_ms, **options)
        self.all_reduce, self.ran = all_reduce, ran
        cost = COST.copy()
        cost[0] = 600, 350, 320  # trees
        if ran[0] == "nvls":
            cost[4, 2] = 100
        self.assembler.offers[7, "all_reduce", 200_000_000] = Offer(cost, *ran, 1, registered)

    def _note(self, steps):
        super()._note(steps)
        events = self._events[-1]
        is_sum = events["func"] == "reduce_scatter"
        for name, value in zip(("func", "algo", "proto"), ("all_reduce", *self.ran), strict=True):
            events.loc[is_sum, name] = value


def slots(job, **options):
    windows = LiveWindows(job, **options)
    told, _ = windows.begin()
    found = {profile.slot: mask for profile, mask in zip(windows.profiles, told.mask, strict=True)}
    return windows, found


def names(mask, func):
    found = (decision_of(config, func) for config in np.flatnonzero(mask) if config)
    return {f"{decision.algo}/{decision.proto}" for decision in found}


def test_without_the_option_an_all_reduce_is_no_slot():
    assert SUM not in slots(DdpJob(lambda _: STEP_MS, ""))[1]


@pytest.mark.parametrize(
    ("way", "ran", "may"),
    [
        ("protocol", ("ring", "simple"), {"ring/ll", "ring/ll128", "ring/simple"}),
        ("protocol", ("tree", "ll128"), {"tree/ll", "tree/ll128", "tree/simple"}),
        (
            "algo",
            ("ring", "simple"),
            {"ring/ll", "ring/ll128", "ring/simple", "tree/ll", "tree/ll128", "tree/simple"},
        ),
    ],
)
def test_other_protocols_are_tried_and_other_algorithms_only_where_the_user_allows_them(way, ran, may):
    windows, found = slots(DdpJob(lambda _: STEP_MS, way, ran))
    assert names(found[SUM], "all_reduce") == may
    own = next(profile.own for profile in windows.profiles if profile.slot == SUM)
    assert own.startswith("/".join(ran))


def test_what_is_written_under_an_all_reduce_s_row_is_read_again():
    for config in np.flatnonzero(slots(DdpJob(lambda _: STEP_MS, "algo"))[1][SUM]):
        assert config_of(decision_of(config, "all_reduce"), "all_reduce") == config


@pytest.mark.parametrize(
    ("ran", "registered", "word"),
    [(("nvls", "simple"), False, "nvls/simple"), (("ring", "simple"), True, "registered buffers")],
)
def test_what_nccl_runs_by_the_switch_or_on_registered_buffers_is_left_alone_and_named(ran, registered, word):
    windows, found = slots(DdpJob(lambda _: STEP_MS, "algo", ran, registered))
    assert SUM not in found
    (why,) = windows.left_alone
    assert why.reason is NotTuning.NOT_REACHED and word in str(why)


def test_bits_are_kept_by_gathers_alone():
    assert SUM not in slots(DdpJob(lambda _: STEP_MS, "protocol"), funcs=("all_gather",))[1]


def test_a_job_of_all_reduces_gets_its_table():
    job = DdpJob(lambda decisions: STEP_MS - 10 * (decisions.get(SUM) == LL128), "protocol", noise=0.002)
    tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement", 0))
    tuner.run()
    assert job.confirmed.get(SUM) == LL128


def test_nothing_to_tune_names_why():
    class Alone(DdpJob):
        def _note(self, steps):
            super()._note(steps)
            events = self._events[-1]
            self._events[-1] = events[events["func"] == "all_reduce"]

    with pytest.raises(NothingToTune) as caught:
        LiveWindows(Alone(lambda _: STEP_MS, "")).begin()
    assert caught.value.why.reason is NotTuning.NOTHING
    with pytest.raises(NothingToTune) as caught:
        LiveWindows(Alone(lambda _: STEP_MS, "algo", ("nvls", "simple"))).begin()
    assert caught.value.why.reason is NotTuning.NOT_REACHED
