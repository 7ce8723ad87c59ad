"""The tuning run on a job whose truth is known."""

from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.agent.commands.tune import tune
from dynamiccl.agent.daemon.account import TableNames
from dynamiccl.agent.daemon.daemon import config_of
from dynamiccl.agent.daemon.outcome import Outcome
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import DEFAULT, make_chooser
from dynamiccl.agent.report.verdict import outcome as outcome_text
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.live.turns import Turns
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import arms_of
from dynamiccl.traces.reasons import Happened, RowRefused, RunEnds
from dynamiccl.traces.records import AUTO, Decision
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob

BEST = {GATHER: Decision("ring", "ll128", 8), SCATTER: Decision("ring", "simple", 4)}


def truth(decisions):
    """Each slot's best config saves 10 ms, ll on gathers costs 70, all else costs up to 5."""
    ms = STEP_MS
    for slot, best in BEST.items():
        d = decisions.get(slot, AUTO)
        if d.is_auto:
            continue
        ms -= 5 * (d.algo in (best.algo, None) and d.proto in (best.proto, None))
        ms -= 5 * (d.n_channels == best.n_channels)
        ms += 3 * (d.n_channels in (1, 2)) + 2 * (d.proto not in (best.proto, None))
    return ms


def run(policy, job, **settings):
    lines = []
    tuner = Tuner(LiveWindows(job), make_chooser(policy, 0), config_of(Request(**settings)), lines.append)
    return tuner.run(), lines, tuner


def test_the_rule_finds_most_of_what_there_is():
    job = FakeJob(truth, noise=0.002)
    outcome, lines, tuner = run("expected-improvement", job)
    assert outcome.kept and truth(tuner.decisions) <= STEP_MS - 15
    assert outcome.speedup_ci95[0] > 1.1 and outcome.aa_speedup_ci95[0] <= 1
    assert job.tables[-1].rules and {d["func"] for d in outcome.decisions} == {"all_gather", "reduce_scatter"}
    assert all(d["tried"] > 0 and not d["why"] for d in outcome.decisions)
    assert {line.phase for line in lines} == {"profile", "search", "verify"}
    assert [line.index for line in lines] == sorted(line.index for line in lines)
    assert 0 < outcome.steps_to_first_gain <= outcome.steps_to_verdict <= job.last_step < 500
    kept = [event for line in lines for event in line.events if event.reason is Happened.KEPT]
    assert kept == [
        outcome_text(one) for one in tuner.sum_up().comparisons if one["outcome"] == "kept"
    ] and str(lines[1]).startswith("window 1  search  A ")


def test_a_trial_after_the_verdict_is_told_as_one():
    _, _, tuner = run("expected-improvement", FakeJob(truth, noise=0.002))
    tuner.on_window, after = lambda line: after.append(line), []
    for _ in range(80):
        tuner.step()
    assert after and {line.phase for line in after} <= {"refine", "watch"}
    trials = [line for line in after if line.phase == "refine"]
    assert trials and all(line.table != line.in_force for line in trials if not line.events)
    assert tuner.costs.trials == len(trials) and tuner.costs.trials_ms != 0


@pytest.mark.parametrize("policy", [DEFAULT, "random", "coordinate-descent", "lstm", "default"])
def test_a_table_that_does_not_win_is_never_left_in_force(policy):
    """Nothing helps here: whatever a policy picks, NCCL's own choice must be in force at the end."""
    job = FakeJob(lambda d: STEP_MS + 3 * sum(not x.is_auto for x in d.values()), noise=0.02)
    outcome, _, tuner = run(policy, job, windows=16)
    assert not outcome.kept and outcome.detectable is not None
    assert job.confirmed == {} and not tuner.decisions
    assert verdict(tuner.sum_up()).startswith("NOTHING ")


@pytest.mark.parametrize("policy", ["coordinate-descent", "sweep"])
def test_classical_search_finds_what_there_is_to_find(policy):
    job = FakeJob(truth, noise=0.001)
    outcome, _, tuner = run(policy, job, windows=60)
    assert outcome.kept and truth(tuner.decisions) <= STEP_MS - 5


def test_a_job_that_ends_early_leaves_what_was_seen():
    outcome, lines, tuner = run("random", FakeJob(truth, steps=30))
    assert outcome.detectable is None and RunEnds.JOB_STATUS in outcome.ended
    assert lines and tuner.costs.windows > 0


def test_where_nothing_was_tried_no_config_is_said_to_be_no_better():
    """Seen: "none of 0 other configs was better"."""
    job = FakeJob(truth)
    tuner = Tuner(
        LiveWindows(job),
        make_chooser("expected-improvement", 0),
        on_window=lambda _: setattr(job, "steps", 0),
    )
    outcome = tuner.run()
    assert outcome.ended and {d["why"] for d in outcome.decisions} == {
        RowRefused.NOT_TRIED(own="ring/simple/16")
    }


def test_a_job_that_ends_between_its_first_gain_and_the_verdict_has_the_figures_of_what_was_kept():
    """Before: "kept" without a speed-up, the interval or a decision."""
    whole, _, _ = run("expected-improvement", FakeJob(truth, noise=0.002))
    assert whole.steps_to_first_gain + 5 < whole.steps_to_verdict
    job = FakeJob(truth, noise=0.002, steps=whole.steps_to_first_gain + 5)
    outcome, _, tuner = run("expected-improvement", job)
    assert outcome.kept and outcome.ended and outcome.steps_to_verdict is None
    assert outcome.speedup_ci95[0] > 1 and tuner.decisions == job.confirmed


def test_an_interrupted_run_says_what_stays_in_force():
    """Before: a table that stayed was summed up as not kept."""

    class Interrupted(FakeJob):
        def window(self, *args, **more):
            if self.confirmed:
                raise KeyboardInterrupt("terminated")
            return super().window(*args, **more)

        def alternate(self, *args, **more):
            if self.confirmed:
                raise KeyboardInterrupt("terminated")
            return super().alternate(*args, **more)

    job = Interrupted(truth, noise=0.002)
    tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement", 0))
    with pytest.raises(KeyboardInterrupt):
        tuner.run()
    assert tuner.outcome.kept and tuner.outcome.speedup is not None


def test_a_job_without_tunable_collectives_has_nothing_to_tune():
    job = FakeJob(truth)
    job.assembler.offers = {}
    outcome, _, _ = run("random", job)
    assert outcome.decisions == [] and not outcome.kept and outcome.ended.codes == ["not-asked"]


def test_a_slow_first_window_does_not_end_tuning_for_good():
    """Seen: warm-up made calls seem too short, "the job runs no all_gather or reduce_scatter" of 600 that it ran."""
    job = FakeJob(lambda d: 10_000.0 if job.last_step < 40 else truth(d), noise=0.002)
    outcome, lines, tuner = run("expected-improvement", job)
    assert (
        outcome.ended.codes == ["too-small"] and " 0.6% of a step" in str(outcome.ended) and len(lines) == 1
    )
    assert not tuner.looks_again()  # its steps are the job's: it waits
    job.last_step += 100
    assert tuner.looks_again()
    tuner.run()
    assert outcome.kept and not outcome.ended and outcome.speedup is not None
    assert not tuner.looks_again()


def test_a_job_with_nothing_to_tune_is_looked_at_less_and_less():
    job = FakeJob(lambda d: 10_000.0, steps=3000)
    _, lines, tuner = run("random", job)
    waits = []
    while job.last_step < 3000:
        before = job.last_step
        while not tuner.looks_again():
            job.last_step += 1
        waits.append(job.last_step - before)
        tuner.run()
    assert len(lines) < 10 and waits == sorted(waits) and waits[0] < waits[-1]
    assert (
        tuner.outcome.ended.codes == ["too-small"] and not tuner.looks_again()
    )  # the true reason to the end


def test_a_search_that_only_costs_ends_within_its_budget():
    """Every trial is 40 % slower than the default: the search ends long before its windows are used up."""
    job = FakeJob(lambda d: 500.0 * (1 + 0.4 * any(not x.is_auto for x in d.values())))
    outcome, _, tuner = run("random", job, windows=200)
    assert 0 < tuner.search.lost < 0.05 * 1000 + 20 and tuner.costs.windows < 100 and not outcome.kept


def test_the_watch_takes_a_table_back_and_says_so():
    job = FakeJob(truth, noise=0.002)
    outcome, _lines, tuner = run("expected-improvement", job)
    while not tuner.search.is_done:
        tuner.step()
    for _ in range(400):  # the first visits to the default come soon
        tuner.step()
    assert outcome.kept and outcome.default_share_after < 0.01 and job.confirmed == tuner.decisions
    job.step_ms = lambda d: STEP_MS * (1.2 if any(not x.is_auto for x in d.values()) else 1)
    tuner.step()
    tuner.step()
    assert not outcome.kept and outcome.dropped == RunEnds.SLOWER() and job.confirmed == {}


def test_a_later_tuner_goes_on_with_what_was_confirmed():
    job = FakeJob(truth, noise=0.002)
    job.confirm(BEST)
    lines = []
    tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement"), on_window=lines.append)
    tuner.resume(BEST)
    for _ in range(12):
        tuner.step()
    assert job.confirmed == BEST and tuner.search.is_over and tuner.decisions == BEST


def test_what_nccl_does_not_do_is_not_tried_again():
    from dynamiccl.envs.live.obedience import Disobeyed

    job = FakeJob(truth, noise=0.002)

    def disobedient(run):
        def ran(decisions, *rest):
            seen = run({s: d for s, d in decisions.items() if s != GATHER}, *rest)
            refused = [
                Disobeyed(s, d, "ring/simple/16")
                for s, d in decisions.items()
                if s == GATHER and not d.is_auto
            ]
            object.__setattr__(seen, "disobeyed", tuple(refused))
            return seen

        return ran

    job.window, job.alternate = disobedient(job.window), disobedient(job.alternate)
    outcome, _, tuner = run("expected-improvement", job)
    refused = outcome.not_obeyed
    assert refused and len(refused) == len(set(refused)) and GATHER not in tuner.decisions
    assert {row["slot"] for row in outcome.refused if row["why"] in refused} == {str(GATHER)}


def test_unknown_policies_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="expected-improvement"):
        make_chooser("no-such")


def test_a_run_that_is_told_nothing_searches_as_the_benchmark_does():
    assert config_of(Request()) == SearchConfig()
    asked = tune.make_context("tune", []).params
    assert all(asked[name] == value for name, value in vars(Request()).items() if name in asked)


class AlternatingJob(FakeJob):
    """From its step 12 on it takes ``pace`` of the time; ``cost_ms``: what tables that were tried have cost beyond the
    current one."""

    pace, cost_ms = 1.0, 0.0

    def _ms(self, decisions):
        return truth(decisions) * (1 if self.last_step < 12 else self.pace)

    def alternate(self, decisions, n_steps, turn_steps=1, discard=0, give_up_ms=float("inf")):
        generation = self.publish(decisions, 100)
        self.last_step += discard + 2  # two steps wait for the lease
        steps, times, arms = [], [], arms_of(n_steps, turn_steps)
        for arm in arms:
            self.last_step += 1
            now = self._ms(decisions if arm else self.confirmed)
            self.cost_ms += now - self._ms(self.confirmed)
            steps.append(self.last_step)
            times.append(now * (1 + self.noise * self.rng.standard_normal()))
            if arm and times[-1] > give_up_ms:
                break
        self.confirm(self.confirmed)
        return Turns((generation,), np.array(steps), np.array(times), arms[: len(steps)])


def alternating(pace):
    job = AlternatingJob(lambda decisions: job._ms(decisions), noise=0.001)
    job.pace = pace
    return job


def test_by_turns_the_best_so_far_is_compared_with_the_default_of_then():
    """Before: with that of the job's first steps, which warm up: 20 % too good."""
    _, lines, tuner = run("expected-improvement", alternating(0.8))
    later = [line for line in lines if line.first_step > 20]
    assert later and all(line.default_ms == pytest.approx(80, abs=2) for line in later)
    letter, ratio = tuner.costs.best
    assert ratio > 0.75, (letter, ratio)


def test_by_turns_a_trial_costs_what_its_own_steps_cost():
    """Before: the turns of the current table and the steps that waited were charged too, over twice the truth."""
    job = alternating(1.0)
    _, _, tuner = run("expected-improvement", job)
    true_ms = 0.0
    for _ in range(60):
        before, trials = job.cost_ms, tuner.costs.trials
        tuner.step()
        if tuner.costs.trials > trials:  # a visit to the default is no trial
            true_ms += job.cost_ms - before
    assert tuner.costs.trials > 10
    assert tuner.costs.trials_ms == pytest.approx(true_ms, rel=0.15)


def test_what_became_of_an_earlier_table_is_not_told_of_a_later_one():
    """Before: REVERTED, "the table is no longer faster", of a table that a change of the job had ended."""
    outcome = Outcome(LiveWindows(FakeJob(truth)), TableNames())
    account = SimpleNamespace(default_since_verdict=0, since_verdict=0)

    def note(kept, dropped):
        marks = SimpleNamespace(first_gain=1, verdict=1, dropped=dropped)
        search = SimpleNamespace(
            marks=marks, confirmed=np.array([kept]), state=SimpleNamespace(account=account)
        )
        outcome._note_milestones(search)
        return bool(outcome.summary.dropped)

    stands = [note(*stand) for stand in ((1, 0), (0, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 2))]
    assert stands == [False, True, True, False, False, False, True]
