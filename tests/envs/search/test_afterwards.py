"""After the verdict: what is still tried beside the table in force, a slot at a time, and what becomes of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search import turns
from dynamiccl.envs.search.afterwards import FIRST, SOONEST
from dynamiccl.envs.search.belief import Belief, Prior
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.watch import SearchConfig
from dynamiccl.envs.search.windows import PROFILE, REFINE, TRIAL, WATCH, Measured
from dynamiccl.traces.fingerprint import N_FEATURES
from dynamiccl.traces.spaces import N_CONFIGS
from test_search import Told


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


#: After the policy's trials there are none.
ITS_OWN = replace(SearchConfig(), trials_near=0)


def after(told, prior, table=(18, 18), rules=ITS_OWN):
    """A search that has just given its verdict for ``table``, by a comparison."""
    job, default = told.begin()
    search = Search(job, default, prior, rules)
    search._race(np.array(table))
    while (plan := search.plan()) is not None:
        search.record(plan, told.measure(plan))
    search.decide(0, turns.LEAVE)
    return search


def go_on(search, told, wanted, windows=400):
    """Until nothing is left to try; ``wanted(slot)`` is the policy. The kinds of all windows and their configs."""
    ran = []
    for _ in range(windows):
        if search.is_done:
            break
        plan = search.plan()
        if plan is None:
            config = int(wanted(search.turn))
            search.decide(config, turns.GO_ON if config == search.confirmed[search.turn] else turns.RUN)
        else:
            ran.append((plan.kind, plan.configs.tolist()))
            search.record(plan, told.measure(plan))
    return ran


def rule(search):
    return int(turns.choices_of(ExpectedImprovement().predict(search.observe())[0])[0])


def savings(**better):
    """0.10 for 18 in the first slot, and so much more for others in it: c20=0.01."""
    return lambda c: (
        0.10 * (c[0] > 0) + sum(v for name, v in better.items() if c[0] == int(name[1:])) + 0.03 * (c[1] > 0)
    )


def test_what_is_a_little_faster_takes_its_slots_place(prior):
    told = Told(savings(c20=0.01))
    search = after(told, prior)
    assert search.confirmed.tolist() == [18, 18] and search.phase == REFINE and not search.is_done
    verdict, gain = search.marks.verdict, search.gain
    ran = go_on(search, told, [20, 18].__getitem__)
    assert search.confirmed.tolist() == [20, 18] and search.is_done and search.marks.refined == 1
    assert search.races[-1].n >= SOONEST
    trials = [configs for kind, configs in ran if kind == TRIAL]
    assert len(trials) >= 2 and all(t == [20, 18] for t in trials)
    for (kind, configs), (before, beside) in zip(ran[1:], ran, strict=False):
        assert kind != TRIAL or (before, beside) == (WATCH, [18, 18]), configs
    assert search.marks.verdict == verdict and search.gain[0] > gain[0] and len(search.races) == 2
    assert search.gain[0] == pytest.approx(-math.log(1 - 0.14), abs=0.01)


def test_what_is_slower_is_tried_once_and_the_default_is_as_good_a_trial(prior):
    told = Told(savings(c20=-0.03))
    search = after(told, prior)
    ran = go_on(search, told, [20, 0].__getitem__)
    trials = [configs for kind, configs in ran if kind == TRIAL]
    assert (
        trials.count([20, 18]) <= 2 and trials.count([18, 0]) <= 2 and search.confirmed.tolist() == [18, 18]
    )
    assert search.is_done and search.marks.refined == 0


def test_a_policy_that_wants_nothing_ends_it_in_one_round(prior):
    told = Told(savings())
    search = after(told, prior)
    assert go_on(search, told, [18, 18].__getitem__) == [] and search.phase == WATCH
    assert search.plan().kind == WATCH


def test_the_watch_goes_on_meanwhile(prior):
    """Half-way through, the job becomes slower for good: the search begins anew, and no trial is left over."""
    told = Told(savings(c20=0.0))
    search = after(told, prior)
    kinds = []
    for _ in range(120):
        plan = search.plan()
        if plan is None:
            search.decide([20, 18][search.turn], turns.RUN)
            continue
        kinds.append(plan.kind)
        if len(kinds) == 8:
            told.scale = 1.3
        search.record(plan, told.measure(plan))
        if search.marks.reopened:
            break
    assert search.marks.reopened == 1 and search.phase == PROFILE and TRIAL in kinds


def test_it_ends_with_its_trials_and_with_the_budget(prior):
    told = Told(savings())
    few = replace(ITS_OWN, trials=3)
    search = after(told, prior, rules=few)
    wanted = iter([20, 8, 16, 0] * 50)
    ran = go_on(search, told, lambda slot: next(wanted))
    assert (
        3 <= sum(kind == TRIAL for kind, _ in ran) <= 3 + few.pairs_again and search.is_done
    )  # the last is finished
    search = after(told, prior)
    search.lost = 1e4
    assert search.spent > 1
    go_on(search, told, [20, 18].__getitem__, windows=3)
    assert search.is_done


def test_it_can_be_left_out(prior):
    assert after(Told(savings()), prior, rules=replace(SearchConfig(), trials=0)).phase == WATCH
    search = after(Told(savings()), prior)
    search.decide(20, turns.LEAVE)
    assert search.phase == WATCH and search.plan().configs.tolist() == [18, 18]


def test_a_trial_may_change_several_slots(prior):
    told = Told(savings(c20=0.01))
    search = after(told, prior)
    search.decide(20, turns.GO_ON)
    search.decide(0, turns.RUN)
    for kind in (WATCH, TRIAL):
        plan = search.plan()
        assert plan.kind == kind
        search.record(plan, told.measure(plan))
    assert plan.configs.tolist() == [20, 0]


def together(c):
    """20 in one slot costs 0.5 %, in both it saves 5 %."""
    return 0.10 * (c[0] > 0) + 0.03 * (c[1] > 0) + {0: 0.0, 1: -0.005, 2: 0.05}[(c == 20).sum()]


def test_two_slots_that_gain_only_together_are_tried_where_no_slot_alone_is_left(prior):
    told = Told(together)
    search = after(told, prior, rules=SearchConfig())
    once = iter([20, 20])
    ran = go_on(search, told, lambda slot: next(once, search.confirmed[slot]))
    assert search.confirmed.tolist() == [20, 20] and search.is_done
    trials = [configs for kind, configs in ran if kind == TRIAL]
    assert trials[:2] == [[20, 18], [18, 20]] and [20, 20] in trials[2:]
    for rules, what in ((ITS_OWN, turns.GO_ON), (SearchConfig(), turns.LEAVE)):
        told = Told(together)
        search = after(told, prior, rules=rules)
        for choice in (20, 20):
            while (plan := search.plan()) is not None:
                search.record(plan, told.measure(plan))
            search.decide(choice, turns.RUN)
        while (plan := search.plan()) is not None:
            search.record(plan, told.measure(plan))
        search.decide(18, what)
        go_on(search, told, [18, 18].__getitem__)
        assert search.is_done and search.confirmed.tolist() == [18, 18]


def test_what_looked_worse_among_other_changes_is_tried_by_itself(prior):
    """20 saves 2 % beside 18 in the other slot; the search saw it beside 16 there, where it costs 8 %."""
    told = Told(lambda c: 0.10 * (c[0] > 0) + 0.02 * (c[0] == 20) - 0.08 * (c.tolist() == [20, 16]))
    found = {}
    for rules in (ITS_OWN, SearchConfig()):
        job, default = told.begin()
        search = Search(job, default, prior, rules)
        for _ in range(6):
            search.decide(20)
            search.decide(16)
            search.record(search.plan(), told.measure(search.plan()))
        search._race(np.array([18, 18]))
        while (plan := search.plan()) is not None:
            search.record(plan, told.measure(plan))
        search.decide(0, turns.LEAVE)
        go_on(search, told, lambda slot, s=search: s.confirmed[slot])
        found[rules.trials_near] = search.confirmed.tolist()[0]
    assert found == {0: 18, SearchConfig().trials_near: 20}


class StepByStep(Told):
    """Ends a window with its first step above the limit; ``strays``: steps of the next one that take twice as long."""

    strays = ()

    def measure_steps(self, configs, n, discard, limit):
        steps = super().measure_steps(configs, n, discard, math.inf).step_ms
        steps[list(self.strays)] *= 2.0
        self.strays = ()
        steps = steps[: int(np.append(np.flatnonzero(steps > limit), n - 1)[0]) + 1]
        billed = len(steps) + discard
        return Measured(
            steps, np.full(2, np.nan), np.ones(2, bool), billed, float(steps.sum()) + 100.0 * discard
        )


def test_a_trial_ends_with_its_first_step_that_is_slower_for_sure(prior):
    told = StepByStep(savings(c20=-0.05, c8=0.01))
    search = after(told, prior)
    for choice in (20, 8):
        while search.turn:
            search.decide(18)
        search.decide(choice, turns.RUN)
        search.record(search.plan(), told.measure(search.plan()))
        plan = search.plan()
        told.strays = [2] if choice == 8 else []
        search.record(plan, seen := told.measure(plan))
        assert plan.kind == TRIAL and len(seen.step_ms) == (1 if choice == 20 else 3)
        logs = search.later.races[plan.configs.tobytes()].logs
        # A stray step is no fault of the table.
        assert logs == [pytest.approx(math.log(0.87 / (0.87 + {20: 0.05, 8: -0.01}[choice])), abs=0.02)]
        assert search.tried[0, choice] == 1 and not search.marks.canaries
    assert search.later.trial.tolist() == [8, 18]


def test_a_trial_that_gains_goes_on_whatever_is_believed_of_it(prior):
    """Seen on a simulated job: two windows of a trial were 20 % faster, the belief was sure of the contrary, and the
    trial was dropped."""
    told = Told(savings(c20=0.03))
    search = after(told, prior)
    search.belief.saving_mean = lambda table: -float(table[0] == 20)
    search.decide(20, turns.RUN)
    while (plan := search.plan()) is not None:
        search.record(plan, told.measure(plan))
    assert search.confirmed.tolist() == [20, 18]


def doubtful(saved=0.01, noise=0.04, rules=ITS_OWN, prior=None, seed=3):
    """A search whose only comparison ended with a gain that was not sure."""
    told = Told(lambda c: saved * (c[0] == 18), noise=noise, seed=seed)
    search = after(told, prior, table=(18, 0), rules=rules)
    assert not search.confirmed.any() and search.rejected.mean > 0 and search.rejected.n == 25
    return told, search


def test_a_gain_that_was_not_sure_goes_on_where_its_comparison_stood(prior):
    told, search = doubtful(prior=prior)
    verdict, race = search.marks.verdict, search.rejected
    assert search.phase == REFINE and search.marks.first_gain < 0
    nothing = {WATCH: [0, 0], TRIAL: [18, 0]}
    while not search.confirmed.any():
        plan = search.plan()
        assert plan.configs.tolist() == nothing[plan.kind]
        search.record(plan, told.measure(plan))
    assert (
        search.confirmed.tolist() == [18, 0] and search.races == [race] and race.n > 25 and search.gain[1] > 0
    )
    assert (
        search.marks.verdict == verdict < search.marks.first_gain == search.steps
        and search.marks.refined == 0
    )
    assert search.phase == REFINE and search.later.left == search.rules.trials  # from here on as ever
    assert search.later.watch.has_table


def test_a_gain_that_is_none_ends_in_the_watch(prior):
    told, search = doubtful(prior=prior)
    told.saving = lambda c: -0.03 * (c[0] == 18)
    ran = go_on(search, told, [18, 0].__getitem__)
    assert not search.confirmed.any() and search.phase == WATCH and not search.later.watch.has_table
    assert 0 < sum(kind == TRIAL for kind, _ in ran) < 60


def test_a_gain_that_was_not_sure_has_so_many_windows(prior):
    told, search = doubtful(prior=prior, rules=replace(ITS_OWN, doubtful=3))
    ran = go_on(search, told, [18, 0].__getitem__)
    assert sum(kind == TRIAL for kind, _ in ran) == 3 and search.phase == WATCH and not search.confirmed.any()
    told, search = doubtful(prior=prior, rules=replace(ITS_OWN, doubtful=0, trials=0))
    for _ in range(4):
        plan = search.plan()
        assert plan.kind == WATCH and not plan.configs.any()
        search.record(plan, told.measure(plan))


def test_what_seems_no_gain_or_may_not_run_does_not_go_on(prior):
    told = Told(lambda c: -0.02 * (c[0] == 18), noise=0.02)
    assert after(told, prior, table=(18, 0)).later.trial is None
    _, search = doubtful(prior=prior)
    assert search.later.trial is not None
    search.banned[0, 18] = True
    search._finish(trials=search.rules.trials)
    assert search.later.trial is None


def test_where_nothing_was_confirmed_single_slots_are_tried_beside_the_default(prior):
    told = Told(savings(c20=0.01))
    job, default = told.begin()
    search = Search(job, default, prior, ITS_OWN)
    search.decide(0, turns.LEAVE)
    assert search.phase == REFINE and not search.confirmed.any() and search.marks.first_gain < 0
    ran = go_on(search, told, [20, 0].__getitem__)
    assert search.confirmed.tolist() == [20, 0] and search.is_done and search.later.watch.has_table
    assert [configs for kind, configs in ran if kind == TRIAL].count([20, 0]) == search.races[0].n >= SOONEST
    assert search.races[0].alpha == FIRST and search.races[0].interval[0] > 0
    assert search.marks.verdict < search.marks.first_gain


def test_who_resumes_a_table_only_watches(prior):
    told = Told(savings())
    job, default = told.begin()
    search = Search(job, default, prior)
    search.resume(np.array([18, 18]))
    assert search.is_done and search.plan().kind == WATCH


def test_a_step_that_is_far_too_long_ends_a_trial(prior):
    told = Told(lambda c: -9.0 if c[0] == 20 else savings()(c))
    search = after(told, prior)
    ran = go_on(search, told, [20, 18].__getitem__)
    assert sum(kind == TRIAL for kind, _ in ran) == 1 and search.confirmed.tolist() == [18, 18]
    assert search.marks.canaries == 1 and search.is_done


def test_the_rule_tries_what_is_worth_most_and_never_what_is_in_force(prior):
    """Seen on simulated jobs: scores were cut off at the same height, and of all that reached it the first was taken,
    which was the config in force: a job with a further 8 % to gain had no trial at all."""
    search = after(Told(savings()), prior)
    seen = search.observe()
    figures = seen[-8 * N_CONFIGS : -N_CONFIGS].reshape(7, N_CONFIGS)
    figures[2, [8, 16, 18, 20]] = 10 * turns.SCALE * np.array([0.002, 0.01, 0.015, 0.012])  # worth
    figures[6] = 0.0  # risk
    assert search.confirmed[search.turn] == 18
    config, what = turns.choices_of(ExpectedImprovement().predict(seen)[0])
    assert (config, what) == (20, turns.RUN)


def test_what_nccl_refuses_is_no_improvement(prior):
    told = Told(savings(c20=0.05))
    search = after(told, prior)
    for _ in range(200):
        if search.is_done:
            break
        plan = search.plan()
        if plan is None:
            search.decide([20, 18][search.turn], turns.RUN)
            continue
        seen = told.measure(plan)
        if plan.kind == TRIAL:
            seen = Measured(seen.step_ms, seen.call_us, np.array([False, True]), seen.billed, seen.billed_ms)
        search.record(plan, seen)
    assert search.banned[0, 20] and search.confirmed.tolist() == [18, 18] and search.is_done


def test_a_harmful_change_is_hardly_ever_taken(prior):
    """All others are 0.5 % slower or as fast, windows are noisy: 40 searches."""
    worse = 0
    for seed in range(40):
        truth = savings(c8=-0.005, c16=0.0, c20=-0.005)
        told = Told(truth, noise=0.01, seed=seed)
        search = after(told, prior)
        go_on(search, told, lambda slot, s=search: rule(s))
        worse += truth(search.confirmed) < truth([18, 18]) - 0.001
    assert worse <= 2


def test_a_pair_says_what_two_tables_differ_by_whatever_they_have_in_common(prior):
    mask = np.zeros((2, N_CONFIGS), bool)
    mask[:, [0, 18, 20]] = True
    belief = Belief(prior, np.zeros((2, N_FEATURES), np.float32), mask, np.array([0.4, 0.4]))
    base, other = np.array([18, 18]), np.array([20, 18])
    common = belief.saving(np.array([0, 18]))
    for _ in range(30):
        belief.compare(other, base, math.log(1.02), 0.002)
    left = 1 - belief.saving(base)[0]
    ahead = belief.saving_mean(other) - belief.saving_mean(base)
    assert ahead == pytest.approx(left * (1 - 1 / 1.02), rel=0.15)
    assert belief.saving(np.array([0, 18]))[0] == pytest.approx(common[0], abs=common[1] / 2)
