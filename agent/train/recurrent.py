"""The policy as it is trained: sb3-contrib's recurrent actor-critic, masked, with a fast LSTM pass.

Only training needs this module (and torch); ``agent/policies/lstm.py`` evaluates what it learned.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import MultiCategoricalDistribution
from torch import nn

from ...envs.search import turns
from ...envs.search.turns import N_OBSERVATION, N_PER_CONFIG, SCALE
from ...traces import spaces
from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CHANNELS, N_CONFIGS
from ..policies.lstm import IN_FORCE, LAST, LATER, TEMPER

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
States = tuple[Tensor, Tensor]
Rule = tuple[float, float, float, float]

#: What was learned is multiplied by this, so that steps of gradient descent are felt in scores of a rule's size.
GAIN = 3.0
#: Entries of an observation that say nothing of single configs.
N_CONTEXT = N_FEATURES + len(turns.CONTEXT)
#: What the LSTM reads: those, the figures of the config that was chosen last, and the most that any open config has.
N_READ = N_CONTEXT + 2 * N_PER_CONFIG


def config_mask(obs: Tensor) -> Tensor:
    """What may be chosen, (n, N_CONFIGS) bool; rows of zeros (padding of sequences) are left open."""
    flags = obs[:, -N_CONFIGS:] > 0.5
    return flags | ~flags.any(dim=1, keepdim=True)


def figures_of(obs: Tensor) -> Tensor:
    """(n, N_OBSERVATION) -> (n, N_PER_CONFIG, N_CONFIGS)."""
    return obs[:, N_CONTEXT:-N_CONFIGS].unflatten(1, (N_PER_CONFIG, N_CONFIGS))


def read(obs: Tensor) -> Tensor:
    """What the LSTM reads of observations, (n, N_READ)."""
    f = figures_of(obs)
    return torch.cat([obs[:, :N_CONTEXT], (f * f[:, LAST : LAST + 1]).sum(dim=2), f.amax(dim=2)], dim=1)


def rule_scores(figures: Tensor, later: Tensor, rule: Rule) -> Tensor:
    """``policy.rule_scores`` for tensors."""
    soon, least, risk, far = rule
    ahead, learned, worth = figures[:, 0] / SCALE, figures[:, 1] / SCALE, figures[:, 2] / SCALE / 10
    foresight = torch.where(later, far, soon)[:, None]
    scores = foresight * worth + ahead - risk * learned
    scores = torch.where(foresight * worth > soon * least, scores, scores - 2 * soon * least)
    then = (scores * soon / far).masked_fill(figures[:, IN_FORCE] > 0.5, 0.0)
    return torch.where(later[:, None], then, torch.where(ahead >= 0, scores.clamp(min=0), scores)) / TEMPER


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
    """(LSTM output beside an observation) -> score per config, masked: the rule's, and what was learned beside it.

    ``v . relu(Z z + e_c + S' f_c) + u . f_c``: what is believed of a config (``f_c``, the N_PER_CONFIG figures of
    ``turns``) acts on its score the same way for every config, so that it need not be learned 56 times. ``v`` and ``u``
    begin at 0: the untrained policy is the rule.
    """

    def __init__(self, hidden: int, width: int, depth: int, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.body = nn.Linear(hidden + N_CONTEXT, width)
        self.z = nn.Linear(width, depth, bias=False)
        self.e = nn.Parameter(0.3 * torch.randn(N_CONFIGS, depth))
        self.s = nn.Parameter(0.3 * torch.randn(N_PER_CONFIG, depth))
        self.u = nn.Parameter(torch.zeros(N_PER_CONFIG))
        self.v = nn.Parameter(torch.zeros(depth))

    def forward(self, latent: Tensor) -> Tensor:
        """``latent`` (n, hidden + N_OBSERVATION) -> (n, N_CONFIGS)."""
        obs = latent[:, -N_OBSERVATION:]
        z = torch.tanh(self.body(latent[:, : N_CONTEXT - N_OBSERVATION]))
        f = figures_of(obs)
        hidden = self.z(z)[:, None, :] + self.e + f.transpose(1, 2) @ self.s
        later = obs[:, LATER] > 0.5
        learned = (torch.relu(hidden) @ self.v + (f * self.u[:, None]).sum(dim=1)).masked_fill(later[:, None], 0.0)
        return (rule_scores(f, later, self.rule) + GAIN * learned).masked_fill(~config_mask(obs), -1e8)


class _Extractor(nn.Module):
    """What SB3 calls ``mlp_extractor``: actor and critic on top of the LSTM. See :class:`MaskedLstmPolicy`."""

    def __init__(self, hidden: int, width: int, depth: int, n_seen: int, rule: Rule) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = N_CONFIGS, width
        self.policy_net = ConfigHead(hidden, width, depth, rule)
        n_read = N_READ + n_seen - N_OBSERVATION
        self.value_net = nn.Sequential(nn.Linear(n_read, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh())

    def forward_actor(self, latent: Tensor) -> Tensor:
        """(n, hidden + N_OBSERVATION) -> scores (n, N_CONFIGS)."""
        return self.policy_net(latent)  # type: ignore[no-any-return]

    def forward_critic(self, seen: Tensor) -> Tensor:
        """(n, n_seen) -> (n, width)."""
        told = torch.cat([read(seen[:, :N_OBSERVATION]), seen[:, N_OBSERVATION:]], dim=1)
        return self.value_net(told)  # type: ignore[no-any-return]


class MaskedLstmPolicy(RecurrentActorCriticPolicy):
    """Recurrent policy over the turns of a job: observation -> LSTM; its output beside the observation ->
    :class:`ConfigHead`.

    The critic has no LSTM: it sees a part of the truth (``batches.JobBatch.revealed``) behind the observation, which
    the actor does not look at (asymmetric actor-critic, Pinto et al. 2017). ``head_width``, ``head_depth`` size the
    head; ``rule`` is foresight, least, risk and later foresight of the rule beside it; ``memory=False`` cuts the LSTM's
    output off (ablation).
    """

    def __init__(
        self,
        *args: Any,
        head_width: int = 64,
        head_depth: int = 24,
        rule: Rule = (20.0, 2e-4, 0.3, 600.0),
        memory: bool = True,
        **kwargs: Any,
    ) -> None:
        self.head_width, self.head_depth, self.rule, self.memory = head_width, head_depth, rule, memory
        kwargs.setdefault("lstm_hidden_size", 64)
        kwargs.setdefault("ortho_init", False)
        kwargs |= {"enable_critic_lstm": False, "shared_lstm": False}
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = ConfigDistribution([spaces.N_PAIRS, N_CHANNELS])
        self.n_seen, self.features_dim = self.features_dim, N_READ  # the critic's input, the LSTM's
        super()._build(lr_schedule)

    def _build_mlp_extractor(self) -> None:
        extractor = _Extractor(self.lstm_output_dim, self.head_width, self.head_depth, self.n_seen, self.rule)
        self.mlp_extractor = extractor  # type: ignore[assignment]

    def scores(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Masked scores (n, N_CONFIGS) of observations (n, n_seen) in sequences, and the next states."""
        obs = obs[:, :N_OBSERVATION].float()
        out, states = self._process_sequence(read(obs), states, starts, self.lstm_actor)
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
            "head_u": GAIN * head.u,
            "head_v": GAIN * head.v,
            "rule": torch.tensor(self.rule),
        }
        arrays = {name: np.ascontiguousarray(t.detach().cpu().numpy(), np.float32) for name, t in parts.items()}
        if not self.memory:
            arrays["body_w"][: self.lstm_output_dim] = 0
        return arrays
