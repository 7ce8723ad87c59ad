"""Does a recurrent network know what a setting saves better than the search's Gaussian belief? Supervised by the truth.

  python tests/tools/recurrent_belief.py collect TRAIN.pkl --seed 901 --jobs 225
  python tests/tools/recurrent_belief.py collect TEST.pkl --seed 902 --jobs 25 --suite held-out
  python tests/tools/recurrent_belief.py train NET.pt --train TRAIN.pkl --test TEST.pkl [--epochs 18]

``collect`` lets the rule search fresh jobs, ``--jobs`` of each world, that are in no suite. Of each job it keeps up to
MOST measurements in order, what the Gaussian then says at CHECKS, and the simulator's truth: what each setting saves
alone, as a part of the step. ``train`` reads the measurements alone: no posterior and no running mean. The network has
a state of the job, of each slot and of each (slot, setting). At each measurement it sees what was tried beside what,
the log ratio of the steps, by how much that is off its own prediction, and the times of the calls.

After each CHECK it prints, network beside Gaussian: the root mean square error over all settings, and over those that
lose at most NEAR; the share of truths in the 50 and 90 % intervals; what the settings with the best means truly save
together. ``collect`` takes 0.5 s of a core a job, an epoch of 1,800 jobs a minute. All of it is simulated.
"""

import argparse
import math
import pickle
import time
from pathlib import Path

import numpy as np
import torch
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.bench.job_arena import play
from dynamiccl.envs.bench.job_suites import FAMILIES
from dynamiccl.envs.search.search import Search
from dynamiccl.traces.fingerprint import N_FEATURES
from dynamiccl.traces.spaces import N_CHANNELS, N_CONFIGS
from joblib import Parallel, delayed
from paired_policies import PART, fresh
from torch import nn

CHECKS = (0, 1, 2, 4, 8, 16, 32, 64)
MOST = CHECKS[-1]
#: Settings that lose at most this part of the step are near: those between which a search decides.
NEAR = 0.02
#: Truths are clipped to these parts of the step.
LOW, HIGH = -0.3, 0.9
#: A standard deviation that the network begins with (log); jobs of a batch.
FIRST_LOG_SD, BATCH = -3.5, 40
#: Quantiles of the normal distribution, of half and of nine tenths of it around its mean.
HALF, NINE = 0.674, 1.645


class Listening(Search):
    """A search that keeps what it measured, until its job has changed."""

    def listen(self):
        """From now on. Returns self."""
        self.heard, self.said = [], {0: self.figures()}
        return self

    def figures(self):
        """The Gaussian's means and standard deviations now, each (s, N_CONFIGS)."""
        both = [self.state.belief.figures(slot) for slot in range(self.n_slots)]
        return tuple(np.array(one, np.float32) for one in zip(*both, strict=True))

    def _learn(self, plan, seen, quads, is_aborted):
        current = self.confirmed.copy()
        super()._learn(plan, seen, quads, is_aborted)
        self._hear(plan, seen, current, quads.ratio, self.state.noise.of_quads(len(quads.ratios)))

    def _learn_look(self, plan, seen, steps, ms, is_aborted):
        current = self.confirmed.copy()
        super()._learn_look(plan, seen, steps, ms, is_aborted)
        if plan.one_of:
            self._hear(plan, seen, current, math.nan, 1.0)

    def _hear(self, plan, seen, current, ratio, noise):
        if len(self.heard) == MOST or self.marks.reopened:
            return
        calls = np.log(np.asarray(seen.call_us, float)) - self.state.default_calls.logs
        ran = np.where(seen.obeyed, plan.configs, 0)
        self.heard.append((ran, current, float(ratio), float(noise), np.where(seen.obeyed, calls, np.nan)))
        if len(self.heard) in CHECKS:
            self.said[len(self.heard)] = self.figures()


def collected(suite, world, seed, first):
    """What PART fresh jobs of a world have shown and what is true of them, a dict each."""
    opened, ledger = fresh(suite, world, seed, first).open(np.arange(PART), 0)
    found = []
    for search in opened.searches:
        search.__class__ = Listening
        job = search.listen().state.job
        known = {"world": world, "features": job.features.astype(np.float32), "mask": job.mask.copy()}
        known |= {"share": job.share, "calls": job.calls, "noise": search.state.noise.of_quads(1)}
        found.append(known | {"has_calls": bool(np.isfinite(job.call_us).any())})
    play(make_chooser("expected-improvement"), opened, ledger, after=200)
    jobs = fresh(suite, world, seed, first).jobs  # of the first step: those above have gone on
    for row, (known, search) in enumerate(zip(found, opened.searches, strict=True)):
        known |= {"heard": search.heard, "said": search.said, "truth": truth_of(jobs, row, known["mask"])}
    return found


def truth_of(jobs, row, mask):
    """(s, N_CONFIGS) what each open setting saves alone."""
    slots, configs = np.nonzero(mask)
    tables = np.zeros((1 + len(slots), jobs.width), np.int64)
    tables[1 + np.arange(len(slots)), slots] = configs
    us = jobs.usual_us(tables, np.full(len(tables), row))
    truth = np.zeros(mask.shape, np.float32)
    truth[slots, configs] = 1 - us[1:] / us[0]
    return truth


def collect(args):
    """Write the jobs' histories."""
    worlds = args.worlds.split(",") if args.worlds else list(FAMILIES[args.suite].worlds)
    parts = [(args.suite, world, args.seed, first) for first in range(0, args.jobs, PART) for world in worlds]
    jobs = []
    work = (delayed(collected)(*part) for part in parts)
    for done, part in enumerate(Parallel(args.processes, return_as="generator")(work), 1):
        jobs += part
        print(f"{done} of {len(parts)} parts", flush=True)
    args.file.write_bytes(pickle.dumps(jobs))


def names_of_configs():
    """(N_CONFIGS, e) pair and channels, one-hot."""
    rows, channels = np.divmod(np.arange(N_CONFIGS), N_CHANNELS)
    return torch.tensor(
        np.hstack([np.eye(rows.max() + 1)[rows], np.eye(N_CHANNELS)[channels]]), dtype=torch.float
    )


CONFIGS = names_of_configs()
N_NAME = CONFIGS.shape[1]
N_STATIC = N_FEATURES + 5


class Batch:
    """Jobs side by side: N slots of J jobs, T measurements; what a job lacks is padded, and ``live`` is 0 there."""

    def __init__(self, jobs):
        sizes = [len(job["mask"]) for job in jobs]
        n, n_jobs, times = sum(sizes), len(jobs), max(len(job["heard"]) for job in jobs)
        self.job = torch.tensor(np.repeat(np.arange(n_jobs), sizes))
        self.n_jobs, self.jobs = n_jobs, jobs
        self.truth = torch.tensor(np.concatenate([np.clip(job["truth"], LOW, HIGH) for job in jobs]))
        is_open = np.concatenate([job["mask"] for job in jobs])
        is_open[:, 0] = False
        self.open = torch.tensor(is_open)
        self.static = torch.tensor(np.concatenate([self._static(job) for job in jobs]), dtype=torch.float)
        of_slots, of_jobs = np.zeros((4, times, n), np.float32), np.zeros((4, times, n_jobs), np.float32)
        end = 0
        for k, job in enumerate(jobs):
            at, end = end, end + sizes[k]
            for t, (ran, current, ratio, noise, calls) in enumerate(job["heard"]):
                is_known = np.isfinite(calls)
                of_slots[:, t, at:end] = ran, current, np.where(is_known, np.clip(calls, -3, 3), 0), is_known
                is_few = math.isnan(ratio)
                of_jobs[:, t, k] = 0 if is_few else np.clip(ratio, -1, 1), min(noise, 1), is_few, 1
        self.ran, self.current = torch.tensor(of_slots[:2].astype(np.int64))
        self.calls, self.is_known = torch.tensor(of_slots[2:])
        self.ratio, self.noise, self.is_few, self.live = torch.tensor(of_jobs)
        self.lengths = self.live.sum(0)[self.job]  # (N,)

    @staticmethod
    def _static(job):
        n = len(job["mask"])
        calls = np.log2(np.maximum(job["calls"], 0.5)) / 8
        same = [math.log(max(job["noise"], 1e-4)) / 4, job["has_calls"], math.log(n) / 4]
        return np.hstack([job["features"], job["share"][:, None], calls[:, None], np.tile(same, (n, 1))])


class Network(nn.Module):
    """Gains of every (slot, setting), mean and log standard deviation, after each CHECK."""

    def __init__(self, of_slot=64, of_config=24, of_job=32, width=64):
        super().__init__()
        self.sizes = of_slot, of_config, of_job
        self.static = nn.Sequential(nn.Linear(N_STATIC, width), nn.GELU(), nn.Linear(width, width))
        self.job = nn.LSTMCell(5, of_job)
        self.slot = nn.LSTMCell(2 * N_NAME + width + 9 + of_job, of_slot)
        self.config = nn.GRUCell(2 * N_NAME + 10 + of_slot, of_config)
        n_in = width + N_NAME + of_slot + of_config + of_job
        layers = [nn.Linear(n_in, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 2)]
        self.head = nn.Sequential(*layers)
        self.prior = nn.Sequential(nn.Linear(width + N_NAME, 64), nn.GELU(), nn.Linear(64, 2))

    def gains(self, static, name, slot, config, job):
        """Mean and log standard deviation (...,) for names (..., e) of settings."""
        found = self.head(torch.cat([static, name, slot, config, job], -1))
        found = found + self.prior(torch.cat([static, name], -1))
        return 0.1 * found[..., 0], FIRST_LOG_SD + found[..., 1].clamp(-6, 3)

    def forward(self, b):
        """By CHECK: mean and log standard deviation, each (N, N_CONFIGS)."""
        static, n = self.static(b.static), len(b.job)
        of_slot, of_config, of_job = self.sizes
        slot, job = (torch.zeros(n, of_slot),) * 2, (torch.zeros(b.n_jobs, of_job),) * 2
        config = torch.zeros(n, N_CONFIGS, of_config)

        def everything():
            def wide(x):
                return x[:, None].expand(n, N_CONFIGS, -1)

            names = CONFIGS[None].expand(n, N_CONFIGS, N_NAME)
            return self.gains(wide(static), names, wide(slot[0]), config, wide(job[0][b.job]))

        found = {0: everything()}
        for t in range(len(b.ratio)):
            slot, config, job = self.measured(b, t, static, slot, config, job)
            if t + 1 in CHECKS:
                found[t + 1] = everything()
        return found

    def measured(self, b, t, static, slot, config, job):
        """The states after measurement ``t``."""
        every, ran, current = torch.arange(len(b.job)), b.ran[t], b.current[t]
        ran_name, current_name, is_changed = CONFIGS[ran], CONFIGS[current], (ran != current).float()
        of_job = job[0][b.job]
        of_ran, _ = self.gains(static, ran_name, slot[0], config[every, ran], of_job)
        of_current, _ = self.gains(static, current_name, slot[0], config[every, current], of_job)
        of_ran, of_current = of_ran * (ran > 0), of_current * (current > 0)
        expected = torch.log((1 - of_current).clamp(min=0.05)) - torch.log((1 - of_ran).clamp(min=0.05))
        n_changed = torch.zeros(b.n_jobs).index_add(0, b.job, is_changed)
        total = torch.zeros(b.n_jobs).index_add(0, b.job, expected * is_changed)
        off = (b.ratio[t] - total) * (1 - b.is_few[t])
        noise = torch.log(b.noise[t].clamp(min=1e-4)) / 4
        shared = torch.stack([10 * b.ratio[t], 10 * off, noise, b.is_few[t], torch.log1p(n_changed)], -1)
        live = b.live[t][:, None]
        job = kept(live, self.job(shared, job), job)
        own = [4 * b.calls[t], b.is_known[t], is_changed, (1 / n_changed.clamp(min=1))[b.job]]
        seen = torch.cat([shared[b.job], torch.stack(own, -1)], -1)
        live = live[b.job]
        told = torch.cat([ran_name, current_name, static, seen, job[0][b.job]], -1)
        slot = kept(live, self.slot(told, slot), slot)
        is_told = live * ((ran > 0) & ((is_changed > 0) | (b.is_known[t] > 0))).float()[:, None]
        told = torch.cat([ran_name, current_name, seen, 10 * of_ran[:, None], slot[0]], -1)
        config = self.told(config, ran, told, is_told)
        other = torch.cat([-seen[:, :2], seen[:, 2:5], 0 * seen[:, 5:7], seen[:, 7:]], -1)
        is_told = live * ((current > 0) & (is_changed > 0)).float()[:, None]
        told = torch.cat([current_name, ran_name, other, 10 * of_current[:, None], slot[0]], -1)
        return slot, self.told(config, current, told, is_told), job

    def told(self, config, which, told, is_told):
        """States (N, N_CONFIGS, k) after the setting ``which`` (N,) of each slot has heard something, or has not."""
        every = torch.arange(len(which))
        before = config[every, which]
        (after,) = kept(is_told, (self.config(told, before),), (before,))
        return config.index_put((every, which), after)


def kept(is_new, new, old):
    """The new states where there are some."""
    return tuple(is_new * a + (1 - is_new) * b for a, b in zip(new, old, strict=True))


def loss_of(network, b):
    """Negative log likelihood of the truths, each job about alike."""
    losses = []
    weights = (1 / torch.bincount(b.job).float().sqrt())[b.job][:, None].expand_as(b.open)
    for check, (mean, log_sd) in network(b).items():
        live = b.open & (b.lengths >= check)[:, None]
        if live.any():
            z = (mean - b.truth)[live] * torch.exp(-log_sd[live])
            loss, weight = 0.5 * (z**2).clamp(max=50) + log_sd[live], weights[live]
            losses.append((weight * loss).sum() / weight.sum())
    return torch.stack(losses).mean()


def figures_of(mean, sd, truth, is_open):
    """Of one job: squared errors, those of near settings, shares in 50 and 90 %, what the best means save."""
    error, deviation = (mean - np.clip(truth, LOW, HIGH))[is_open], sd[is_open]
    near = error[truth[is_open] > -NEAR]
    best = np.where(is_open, mean, -np.inf)
    best[:, 0] = 0.0
    picks = best.argmax(1)
    inside = [np.mean(np.abs(error) < k * deviation) for k in (HALF, NINE)]
    saved = truth[np.arange(len(truth)), picks].sum()
    return [np.mean(error**2), np.mean(near**2) if near.size else np.nan, *inside, saved]


@torch.no_grad()
def show(network, jobs):
    """A line for each CHECK."""
    rows = {check: [] for check in CHECKS}
    for first in range(0, len(jobs), BATCH):
        b = Batch(jobs[first : first + BATCH])
        of_job, is_open = b.job.numpy(), b.open.numpy()
        for check, (mean, log_sd) in network(b).items():
            mean, sd = mean.numpy(), torch.exp(log_sd).numpy()
            for k, job in enumerate(b.jobs):
                here = of_job == k
                if check in job["said"] and is_open[here].any():
                    known, deviation = job["said"][check]
                    asked = job["truth"], is_open[here]
                    mine = figures_of(mean[here], sd[here], *asked)
                    rows[check].append([mine, figures_of(np.clip(known, LOW, HIGH), deviation, *asked)])
    for check, found in rows.items():
        if not found:
            continue
        x = np.array(found)  # (jobs, 2, 5)
        rmse, near = np.sqrt(np.nanmean(x[:, :, :2], axis=0)).T
        half, nine, saved = x[:, :, 2:].mean(axis=0).T
        gap = x[:, 0, 4] - x[:, 1, 4]
        told = f"after {check:2} measurements, {len(x)} jobs, network / Gaussian: rmse {rmse[0]:.4f} / {rmse[1]:.4f}, "
        told += f"near {near[0]:.4f} / {near[1]:.4f}, in 50 % {half[0]:.0%} / {half[1]:.0%}, "
        told += f"in 90 % {nine[0]:.0%} / {nine[1]:.0%}, best means save {saved[0]:.4f} / {saved[1]:.4f}, "
        print(f"{told}difference {gap.mean():+.4f} ({gap.std() / math.sqrt(len(gap)):.4f})", flush=True)


def read(paths):
    """The jobs of files of ``collect``."""
    return [job for path in paths for job in pickle.loads(Path(path).read_bytes()) if job["heard"]]


def train(args):
    """Train, show how it stands every five epochs, and write the weights."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    jobs, test, network, begun = read(args.train), read(args.test), Network(), time.monotonic()
    steps = args.epochs * math.ceil(len(jobs) / BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps + 1)
    for epoch in range(1, args.epochs + 1):
        order = np.argsort(
            [len(job["mask"]) + 2 * rng.random() for job in jobs]
        )  # jobs of about as many slots
        parts = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(parts)
        losses = []
        for part in parts:
            loss = loss_of(network, Batch([jobs[i] for i in part]))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}, {time.monotonic() - begun:.0f} s", flush=True)
        if epoch % 5 == 0 or epoch == args.epochs:
            torch.save(network.state_dict(), args.file)
            show(network, test)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("collect", "train"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--suite", default="standard", choices=FAMILIES)
    parser.add_argument("--worlds", default="", help="all of the suite, if none are named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=PART, help=f"of each world, a multiple of {PART}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--train", nargs="+", default=[], help="files of `collect`")
    parser.add_argument("--test", nargs="+", default=[], help="files of `collect`")
    parser.add_argument("--epochs", type=int, default=18)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.jobs % PART:
        parser.error(f"--jobs {args.jobs}: a multiple of {PART}")
    if args.what == "train" and not (args.train and args.test):
        parser.error("train needs --train and --test: files of `collect`")
    {"collect": collect, "train": train}[args.what](args)


if __name__ == "__main__":
    main()
