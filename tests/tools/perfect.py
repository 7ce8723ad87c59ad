"""What would perfect knowledge in one decision save? The rule with and without it, on the same jobs and noise.

  python tests/tools/perfect.py play ROWS.csv --jobs 100 [--suite standard] [--worlds lasting,many] [--arms goes-on]
  python tests/tools/perfect.py show|page ROWS.csv

Each arm is the rule that knows the simulator's truth in one decision, and nowhere else:

  proposals  the best table of the suite is proposed at once, then parts of it; nothing, where nothing is to be gained
  goes-on    a comparison goes on as long as its table is truly faster by what pays, and else is given up at once
  returns    a job that is back in a regime, or in a congestion, has all that was known there, at once and for nothing
  all        the three together

A table is adopted only where the comparison proves a gain, in every arm. ``play`` appends a row per job and arm, in
parts that go round over the worlds, and goes on where it stopped. ``show`` says what each arm saves beside the rule:
default steps of 20,000, with the standard error over jobs; ``page`` prints the table of docs/environments.md as well.
All of it is simulated.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
from dynamiccl.agent.policies.choosing import RULE, make_chooser
from dynamiccl.envs.bench.job_arena import AccountedWindows, AskedPolicy, ReplayedDecisions, number, play
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import LossAccount
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import BUDGET_STEPS, HORIZON, SearchConfig
from dynamiccl.envs.search.interfaces import COMPARE, GO_ON, LEAVE, QUAD, actions_of
from dynamiccl.envs.search.loop import Loop
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from rows import append, read

FIELDS = ("suite", "world", "job", "arm", "lost", "verdict", "gain", "harsh", "slower")
PROPOSALS, GOES_ON, RETURNS = "proposals", "goes-on", "returns"
#: What is known in each arm.
ARMS = {
    "rule": (),
    PROPOSALS: (PROPOSALS,),
    GOES_ON: (GOES_ON,),
    RETURNS: (RETURNS,),
    "all": (PROPOSALS, GOES_ON, RETURNS),
}
#: Jobs that are played side by side; and a part of the work: so many jobs of one world.
BATCH = 10
#: Steps of the watch that are played after a verdict; and where regimes or congestions come back.
AFTER, AFTER_RETURNS = 1_000, 4_000
#: Worlds of which jobs come back to something: elsewhere perfect returns change nothing.
RETURNING = ("alternating", "moving")


class Truth:
    """What is true of one job now."""

    def __init__(self, jobs, row, tables):
        """``tables`` (regimes, width): the best in each regime."""
        self.jobs, self.row, self.tables = jobs, np.array([row]), tables
        self.n_slots = int(jobs.n_slots[row])

    @property
    def at(self):
        return self.jobs.noise.at[self.row]

    @property
    def regime(self):
        return int(self.jobs.regimes.take(self.row).at(self.at)[0])

    @property
    def place(self):
        """What the job can come back to: its regime, and which of two congestions weighs more."""
        extras = self.jobs.sites.extras.take(self.row)
        weight = float(extras.weight(self.at)[0]) if extras.moves[0] else 0.0
        return self.regime, weight > 0.5

    @property
    def best(self):
        return self.tables[self.regime, : self.n_slots]

    def gains(self, tables, reference):
        """Logs (k,) of a step under ``reference`` (s,) over that under each of ``tables`` (k, s), now."""
        asked = np.zeros((1 + len(tables), self.jobs.width), np.int64)
        asked[0, : self.n_slots] = reference
        asked[1:, : self.n_slots] = tables
        step_us, _ = self.jobs.step_us(asked, np.repeat(self.row, len(asked)))
        return np.log(step_us[0] / step_us[1:])


def pays(state, gain, test):
    """Whether a true gain (log) is worth a comparison that has come as far as this test."""
    steps_left = max(HORIZON - state.account.steps, BUDGET_STEPS)
    quads_left = steps_left / (QUAD * state.turns.steps)
    return gain >= max(state.config.least_gain, test.provable(quads_left) if test else 0.0)


class SureLoop(Loop):
    """Trials that are given up by the truth alone, or by what makes a step too slow."""

    def _goes_on(self, trial, comparison):
        return self.monitor is None or self.trials_left > 0


class KnowingSearch(Search):
    """A search that knows the truth in one decision or more."""

    def know(self, truth, known):
        self.truth, self.known = truth, known
        self.place = self.belongs = truth.place  # of the job; and of what the search knows
        self.kept = {}  # by place: a copy of what the search knew there
        if GOES_ON in known:
            self.loop.__class__ = SureLoop
            self._decide_by_truth()

    def _decide_by_truth(self):
        state = self.state
        as_it_is = type(state).decide

        def decide(comparison):
            if as_it_is(state, comparison):
                return True
            gain = float(self.truth.gains(comparison.table[None], comparison.reference)[0])
            return None if pays(state, gain, comparison.test) else False

        state.decide = decide

    def plan(self):
        if RETURNS in self.known:
            self._look_where()
        return super().plan()

    def _look_where(self):
        now = self.truth.place
        if now == self.place:
            return
        if self.place == self.belongs:  # else it holds something of two places
            self._keep()
        self.place = now
        if now in self.kept:
            self._come_back(now)

    def _keep(self):
        state = self.state
        state.__dict__.pop("decide", None)
        shared = {id(one): one for one in (state.prior, state.account, state.milestones)}
        self.kept[self.place] = (*copy.deepcopy((state, self.loop), shared), state.account.rounds)
        if GOES_ON in self.known:
            self._decide_by_truth()

    def _come_back(self, place):
        """To all that was known there; what runs, and which algorithms are connected, is the job's."""
        running = self.state.running
        self.state, self.loop, self.state.account.rounds = self.kept.pop(place)
        self.state.running.configs = running.configs
        self.state.running._warm |= running._warm
        self.belongs = place
        if GOES_ON in self.known:
            self._decide_by_truth()

    def record(self, plan, seen):
        was_changed = self.loop.change is not None
        saved = super().record(plan, seen)
        if was_changed and self.loop.change is None:
            self.belongs = self.truth.place
        return saved


class Knowing(ReplayedDecisions):
    """Proposes by the truth, or asks the rule."""

    def __init__(self, known):
        self.asked = AskedPolicy(make_chooser(RULE), 10.0)
        self.knows = PROPOSALS in known

    @property
    def spent_s(self):
        return self.asked.spent_s

    def next(self, job, search):
        if not self.knows:
            return number(self.asked.next(job, search))
        slot = search.turn
        wanted = self.wanted(search)
        is_over = search.is_over
        if wanted is None:
            return int(actions_of(np.array(search.confirmed[slot]), LEAVE))
        is_last = slot == search.n_slots - 1
        what = COMPARE if is_last and not is_over else GO_ON
        return int(actions_of(np.array(wanted[slot]), what))

    @staticmethod
    def wanted(search):
        """The best table, or the best part of it that has not lost yet; None: nothing is to be gained."""
        state, truth = search.state, search.truth
        current, best = search.confirmed, truth.best
        if not search.is_over and state.comparisons.in_search >= state.config.comparisons:
            return None
        parts = [best] + [
            np.where(np.arange(len(best)) == s, current, best) for s in np.flatnonzero(best != current)
        ]
        able = [t for t in parts if not (np.array_equal(t, current) or state.comparisons.has_lost(t))]
        slots = np.arange(len(best))
        able = [t for t in able if state.open[slots, t].all()]
        if not able:
            return None
        gains = truth.gains(np.array(able), current)
        k = int(gains.argmax())
        return able[k] if pays(state, gains[k], None) else None


class KnowingSearches(SimSearch):
    """As SimSearch."""

    def __init__(self, windows, config, tables, known):
        self.windows = windows
        prior = Prior.load()
        self.searches = []
        for row, (job, seen) in enumerate(zip(*windows.begin(config.profile_steps), strict=True)):
            search = KnowingSearch(job, seen, prior, config)
            search.know(Truth(windows.jobs, row, tables[row]), known)
            self.searches.append(search)


def opened(suite, rows, known):
    """Searches on the jobs at ``rows`` of a suite, and their bill."""
    jobs = suite.jobs.take(rows)
    ledger = LossAccount(jobs, suite.best_us[rows])
    windows = AccountedWindows(jobs, NoiseStream(0, suite.numbers[rows], jobs.width), ledger)
    return KnowingSearches(windows, SearchConfig(), suite.tables[rows], known), ledger


def played(suite, rows, known, after):
    """Scores of the jobs at ``rows`` of a suite."""
    return play(Knowing(known), *opened(suite, rows, known), after=after).scores


def play_all(path, name, worlds, n_jobs, arms):
    """Append the rows that are missing."""
    suite = JobSuite.load(name)
    done = {(r["suite"], int(r["job"]), r["arm"]) for r in read(path)}
    worlds = worlds or list(dict.fromkeys(suite.strata.tolist()))
    for first in range(0, n_jobs, BATCH):
        for world in worlds:
            for arm in arms:
                if arm == RETURNS and world not in RETURNING:
                    continue
                rows = np.flatnonzero(suite.strata == world)[first : min(first + BATCH, n_jobs)]
                rows = np.array([r for r in rows if (name, int(r), arm) not in done], int)
                if len(rows):
                    after = AFTER_RETURNS if world in RETURNING else AFTER
                    scores = played(suite, rows, ARMS[arm], after)
                    append(path, FIELDS, lines_of(name, world, rows, arm, scores))
            print(f"{name} {world}: jobs {first} to {first + BATCH}", flush=True)


def lines_of(name, world, rows, arm, scores):
    """The rows of the file for these jobs."""
    for k, row in enumerate(rows):
        figures = [f"{v:.5f}" for v in (scores.lost[k], scores.verdict[k], scores.gain[k])]
        flags = int(scores.is_harsh[k]), int(scores.is_harmed[k])
        yield [name, world, int(row), arm, *figures, *flags]


def pairs(rows, suite, worlds, arm):
    """Rows of ``arm`` and of the rule, of the same jobs in the same order: two lists."""
    by_job = {(r["job"], r["arm"]): r for r in rows if r["suite"] == suite and r["world"] in worlds}
    jobs = [job for job, name in by_job if name == arm and (job, "rule") in by_job]
    return [by_job[job, arm] for job in jobs], [by_job[job, "rule"] for job in jobs]


def saved(rows, suite, worlds, arm):
    """Jobs, mean of what ``arm`` saves beside the rule, its standard error, what the rule loses."""
    mine, rule = ([float(r["lost"]) for r in some] for some in pairs(rows, suite, worlds, arm))
    gap = np.array(rule) - np.array(mine)
    n = len(gap)
    error = float(gap.std(ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    return n, float(gap.mean()) if n else np.nan, error, float(np.mean(rule)) if n else np.nan


def is_worth_training(mean, error):
    """By the rule that was set before any was played: more than 30 steps, and three standard errors."""
    return mean > 30 and mean > 3 * error


def table(rows):
    """Lines of the table: one for each suite, world and arm."""
    lines = [
        "suite     world        arm        jobs  rule loses   saves (error)     harsh      slower    verdict"
    ]
    for suite in dict.fromkeys(r["suite"] for r in rows):
        worlds = list(dict.fromkeys(r["world"] for r in rows if r["suite"] == suite))
        places = [(w, (w,)) for w in worlds]
        places += [("no moving", tuple(w for w in worlds if w != "moving")), ("all", tuple(worlds))]
        for place, some in places:
            for arm in [a for a in ARMS if a != "rule"]:
                mine, rule = pairs(rows, suite, some, arm)
                if len(mine) < 2 or (arm == RETURNS and len(some) > 1):
                    continue
                n, mean, error, lost = saved(rows, suite, some, arm)
                counts = [sum(int(r[f]) for r in who) for f in ("harsh", "slower") for who in (rule, mine)]
                verdict = [np.median([float(r["verdict"]) for r in who]) for who in (rule, mine)]
                lines.append(
                    f"{suite:9} {place:12} {arm:10} {n:4} {lost:10.0f} {mean:+8.0f} ({error:.0f})"
                    f"{' *' if is_worth_training(mean, error) else '  '}"
                    f"  {counts[0]:3} -> {counts[1]:3} {counts[2]:3} -> {counts[3]:3}"
                    f"  {verdict[0]:5.0f} -> {verdict[1]:5.0f}"
                )
    return lines


def page_table(rows):
    """The table of docs/environments.md: what each arm saves, (standard error), by world of `standard`."""
    arms = [arm for arm in ARMS if arm != "rule"]
    lines = [
        f"| world of `standard` | jobs | the rule loses | {' | '.join(arms)} |",
        "|---|---|---|" + "---|" * len(arms),
    ]
    worlds = list(dict.fromkeys(r["world"] for r in rows if r["suite"] == "standard"))
    places = [(f"`{w}`", (w,)) for w in worlds]
    places += [("all but `moving`", tuple(w for w in worlds if w != "moving")), ("all", tuple(worlds))]
    for place, some in places:
        cells = []
        for arm in arms:
            asked = tuple(w for w in some if arm != RETURNS or w in RETURNING)
            n, mean, error, _ = saved(rows, "standard", asked, arm)
            if asked != some:  # nothing comes back in the other worlds: they save 0 there
                whole, *_ = saved(rows, "standard", some, PROPOSALS)
                mean, error = (mean * n / whole, error * n / whole) if n else (0.0, 0.0)
            cells.append(f"{mean:.0f} ({error:.0f})" if n else "0")
        n, _, _, lost = saved(rows, "standard", some, PROPOSALS)
        lines.append(f"| {place} | {n} | {lost:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["play", "show", "page"])
    parser.add_argument("rows", type=Path, help="the file of rows")
    parser.add_argument("--jobs", type=int, default=100, help="of each world")
    parser.add_argument("--suite", default="standard")
    parser.add_argument("--worlds", default="", help="all, if none are named")
    parser.add_argument("--arms", default=",".join(ARMS))
    args = parser.parse_args()
    if args.what == "play":
        worlds = [w for w in args.worlds.split(",") if w]
        play_all(args.rows, args.suite, worlds, args.jobs, args.arms.split(","))
    print("\n".join(table(read(args.rows))))
    if args.what == "page":
        print(page_table(read(args.rows)))


if __name__ == "__main__":
    main()
