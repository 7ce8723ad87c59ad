"""What is tried beside the table in force, and what becomes of it: most of it after the verdict, a slot at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.policies.near_tables import NearTables
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.search.belief.belief import Belief
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import ADOPTED, level_of
from dynamiccl.envs.search.config import ABORT, CHECK_QUADS, SearchConfig
from dynamiccl.envs.search.interfaces import (
    COMPARE,
    GO_ON,
    LEAVE,
    PROFILE,
    RUN,
    SEARCH,
    TABLE,
    TRIAL,
    WATCH,
    actions_of,
    choices_of,
)
from dynamiccl.envs.search.observation import EFFECT, KEPT, N_CONTEXT, decode, expand
from dynamiccl.envs.search.search import Search
from dynamiccl.traces.fingerprint import N_FEATURES
from dynamiccl.traces.spaces import N_CONFIGS
from told_job import OPEN, Told, good


@pytest.fixture(scope="module")
def prior():
    return Prior.load()


def after(told, prior, table=(18, 18), config=None):
    """A search that has just given its verdict for ``table``, by a comparison."""
    job, default = told.begin()
    search = Search(job, default, prior, config)
    search.loop.compare(np.array(table))
    while (plan := search.plan()) is not None:
        search.record(plan, told.measure(plan))
    search.decide(0, LEAVE)
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
            search.decide(config, GO_ON if config == search.confirmed[search.turn] else RUN)
        else:
            ran.append((plan.kind, plan.configs.tolist()))
            search.record(plan, told.measure(plan))
    return ran


def rule(search):
    return int(choices_of(ExpectedImprovement().predict(search.observe())[0])[0])


def savings(**better):
    """0.10 for 18 in the first slot, and so much more for others in it: c20=0.01."""
    return lambda c: (
        0.10 * (c[0] > 0) + sum(v for name, v in better.items() if c[0] == int(name[1:])) + 0.03 * (c[1] > 0)
    )


def any_choice(search, rng):
    """A config that may be chosen, and what comes next; the end of proposals is rare."""
    what = rng.choice(np.flatnonzero(search.what_open))
    what = GO_ON if what == LEAVE and rng.random() < 0.9 else what
    return int(rng.choice(OPEN)), int(what)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_proposed_a_table_holds_only_by_its_comparison_and_what_is_new_ends_with_a_slow_step(
    prior, seed
):
    """Before the verdict, after it, and after two changes of the job; any choice a policy may make."""
    rng = np.random.default_rng(seed)
    told = Told(
        lambda c: 0.06 * (c[0] == 20) + 0.03 * (c[1] == 18) - 0.9 * (c[0] == 16), noise=0.01, seed=seed
    )
    search = Search(*told.begin(), prior, SearchConfig(more_choices=True))
    kinds = set()
    for n in range(400):
        told.scale = (1.0, 1.4, 1.0)[n // 150]
        while (plan := search.plan()) is None:
            search.decide(*any_choice(search, rng))
        kinds.add(plan.kind)
        state, before, marks = search.state, search.confirmed.copy(), replace(search.marks)
        assert not plan.turns or np.array_equal(plan.others, before)
        if plan.turns and state.guard.is_new(plan.configs).any():
            assert plan.limit_ms <= ABORT * state.default_ms_now
        n_adopted = sum(one.outcome == ADOPTED for one in search.comparisons)
        search.record(plan, told.measure(plan))
        if np.array_equal(search.confirmed, before):
            continue
        adopted = [one for one in search.comparisons if one.outcome == ADOPTED]
        if len(adopted) > n_adopted:
            (one,) = adopted[n_adopted:]
            assert np.array_equal(one.table, search.confirmed) and np.array_equal(one.reference, before)
            assert one.test.interval[0] > 0 and one.test.n >= CHECK_QUADS[0]
        else:
            assert not search.confirmed.any() and search.marks.reopened > marks.reopened
    assert {SEARCH, TRIAL, WATCH} <= kinds and (search.marks.aborted or TABLE in kinds)


def test_what_is_a_little_faster_takes_its_slots_place(prior):
    told = Told(savings(c20=0.01))
    search = after(told, prior)
    assert search.confirmed.tolist() == [18, 18] and search.is_over and not search.is_done
    verdict, gain = search.marks.verdict, search.gain
    ran = go_on(search, told, [20, 18].__getitem__)
    assert search.confirmed.tolist() == [20, 18] and search.is_done and search.marks.refined == 1
    assert search.state.current.comparisons[-1].test.n >= CHECK_QUADS[0]
    trials = [configs for kind, configs in ran if kind == TRIAL]
    assert len(trials) >= 2 and all(t == [20, 18] for t in trials)
    assert ran[0] == (WATCH, [18, 18]), "the current table is looked at before the first trial"
    assert (
        search.marks.verdict == verdict
        and search.gain[0] > gain[0]
        and len(search.state.current.comparisons) == 2
    )
    assert search.gain[0] == pytest.approx(-math.log(1 - 0.14), abs=0.01)


def test_what_is_slower_is_tried_once_and_the_default_is_as_good_a_trial(prior):
    told = Told(savings(c20=-0.03))
    search = after(told, prior)
    ran = go_on(search, told, [20, 0].__getitem__)
    trials = [configs for kind, configs in ran if kind == TRIAL]
    assert (
        trials.count([20, 18]) <= 3 and trials.count([18, 0]) <= 3 and search.confirmed.tolist() == [18, 18]
    )
    assert search.is_done and search.marks.refined == 0


def test_a_policy_that_wants_nothing_ends_it_in_one_round(prior):
    told = Told(savings())
    search = after(told, prior)
    assert go_on(search, told, [18, 18].__getitem__) == [] and search.is_done
    assert search.plan().kind == WATCH


def test_the_watch_goes_on_meanwhile(prior):
    """Half-way through, the table loses its gain: the search begins anew, and no trial is left over."""
    told = Told(savings(c20=0.0))
    search = after(told, prior)
    kinds = []
    for _ in range(120):
        plan = search.plan()
        if plan is None:
            search.decide([20, 18][search.turn], RUN)
            continue
        kinds.append(plan.kind)
        if len(kinds) == 8:
            told.scale, told.saving = 1.3, lambda c: 0.0
        search.record(plan, told.measure(plan))
        if search.marks.reopened:
            break
    assert search.marks.reopened == 1 and search.plan().kind == PROFILE and TRIAL in kinds


def test_it_ends_with_its_trials_and_with_the_budget(prior):
    told = Told(savings())
    few = replace(SearchConfig(), trials=3)
    search = after(told, prior, config=few)
    wanted = iter([20, 8, 16, 0] * 50)
    ran = go_on(search, told, lambda slot: next(wanted))
    assert sum(kind == TRIAL for kind, _ in ran) == 3 and search.is_done
    search = after(told, prior)
    search.state.account.lost = 1e4
    assert search.state.spent > 1
    go_on(search, told, [20, 18].__getitem__, windows=3)
    assert search.is_done


@pytest.mark.parametrize("first", [None, np.array([20, 18])])
def test_without_a_budget_nothing_is_tried(prior, first):
    """What ``tune --budget 0`` promises. Before: a division by zero."""
    told = Told(good)
    search = Search(*told.begin(), prior, SearchConfig(budget=0.0), first=first)
    ran = []
    for _ in range(60):
        plan = search.plan()
        if plan is None:
            assert np.isfinite(search.observe()).all()
            search.decide(20, COMPARE)
            continue
        ran.append(plan.configs.tolist())
        search.record(plan, told.measure(plan))
    assert search.is_done and search.marks.verdict is not None and ran and not np.any(ran)


def test_it_can_be_left_out(prior):
    assert after(Told(savings()), prior, config=replace(SearchConfig(), trials=0)).is_done
    search = after(Told(savings()), prior)
    search.decide(20, LEAVE)
    assert search.is_done and search.plan().configs.tolist() == [18, 18]


def test_a_trial_may_change_several_slots(prior):
    told = Told(savings(c20=0.01))
    search = after(told, prior)
    search.decide(20, GO_ON)
    search.decide(0, RUN)
    for kind in (WATCH, TRIAL):
        plan = search.plan()
        assert plan.kind == kind
        search.record(plan, told.measure(plan))
    assert plan.configs.tolist() == [20, 0]


def test_what_looked_worse_among_other_changes_is_tried_by_itself(prior):
    """20 saves 2 % beside 18 in the other slot; the search saw it beside 16 there, where it costs 8 %."""
    told = Told(lambda c: 0.10 * (c[0] > 0) + 0.02 * (c[0] == 20) - 0.08 * (c.tolist() == [20, 16]))
    found = []
    for policy in (Passing(), NearTables(Passing())):
        job, default = told.begin()
        search, state = Search(job, default, prior), None
        for _ in range(6):
            search.decide(20)
            search.decide(16)
            search.record(search.plan(), told.measure(search.plan()))
        search.loop.compare(np.array([18, 18]))
        while not search.is_done:
            plan = search.plan()
            if plan is not None:
                search.record(plan, told.measure(plan))
            elif search.is_over:
                state = search.ask(policy, state)
            else:
                search.decide(0, LEAVE)
        found.append(search.confirmed.tolist()[0])
    assert found == [18, 20]


def test_a_trial_beside_the_table_of_an_earlier_search_is_tried_again(prior):
    """Before: what had lost in the job before it changed was not tried in the new one if the default was kept twice."""
    told = Told(lambda c: -0.03 * (c[0] == 20))
    job, default = told.begin()
    search, policy, state = Search(job, default, prior), NearTables(Passing()), None
    for config in (20, 0):
        search.decide(config)
    search.record(search.plan(), told.measure(search.plan()))
    asked = [search.observe()]
    search.decide(0, LEAVE)
    while not search.is_done:
        plan = search.plan()
        if plan is not None:
            search.record(plan, told.measure(plan))
            continue
        asked.append(search.observe())
        state = search.ask(policy, state)
    found = []
    for _ in range(2):
        actions = []
        for observation in asked:
            action, state = policy.predict(observation[None], state, np.array([False]))
            actions.append(choices_of(action)[1][0])
        found.append(actions)
    assert found[0] == found[1] and found[0].count(RUN) == 1


class Passing:
    """Wants no trial."""

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        in_force = decode(observation).current.argmax(axis=1)
        return actions_of(in_force, GO_ON), None


def test_a_trial_ends_with_its_first_step_that_is_slower_for_sure(prior):
    told = Told(savings(c20=-0.05, c8=0.01))
    search = after(told, prior)
    for choice, long in ((20, ()), (8, (2,))):
        while search.turn:
            search.decide(18)
        search.decide(choice, RUN)
        while (plan := search.plan()).kind != TRIAL:
            search.record(plan, told.measure(plan))
        told.long = long
        search.record(plan, seen := told.measure(plan))
        assert len(seen.tried) == (1 if choice == 20 else 2), "a stray step ends it as well"
        comparison = search.comparisons[-1]
        assert comparison.test.n == 1 and comparison.test.mean < 0
        assert search.state.guard.windows[0, choice] == 1 and not search.marks.aborted


def test_a_trial_that_gains_goes_on_whatever_is_believed_of_it(prior):
    """Seen on a simulated job: two windows of a trial were 20 % faster, the belief was sure of the contrary, and the
    trial was dropped."""
    told = Told(savings(c20=0.03))
    search = after(told, prior)
    search.state.belief.saving_mean = lambda table: -float(table[0] == 20)
    search.decide(20, RUN)
    while (plan := search.plan()) is not None:
        search.record(plan, told.measure(plan))
    assert search.confirmed.tolist() == [20, 18]


def test_where_nothing_was_confirmed_single_slots_are_tried_beside_the_default(prior):
    told = Told(savings(c20=0.01))
    job, default = told.begin()
    search = Search(job, default, prior)
    search.decide(0, LEAVE)
    assert (
        search.is_over and not search.is_done and not search.confirmed.any() and search.marks.first_gain < 0
    )
    ran = go_on(search, told, [20, 0].__getitem__)
    assert search.confirmed.tolist() == [20, 0] and search.is_done and not search.state.current.is_default
    assert (TRIAL, [20, 0]) in ran and search.state.current.comparisons[0].test.n >= CHECK_QUADS[0]
    test = search.state.current.comparisons[0].test
    assert test.level == level_of(1) and test.interval[0] > 0
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
    assert search.marks.aborted == 1 and search.is_done


def test_the_rule_tries_what_is_worth_most_and_never_what_is_in_force(prior):
    """Seen on simulated jobs: scores were cut off at the same height, and of all that reached it the first was taken,
    which was the config in force: a job with a further 8 % to gain had no trial at all."""
    search = after(Told(savings()), prior)
    (whole,) = expand(search.observe()[None])
    figures = whole[N_CONTEXT:-N_CONFIGS].reshape(7, N_CONFIGS)
    figures[2, [8, 16, 18, 20]] = 10 * EFFECT * np.array([0.002, 0.01, 0.015, 0.012])  # worth
    figures[6] = 0.0  # risk
    assert search.confirmed[search.turn] == 18
    config, what = choices_of(ExpectedImprovement().predict(whole[KEPT])[0])
    assert (config, what) == (20, RUN)


def test_what_nccl_refuses_is_no_improvement(prior):
    told = Told(savings(c20=0.05))
    search = after(told, prior)
    for _ in range(200):
        if search.is_done:
            break
        plan = search.plan()
        if plan is None:
            search.decide([20, 18][search.turn], RUN)
            continue
        seen = told.measure(plan)
        if plan.kind == TRIAL:
            seen = replace(seen, obeyed=np.array([False, True]))
        search.record(plan, seen)
    assert search.state.guard.refused[0, 20] and search.confirmed.tolist() == [18, 18] and search.is_done


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
