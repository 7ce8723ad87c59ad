"""Every number of the search outside the belief: what it means, its unit, its reason, and where it was measured.

"Log" means the natural logarithm of a ratio of step times: 0.01 is about 1 %. A *quad* is four turns, see
step_times.py. "LOG" is ``agent/LOG.md``. A number without a source was set once and never measured by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchConfig:
    """How a search is run. Steps are optimizer steps."""

    profile_steps: int = 8  # default steps that find the slots and the first step time
    window_steps: tuple[int, int] = (5, 10)  # fewest and most steps of a look at what holds now
    good_noise: float = 0.004  # standard deviation of its log step time that needs no longer look
    try_quads: tuple[int, int] = (1, 3)  # fewest and most quads of a table that is tried
    rounds: int = 20  # exploring windows that a policy may ask for, at most ...
    rounds_a_slot: int = 3  # ... or this many per slot, if that is more
    quads_long_steps: int = (
        1000  # after this many quads a table is rejected whose long steps may cost what it gains
    )
    comparisons: int = 4  # of one search, at most
    least_gain: float = 0.001  # part of the step below which a table is not worth a comparison
    trials: int = 250  # measurements of trials after the verdict, at most
    more_choices: bool = False  # a policy may ask for longer windows, looks at the default and another search
    passes: int = 2  # rounds over all slots without a trial after which a policy has nothing left to try
    reveal: float = (
        0.5  # noise of a window, in windows, when its worth is predicted: more windows will follow
    )
    budget: float = (
        0.05  # part of the job's time that the search may lose against the default; 0: nothing is tried
    )
    watch_share: float = (
        0.008  # part of the steps that may run the default once it has shown that the table gains
    )
    change: float = 0.03  # lasting change of the step time (log) that starts a new search


# -- the job's account -------------------------------------------------------------------------------------------------

#: The budget counts for this many steps from the start: a job may be longer, but nobody knows (a short job's search
#: must not stop because few steps have passed).
BUDGET_STEPS = 4000
#: Steps of a job that figures are stated for: the length that the benchmark plays and the reward counts.
HORIZON = 20_000
#: Default steps that are a reward of 1.
REWARD_UNIT = 100.0
#: Quads after an episode that measure the table's worth for the reward. In 28 simulated jobs of seven worlds the error
#: of the worth is 56 default steps of 20,000.
REWARD_QUADS = 24
#: What a masked action costs, in the unit of the reward, which is 100 default steps.
MASKED_PRICE = 0.01
#: Searches of the same job that a policy may ask for: each is one more chance for luck.
MOST_SEARCHES = 10
#: A window that a policy wants longer has this many times as many quads, or steps.
LONGER = 3

# -- windows -----------------------------------------------------------------------------------------------------------

#: Steps of a window that do not count after a table has changed: the step under way runs under both.
DISCARD = 1
#: More such steps if an algorithm is new to a slot's communicator: NCCL connects lazily, the first runs are slow.
WARM_STEPS = 2
#: Single steps whose logs are kept to estimate the noise: about ten windows.
NOISE_STEPS = 96
#: Fewest steps of a window that the noise is estimated from: two differ by chance alone.
NOISE_LEAST = 3

# -- turns: two tables alternate, see step_times.py ------------------------------------------------------------

#: Steps of a turn, and of a turn of a job of which a part of a table's effect carries over into the next step.
TURN_STEPS, CARRIED_TURN_STEPS = 1, 2
#: Steps of a turn of a job whose steps are not alike, so that no rhythm tells where the next one begins.
LONG_TURN_STEPS = 8
#: Standard errors by which that part has to be above 0.
CARRIED_ERRORS = 3.0
#: Fewest and most quads of a comparison between two checks. Each of them needs an agreement of all ranks. With fewer
#: than 4, 10 of 157 series of A100 nodes show a difference that is none (5 % is the level); with 4 it is 5.
CHECK_QUADS = (4, 16)

# -- the sequential test -----------------------------------------------------------------------------------------------

#: The chance that a job in which nothing can gain ever keeps a table; its comparisons share it, see ``level_of``.
ALPHA = 0.05
#: Quads at which the interval is narrowest for its level, and scheduled looks at the default.
TUNED_FOR = 10.0
WATCH_TUNED_FOR = 4.0
#: A run that keeps nothing says which gain it would have seen: with a comparison of so many quads.
SEEN_QUADS = 25
#: Quads that the noise is known from when the default is looked at: all that are kept, which have two values each.
WATCH_KNOWN = NOISE_STEPS / 2
#: Ratios further from the median than this many standard deviations are pulled in to there: a straggler is no evidence.
CLIP = 3.0
#: A table is given up if its mean and this many standard errors are below the least gain that pays.
HOPE = 2.0
#: The noise measured before a comparison counts as much as this many quads.
KNOWN_QUADS = 6.0

# -- long steps --------------------------------------------------------------------------------------------------------

#: A step counts for at most this many usual steps: longer ones are the job's own, such as checkpoints.
LONGEST_STEP = 3.0
#: What a long step of the reference that was not seen yet may cost, in steps.
LONG_STEP = 2.0
#: Standard errors by which long steps have to make a table slower before it is rejected: it is looked at after every
#: window, so 150 clean default steps are needed to charge a table with 4 %.
LONG_STEP_ERRORS = 3.0

# -- exploring and trials ----------------------------------------------------------------------------------------------

#: A step of a trial is clearly slower by this many standard deviations of a step ...
SLOWER = 4.0
#: ... and by this much (log): a window ends with such a step, so a trial that loses costs a step or two.
SLOWER_LOG = 0.02

# -- steps that are too slow -------------------------------------------------------------------------------------------

#: A step that takes this many default steps aborts its window, if a setting in it was never measured.
ABORT = 1.5
#: Windows that a setting may abort as the likeliest cause. A checkpoint may abort one, but not two.
MOST_ABORTED = 1
#: A setting that is likelier than this to make a step too slow runs at a few calls first ...
RISKY = 0.01
#: ... in slots with at least this many calls a step: below, one call is a large part of the step.
FEWEST_CALLS = 8
#: From this likelihood on a few calls count as risky as all: even one call may make the step too slow.
RISKY_AT_ONE_CALL = 0.7
#: Calls of each slot that a window at few calls is to hold.
FEW_CALLS = 2

# -- monitoring --------------------------------------------------------------------------------------------------------

#: Windows that the usual step time is taken from.
USUAL = 64
#: Windows in a row off the usual that are a change ...
ODD = 6
#: ... or this many, if windows have LONG_WINDOW steps or more, which are steadier.
ODD_LONG = 4
#: Steps of a window from which on it is long.
LONG_WINDOW = 8
#: A window is off the usual by this many standard deviations.
FAR = 3.0
#: Windows before the usual step time is known.
LEAST_USUAL = 4
#: The usual step time is computed anew every so many windows: sorting at each costs more than it tells.
FRESH = 4
#: Level of a single look that proves by itself that a table is slower than the default ...
AT_ONCE = 1e-3
#: ... if it is slower by this much (log).
PLAIN = 0.08
#: Level of all scheduled looks at the default of one table together: they go on for as long as the job does.
WATCH_ALPHA = 0.01
#: Longest time between two scheduled visits, in usual times between visits.
LONGEST = 8
#: Visits come this many times as often until they show that the table gains: it may have been adopted by luck.
EARLY = 16
#: A table that gains nothing in this many scheduled visits is dropped.
PROOF = 6
#: A table that has become slower than the default by this much (log) is dropped without one more window.
HARM = 0.12
#: Visits out of turn that double the price of the next, at most: no price is too large for a float.
MOST_SURVIVED = 30
#: The least gain (log) that a look at the default is taken to cost.
SMALL = 0.05
#: Standard deviations of a look by which a table that has become slower has to be slower than the default.
SURE = 2.5
#: Levels of the step time (log) within which a job runs at the same pace.
SAME_LEVEL = 0.015
