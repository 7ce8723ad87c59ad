"""The policy as it is trained: sb3-contrib's recurrent actor-critic, masked, with a fast LSTM pass.

Only training needs this module (and torch); ``agent/policy.py`` evaluates what it learned.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from stable_baselines3.common.vec_env import VecEnv
from torch import nn

from ..envs import spaces
from ..envs.spaces import N_CHANNELS, N_CONFIGS, N_OBSERVATION

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
States = tuple[Tensor, Tensor]


def config_mask(obs: Tensor) -> Tensor:
    """``spaces.config_mask`` for tensors, (n, N_CONFIGS) bool; rows of zeros (padding of sequences) are left open."""
    mask = obs[:, -spaces.N_MASK :] > 0.5
    flags = (mask[:, : spaces.N_PAIRS, None] & mask[:, None, spaces.N_PAIRS :]).flatten(1)
    return flags | ~mask.any(dim=1, keepdim=True)


class ConfigDistribution(MultiCategoricalDistribution):
    """One categorical over all configs, spoken to in actions ``[pair, channels]``.

    Two independent categoricals, one a knob, could not say "ring with 8 channels or NVLS with 16".
    """

    distribution: torch.distributions.Categorical  # type: ignore[assignment]

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """Nothing: the latent vector that comes here already is the scores."""
        return nn.Identity()

    def proba_distribution(self, action_logits: Tensor) -> ConfigDistribution:
        """Set the scores, (n, N_CONFIGS)."""
        self.distribution = torch.distributions.Categorical(logits=action_logits, validate_args=False)
        return self

    def log_prob(self, actions: Tensor) -> Tensor:
        """Of actions (n, 2), shape (n,)."""
        configs = actions[:, 0] * N_CHANNELS + actions[:, 1]
        return cast(Tensor, self.distribution.log_prob(configs))  # type: ignore[no-untyped-call]

    def entropy(self) -> Tensor:
        """Shape (n,)."""
        return cast(Tensor, self.distribution.entropy())  # type: ignore[no-untyped-call]

    def sample(self) -> Tensor:
        """Actions (n, 2)."""
        return self._actions(self.distribution.sample())  # type: ignore[no-untyped-call]

    def mode(self) -> Tensor:
        """The likeliest actions, (n, 2)."""
        return self._actions(self.distribution.logits.argmax(dim=1))

    @staticmethod
    def _actions(configs: Tensor) -> Tensor:
        return torch.stack([configs // N_CHANNELS, configs % N_CHANNELS], dim=1)


class ConfigHead(nn.Module):
    """(LSTM output beside observation) -> score per config, masked.

    ``v . relu(Z z + e_c + count_c s_0 + gap_c s_1)``: what was measured of a config acts on its score the same way for
    every config, so that it need not be learned 56 times; ``skip`` adds what is particular to each.
    """

    def __init__(self, hidden: int, width: int, depth: int) -> None:
        super().__init__()
        self.body = nn.Linear(hidden + N_OBSERVATION, width)
        self.z = nn.Linear(width, depth, bias=False)
        self.e = nn.Parameter(0.3 * torch.randn(N_CONFIGS, depth))
        self.s = nn.Parameter(0.3 * torch.randn(2, depth))
        self.v = nn.Parameter(0.1 * torch.randn(depth))
        self.skip = nn.Linear(width, N_CONFIGS)
        nn.init.orthogonal_(self.skip.weight, 0.01)
        nn.init.zeros_(self.skip.bias)

    def forward(self, latent: Tensor) -> Tensor:
        """``latent`` (n, hidden + N_OBSERVATION) -> (n, N_CONFIGS)."""
        obs = latent[:, -N_OBSERVATION:]
        z = torch.tanh(self.body(latent))
        start = N_OBSERVATION - spaces.N_MASK - 2 * N_CONFIGS
        count, gap = (
            obs[:, start : start + N_CONFIGS, None],
            obs[:, start + N_CONFIGS : start + 2 * N_CONFIGS, None],
        )
        hidden = self.z(z)[:, None, :] + self.e + count * self.s[0] + gap * self.s[1]
        scores = torch.relu(hidden) @ self.v + self.skip(z)
        return cast(Tensor, scores.masked_fill(~config_mask(obs), -1e8))


class _Extractor(nn.Module):
    """What SB3 calls ``mlp_extractor``: actor and critic on top of the LSTM. See :class:`MaskedLstmPolicy`."""

    def __init__(self, hidden: int, width: int, depth: int, n_seen: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = N_CONFIGS, width
        self.policy_net = ConfigHead(hidden, width, depth)
        self.value_net = nn.Sequential(nn.Linear(n_seen, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh())

    def forward_actor(self, latent: Tensor) -> Tensor:
        """(n, hidden + N_OBSERVATION) -> scores (n, N_CONFIGS)."""
        return self.policy_net(latent)  # type: ignore[no-any-return]

    def forward_critic(self, latent: Tensor) -> Tensor:
        """(n, n_seen) -> (n, width)."""
        return self.value_net(latent)  # type: ignore[no-any-return]


class MaskedLstmPolicy(RecurrentActorCriticPolicy):
    """Recurrent policy over configs: observation -> LSTM; LSTM output beside the observation -> :class:`ConfigHead`.

    The critic has no LSTM: it sees a part of the truth (:func:`revealed`) behind the observation, which the
    actor does not look at (asymmetric actor-critic, Pinto et al. 2017). ``head_width``, ``head_depth`` size the head;
    ``memory=False`` cuts the LSTM's output off (ablation).
    """

    def __init__(
        self, *args: Any, head_width: int = 64, head_depth: int = 24, memory: bool = True, **kwargs: Any
    ) -> None:
        self.head_width, self.head_depth, self.memory = head_width, head_depth, memory
        kwargs.setdefault("lstm_hidden_size", 64)
        kwargs.setdefault("ortho_init", False)
        kwargs |= {"enable_critic_lstm": False, "shared_lstm": False}
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = ConfigDistribution([spaces.N_PAIRS, N_CHANNELS])
        self.n_seen, self.features_dim = self.features_dim, N_OBSERVATION  # the critic's input, the LSTM's
        super()._build(lr_schedule)

    def _build_mlp_extractor(self) -> None:
        extractor = _Extractor(self.lstm_output_dim, self.head_width, self.head_depth, self.n_seen)
        self.mlp_extractor = extractor  # type: ignore[assignment]

    def scores(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Masked scores (n, N_CONFIGS) of observations (n, n_seen) in sequences, and the next states."""
        obs = obs[:, :N_OBSERVATION].float()
        out, states = self._process_sequence(obs, states, starts, self.lstm_actor)
        latent = torch.cat([out if self.memory else torch.zeros_like(out), obs], dim=1)
        return self.mlp_extractor.forward_actor(latent), states

    @staticmethod
    def _process_sequence(  # type: ignore[override]  # sb3-contrib's own annotation is not what it returns
        features: Tensor, lstm_states: States, episode_starts: Tensor, lstm: nn.LSTM
    ) -> tuple[Tensor, States]:
        """As the stock pass, but nn.LSTM runs over whole stretches between episode starts, not step by step.

        ``features`` (n_seq * length, d) -> output (n_seq * length, hidden) and the last states (1, n_seq, hidden).
        """
        n_seq = lstm_states[0].shape[1]
        sequence = features.reshape(n_seq, -1, lstm.input_size).swapaxes(0, 1)
        starts = episode_starts.reshape(n_seq, -1).swapaxes(0, 1)
        length = len(sequence)
        cuts = [0, *[t for t in range(1, length) if bool(starts[t].any())], length]
        outputs = []
        for begin, end in pairwise(cuts):
            keep = (1.0 - starts[begin]).view(1, n_seq, 1)
            lstm_states = (keep * lstm_states[0], keep * lstm_states[1])
            output, lstm_states = lstm(sequence[begin:end], lstm_states)
            outputs.append(output)
        return torch.cat(outputs).transpose(0, 1).flatten(0, 1), lstm_states

    def forward(  # type: ignore[override]
        self, obs: Tensor, lstm_states: RNNStates, episode_starts: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, RNNStates]:
        """Actions (n, 2), values (n, 1), log-probabilities (n,) and the next states."""
        distribution, states = self.get_distribution(obs, cast(States, lstm_states.pi), episode_starts)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions), RNNStates(states, states)

    def get_distribution(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States, episode_starts: Tensor
    ) -> tuple[ConfigDistribution, States]:
        """Masked distribution over configs, and the next states."""
        scores, states = self.scores(obs, lstm_states, episode_starts)
        return ConfigDistribution([spaces.N_PAIRS, N_CHANNELS]).proba_distribution(scores), states

    def predict_values(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States | None = None, episode_starts: Tensor | None = None
    ) -> Tensor:
        """(n, 1); the critic has no memory."""
        return self.value_net(self.mlp_extractor.forward_critic(obs.float()))  # type: ignore[no-any-return]

    def evaluate_actions(  # type: ignore[override]
        self, obs: Tensor, actions: Tensor, lstm_states: RNNStates, episode_starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (n, 1), log-probabilities (n,) and entropies (n,) of ``actions`` (n, 2) in padded sequences."""
        distribution, _ = self.get_distribution(obs, cast(States, lstm_states.pi), episode_starts)
        return self.predict_values(obs), distribution.log_prob(actions), distribution.entropy()

    def sharpen(self, factor: float) -> None:
        """Multiply all scores by ``factor``: the same order, a more certain choice."""
        head = cast(_Extractor, self.mlp_extractor).policy_net
        with torch.no_grad():
            for part in (head.v, head.skip.weight, head.skip.bias):
                part.mul_(factor)

    def export(self) -> dict[str, Array]:
        """Weights as ``policy.LstmPolicy`` wants them (float32)."""
        head, lstm = cast(_Extractor, self.mlp_extractor).policy_net, self.lstm_actor
        parts: dict[str, Tensor] = {
            "lstm_x": cast(Tensor, lstm.weight_ih_l0).T,
            "lstm_h": cast(Tensor, lstm.weight_hh_l0).T,
            "lstm_b": cast(Tensor, lstm.bias_ih_l0) + cast(Tensor, lstm.bias_hh_l0),
            "body_w": head.body.weight.T,
            "body_b": head.body.bias,
            "head_z": head.z.weight.T,
            "head_e": head.e,
            "head_s": head.s,
            "head_v": head.v,
            "skip_w": head.skip.weight.T,
            "skip_b": head.skip.bias,
        }
        arrays = {name: np.ascontiguousarray(t.detach().cpu().numpy(), np.float32) for name, t in parts.items()}
        if not self.memory:
            arrays["body_w"][: self.lstm_output_dim] = 0
        return arrays


#: Step time in default steps from which ``BatchVecEnv`` makes a window cost more than it loses.
HARSH = 1.3


N_REVEALED = 5


def revealed(truth: Array, best: Array, share: Array) -> Array:
    """What the critic sees of the truth, (n, N_REVEALED) float32: what is left to gain over the best measured config,
    the oracle's saving, the slot's share, the mean saving of a config, and how much longer a step the worst makes.

    ``truth`` (n, N_CONFIGS), -inf where masked; ``best`` (n,) index; ``share`` (n,).
    """
    open_ = np.isfinite(truth)
    oracle = truth.max(axis=1)
    now = truth[np.arange(len(truth)), best]
    mean = np.where(open_, truth, 0).sum(axis=1) / open_.sum(axis=1)
    worst = -np.where(open_, truth, 0).min(axis=1) * share
    return np.stack([oracle - now, oracle, share, mean, worst], axis=1).astype(np.float32)


class BatchVecEnv(VecEnv):
    """SB3's interface over an environment that steps ``n`` episodes at once (``envs.sim_env.BatchSim``).

    An episode's end is a true end (no bootstrap): the observation says how many trials are left.
    """

    def __init__(self, batch: Any, n: int, tail: float = 0.0, risk: float = 0.0) -> None:
        """``batch`` has ``reset() -> obs`` and ``step(actions) -> (obs, reward, terminated, truncated, info)``.

        ``tail``: windows that the result of a search stays in force after it. ``risk``: price of a window's step time
        above HARSH default steps.
        """
        self.tail, self.risk = tail, risk
        self.batch = batch  # before SB3 asks for attributes of it
        space = gym.spaces.Box(-4.0, 4.0, (N_OBSERVATION + N_REVEALED,), np.float32)
        super().__init__(n, space, spaces.action_space())
        self.returns, self.lengths = np.zeros(n), np.zeros(n, np.int64)
        self.actions = np.zeros((n, 2), np.int64)

    def reset(self) -> Array:  # type: ignore[override]
        """Observations (n, N_OBSERVATION + N_REVEALED) of fresh episodes."""
        self.returns[:], self.lengths[:] = 0, 0
        return self._reveal(self.batch.reset())

    def _reveal(self, obs: Array) -> Array:
        b = self.batch
        return np.concatenate([obs, revealed(b.truth, b.trials.best(), b.share)], axis=1)

    def step_async(self, actions: Array) -> None:
        """Keep the actions (n, 2)."""
        self.actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:  # type: ignore[override]
        """Step; infos carry SB3's ``episode`` statistics where one ended."""
        share = np.array(self.batch.share)  # of the running episodes; a step may begin others
        obs, reward, terminated, truncated, info = self.batch.step(self.actions)
        done = np.logical_or(terminated, truncated)
        # Against what the oracle would have got: the same optimum, and tasks with much to gain do not drown the rest.
        oracle, trial = info["oracle_saving"], info["expected_saving"]
        reward = reward - spaces.reward(oracle, oracle)
        # What the search found stays in force when it is over: that much more counts how good it is in the end.
        reward = reward + done * self.tail * (reward - spaces.TRIAL_PRICE * (trial - oracle))
        reward = reward - self.risk * np.maximum(-info["expected_saving"] * share - (HARSH - 1), 0)
        self.returns += reward
        self.lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(done):
            infos[i]["episode"] = {"r": float(self.returns[i]), "l": int(self.lengths[i]), "t": 0.0}
        self.returns[done], self.lengths[done] = 0, 0
        return self._reveal(obs), np.asarray(reward, np.float32), done, infos

    def close(self) -> None:
        """Nothing to free."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The same for all."""
        return [getattr(self.batch, attr_name, None)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """On the whole batch."""
        setattr(self.batch, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Not offered: there are no single environments."""
        raise NotImplementedError("a batch has no single environments")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never."""
        return [False] * len(list(self._get_indices(indices)))
