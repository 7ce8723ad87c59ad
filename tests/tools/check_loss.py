"""Where a policy loses time, and what any could gain: ``python tests/tools/check_loss.py SUITE [JOBS] [POLICY]``.

First from what is filed, at once: how far the same rule is from itself under other noise, and so how many jobs it takes
to see that one policy is better by 15 %. Then POLICY (the rule) plays JOBS jobs of the suite anew (without it all, some
minutes), and what it loses is taken apart by the truth: the best table holds configs that were never measured; the best
of those measured was not believed best; the table believed best was not confirmed; and the time until the verdict.
Beside it plays one who knows the best table from the first turn and needs only be confirmed: what is lost even then no
policy can save. The watch after the verdict is not played: that is no policy's doing.
"""

import sys
from pathlib import Path

import numpy as np
from dynamiccl.agent.policies.choosing import DEFAULT, make_chooser
from dynamiccl.envs.bench.job_arena import play
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import HORIZON, Scores, bootstrap
from dynamiccl.envs.bench.strata import filed as on_record
from dynamiccl.envs.bench.submissions import rows_of
from dynamiccl.envs.search.interfaces import COMPARE, GO_ON, LEAVE, actions_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from oracle import oracle

#: An improvement that is to be seen, and how sure: 95 % interval above 0 in 80 of 100 tries.
AIM, SURE = 0.15, 1.96 + 0.84


class Knows:
    """Compares one table of each job with the default, from the first turn on; jobs are told apart by their state."""

    def __init__(self, tables, n_slots):
        self.tables, self.n_slots, self.jobs = tables, n_slots, 0

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        if state is None:
            state, self.jobs = (self.jobs, 0), self.jobs + 1
        job, turn = state
        config, slots = self.tables[job, turn % self.n_slots[job]], self.n_slots[job]
        what = GO_ON if turn < slots - 1 else COMPARE if turn < slots else LEAVE
        return actions_of(np.array([config]), what), (job, turn + 1)


def filed(name):
    """What the same rule under other noise says of the board, as lines."""
    scores = {s["entrant"]: Scores.of(s["scores"]).lost for s in on_record(name)["submissions"]}
    rule, told = scores[DEFAULT], []
    for other in ("aa", "lstm"):
        apart = scores[other] - rule
        error = apart.std() / np.sqrt(len(apart))
        told.append(
            f"{other} - rule {apart.mean():+.1f} steps of {rule.mean():.0f}, standard error {error:.1f}; the lesser of "
            f"the two in each job {np.minimum(scores[other], rule).mean():.1f}"
        )
    jobs = len(rule) * (SURE * error / (AIM * rule.mean())) ** 2
    return [*told, f"jobs that it takes to see {AIM:.0%} less: {jobs:.0f}; the suite has {len(rule)}"]


def played(suite, rows, policy):
    """Scores of a policy up to its verdicts, and its searches."""
    search, ledger = suite.open(rows, 0)
    return play(policy, search, ledger, after=0).scores, search


def parts(suite, rows, scores, search):
    """Default steps lost in HORIZON by each cause, {cause: (n,)}; they add up to what was lost."""
    jobs, n = suite.jobs.take(rows), len(rows)
    kept, liked, tried = (
        np.zeros((n, jobs.width), int),
        np.zeros((n, jobs.width), int),
        np.zeros_like(jobs.mask),
    )
    for i, one in enumerate(search.searches):
        kept[i, : one.n_slots], liked[i, : one.n_slots] = one.confirmed, one.belief.best()
        tried[i, : one.n_slots] = one.tried > 0
    tried[:, :, 0] = True
    seen = jobs.take(slice(None))
    seen.mask = jobs.mask & tried
    best, measured = suite.gain[rows], 1 - oracle(seen)[1] / jobs.default_us
    believed, confirmed = (1 - jobs.usual_us(table) / jobs.default_us for table in (liked, kept))
    left = np.maximum(HORIZON - scores.verdict, 0)
    return {
        "never measured": left * (best - measured),
        "measured, not believed best": left * (measured - believed),
        "believed best, not confirmed": left * (believed - confirmed),
        "until the verdict": scores.lost - left * (best - confirmed),
    }


def main():
    name, most = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
    policy = sys.argv[3] if len(sys.argv) > 3 else DEFAULT
    print(*filed(name), sep="\n", flush=True)
    suite = JobSuite.load(name)
    rows = rows_of(suite, most)
    for who, chooser in (
        (policy, make_chooser(policy)),
        ("who knows", Knows(suite.best[rows], suite.n_slots[rows])),
    ):
        scores, search = played(suite, rows, chooser)
        print(f"{who}: {scores.lost.mean():.1f} {bootstrap(scores.lost)}, {len(rows)} jobs")
        for cause, lost in parts(suite, rows, scores, search).items():
            print(f"  {cause:29} {lost.mean():6.1f} {bootstrap(lost)}", flush=True)


if __name__ == "__main__":
    main()
