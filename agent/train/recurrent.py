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
from stable_baselines3.common.distributions import CategoricalDistribution
from torch import nn

from ...envs.search.interfaces import N_ACTIONS, N_WHAT
from ...envs.search.observation import BLANK, KEPT, N_CONTEXT, N_OBSERVATION, N_PER_CONFIG
from ...traces.spaces import N_CONFIGS
from ..policies.lstm import LAST, N_NEXT, N_READ, SURE, rule_scores

Array = np.ndarray[Any, Any]
Tensor = torch.Tensor
States = tuple[Tensor, Tensor]

#: What was learned is multiplied by this, so that steps of gradient descent are felt in scores of a rule's size.
GAIN = 3.0


_BLANK = torch.as_tensor(BLANK)
_KEPT = torch.as_tensor(KEPT)


def expand(obs: Tensor) -> Tensor:
    """``observation.expand`` for tensors."""
    blank = _BLANK.repeat(len(obs), 1)
    return blank.index_copy(1, _KEPT, obs)


def figures_of(obs: Tensor) -> Tensor:
    """(n, N_OBSERVATION) -> (n, N_PER_CONFIG, N_CONFIGS)."""
    figures = expand(obs)[:, N_CONTEXT:-N_CONFIGS]
    return figures.unflatten(1, (N_PER_CONFIG, N_CONFIGS))


def read(obs: Tensor) -> Tensor:
    """What the LSTM reads of observations, (n, N_READ)."""
    context = obs[:, :N_CONTEXT]
    figures = figures_of(obs)
    is_last = figures[:, LAST : LAST + 1]
    of_last = (figures * is_last).sum(dim=2)
    largest = figures.amax(dim=2)
    return torch.cat([context, of_last, largest], dim=1)


def rule_of(obs: Tensor, sure: float) -> Tensor:
    """``lstm.rule_scores`` for tensors, nothing of which is learned; rows of zeros (padding) have no mask."""
    found = rule_scores(obs.numpy(), sure=sure)
    scores = torch.as_tensor(found).clamp(min=-1e8)
    is_padding = (obs == 0).all(dim=1)
    return scores.masked_fill(is_padding[:, None, None], 0.0)


class TurnDistribution(CategoricalDistribution):
    """One categorical over every config with each of the N_NEXT that may come next, in the environment's actions."""

    distribution: torch.distributions.Categorical

    def __init__(self) -> None:
        super().__init__(N_ACTIONS)

    def proba_distribution_net(self, latent_dim: int) -> nn.Module:
        """Nothing: the latent vector that comes here already is the scores."""
        return nn.Identity()

    def proba_distribution(self, action_logits: Tensor) -> TurnDistribution:
        """Set the scores, (n, N_CONFIGS, N_NEXT)."""
        self.distribution = torch.distributions.Categorical(
            logits=action_logits.flatten(1), validate_args=False
        )
        return self

    def log_prob(self, actions: Tensor) -> Tensor:
        """Of actions (n,), shape (n,)."""
        configs = actions // N_WHAT
        what = actions % N_WHAT
        at = configs * N_NEXT + what
        return cast(Tensor, self.distribution.log_prob(at))  # type: ignore[no-untyped-call]

    def sample(self) -> Tensor:
        """Actions (n,)."""
        return self._actions(self.distribution.sample())  # type: ignore[no-untyped-call]

    def mode(self) -> Tensor:
        """The likeliest actions, (n,)."""
        at = self.distribution.logits.argmax(dim=1)
        return self._actions(at)

    @staticmethod
    def _actions(at: Tensor) -> Tensor:
        configs = at // N_NEXT
        what = at % N_NEXT
        return configs * N_WHAT + what


class TurnHead(nn.Module):
    """(LSTM output beside an observation) -> what is added to the rule's scores, (n, N_CONFIGS, N_NEXT).

    ``v . relu(Z z + e_c + S' f_c) + u . f_c + (W z)_what``: what is believed of a config (``f_c``, the N_PER_CONFIG
    figures of ``observation``) acts on its score the same way for every config, so that it need not be learned 56
    times. ``v``, ``u`` and ``W`` begin at 0: the untrained policy is the rule.
    """

    def __init__(self, hidden: int, width: int, depth: int) -> None:
        super().__init__()
        n_inputs = hidden + N_CONTEXT
        self.body = nn.Linear(n_inputs, width)
        self.z = nn.Linear(width, depth, bias=False)
        of_configs = 0.3 * torch.randn(N_CONFIGS, depth)
        of_figures = 0.3 * torch.randn(N_PER_CONFIG, depth)
        self.e = nn.Parameter(of_configs)
        self.s = nn.Parameter(of_figures)
        self.u = _zeros(N_PER_CONFIG)
        self.v = _zeros(depth)
        self.what = _zeros(width, N_NEXT)

    def forward(self, latent: Tensor) -> Tensor:
        """``latent`` (n, hidden + N_OBSERVATION) -> (n, N_CONFIGS, N_NEXT)."""
        obs = latent[:, -N_OBSERVATION:]
        figures = figures_of(obs)
        out_and_context = latent[:, : N_CONTEXT - N_OBSERVATION]
        z = torch.tanh(self.body(out_and_context))
        of_job = self.z(z)[:, None, :]
        of_figures = figures.transpose(1, 2) @ self.s
        hidden = of_job + self.e + of_figures
        active = torch.relu(hidden)
        weighted = figures * self.u[:, None]
        config = active @ self.v + weighted.sum(dim=1)
        what = z @ self.what
        return GAIN * (config[:, :, None] + what[:, None, :])


def _zeros(*shape: int) -> nn.Parameter:
    """A parameter that begins at 0."""
    return nn.Parameter(torch.zeros(*shape))


class _Extractor(nn.Module):
    """What SB3 calls ``mlp_extractor``: actor and critic on top of an LSTM each. See :class:`MaskedLstmPolicy`."""

    def __init__(self, hidden: int, width: int, depth: int) -> None:
        super().__init__()
        self.latent_dim_pi = N_CONFIGS * N_NEXT
        self.latent_dim_vf = width
        self.policy_net = TurnHead(hidden, width, depth)
        n_inputs = hidden + N_READ
        first = nn.Linear(n_inputs, 2 * width)
        second = nn.Linear(2 * width, width)
        layers = first, nn.Tanh(), second, nn.Tanh()
        self.value_net = nn.Sequential(*layers)


class MaskedLstmPolicy(RecurrentActorCriticPolicy):
    """Recurrent policy over the turns of a job: observation -> LSTM; its output beside the observation ->
    :class:`TurnHead`.

    The critic has an LSTM of its own (Ni et al. 2022). ``head_width``, ``head_depth`` size the head;
    ``recurrent_rate``: by what the learning rate is multiplied for the LSTMs, whose gradients are small; ``sure``: see
    ``lstm.rule_scores``.
    """

    def __init__(
        self,
        *args: Any,
        head_width: int = 64,
        head_depth: int = 24,
        recurrent_rate: float = 1.0,
        sure: float = SURE,
        **kwargs: Any,
    ) -> None:
        self.head_width = head_width
        self.head_depth = head_depth
        self.recurrent_rate = recurrent_rate
        self.sure = sure
        kwargs.setdefault("lstm_hidden_size", 64)
        kwargs.setdefault("ortho_init", False)
        kwargs |= {"enable_critic_lstm": True, "shared_lstm": False}
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Any) -> None:
        self.action_dist = TurnDistribution()
        self.features_dim = N_READ  # the LSTMs' input
        super()._build(lr_schedule)

    def rates(self) -> list[dict[str, Any]]:
        """Groups of parameters for an optimizer, each with what its learning rate is multiplied by, ``times``."""
        recurrent = list[Any]()
        others = list[Any]()
        for name, parameter in self.named_parameters():
            is_recurrent = name.startswith("lstm_")
            group = recurrent if is_recurrent else others
            group.append(parameter)
        return [{"params": others, "times": 1.0}, {"params": recurrent, "times": self.recurrent_rate}]

    def _build_mlp_extractor(self) -> None:
        extractor = _Extractor(self.lstm_output_dim, self.head_width, self.head_depth)
        self.mlp_extractor = extractor  # type: ignore[assignment]

    @property
    def _extractor(self) -> _Extractor:
        return cast(_Extractor, self.mlp_extractor)

    def scores(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Masked scores (n, N_CONFIGS, N_NEXT) of observations (n, N_OBSERVATION) in sequences, and the next states."""
        obs = obs.float()
        seen = read(obs)
        lstm = self.lstm_actor
        out, states = self._process_sequence(seen, states, starts, lstm)
        latent = torch.cat([out, obs], dim=1)
        learned = self._extractor.policy_net(latent)
        by_rule = rule_of(obs, self.sure)
        return by_rule + learned, states

    @staticmethod
    def _process_sequence(  # type: ignore[override]  # sb3-contrib's own annotation is not what it returns
        features: Tensor, lstm_states: States, episode_starts: Tensor, lstm: nn.LSTM
    ) -> tuple[Tensor, States]:
        """As the stock pass, but nn.LSTM runs over whole stretches between episode starts, not step by step.

        ``features`` (n_seq * length, d) -> output (n_seq * length, hidden) and the last states (1, n_seq, hidden).
        """
        n_seq = lstm_states[0].shape[1]
        by_sequence = features.reshape(n_seq, -1, lstm.input_size)
        sequence = by_sequence.swapaxes(0, 1)
        starts = episode_starts.reshape(n_seq, -1)
        starts = starts.swapaxes(0, 1)
        length = len(sequence)
        cuts = [0]
        for t in range(1, length):
            if bool(starts[t].any()):
                cuts.append(t)
        cuts.append(length)
        outputs = []
        for begin, end in pairwise(cuts):
            keep = (1.0 - starts[begin]).view(1, n_seq, 1)
            hidden, cell = lstm_states
            lstm_states = (keep * hidden, keep * cell)
            stretch = sequence[begin:end]
            output, lstm_states = lstm(stretch, lstm_states)
            outputs.append(output)
        found = torch.cat(outputs).transpose(0, 1)
        return found.flatten(0, 1), lstm_states

    def forward(  # type: ignore[override]
        self, obs: Tensor, lstm_states: RNNStates, episode_starts: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, RNNStates]:
        """Actions (n,), values (n, 1), log-probabilities (n,) and the next states."""
        of_actor, of_critic = _both(lstm_states)
        distribution, of_actor = self.get_distribution(obs, of_actor, episode_starts)
        values, of_critic = self._values(obs, of_critic, episode_starts)
        actions = distribution.get_actions(deterministic=deterministic)
        logs = distribution.log_prob(actions)
        states = RNNStates(of_actor, of_critic)
        return actions, values, logs, states

    def get_distribution(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States, episode_starts: Tensor
    ) -> tuple[TurnDistribution, States]:
        """Masked distribution over turns, and the next states."""
        scores, states = self.scores(obs, lstm_states, episode_starts)
        distribution = TurnDistribution()
        return distribution.proba_distribution(scores), states

    def predict_values(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States, episode_starts: Tensor
    ) -> Tensor:
        """(n, 1), from the states of the critic."""
        return self._values(obs, lstm_states, episode_starts)[0]

    def _values(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Values (n, 1) and the critic's next states."""
        seen = read(obs.float())
        lstm = cast(nn.LSTM, self.lstm_critic)
        out, states = self._process_sequence(seen, states, starts, lstm)
        latent = torch.cat([out, seen], dim=1)
        found = self._extractor.value_net(latent)
        return self.value_net(found), states

    def evaluate_actions(  # type: ignore[override]
        self, obs: Tensor, actions: Tensor, lstm_states: RNNStates, episode_starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (n, 1), log-probabilities (n,) and entropies (n,) of ``actions`` (n,) in padded sequences."""
        of_actor, of_critic = _both(lstm_states)
        distribution, _ = self.get_distribution(obs, of_actor, episode_starts)
        logs = distribution.log_prob(actions)
        values, _ = self._values(obs, of_critic, episode_starts)
        entropies = distribution.entropy()
        return values, logs, entropies

    def _parts(self) -> dict[str, tuple[Tensor, float, bool]]:
        """Weights by the name that they have at run time: the parameter, by what it is multiplied there, and whether it
        is transposed."""
        head = self._extractor.policy_net
        lstm = self.lstm_actor
        return {
            "lstm_x": (cast(Tensor, lstm.weight_ih_l0), 1.0, True),
            "lstm_h": (cast(Tensor, lstm.weight_hh_l0), 1.0, True),
            "lstm_b": (cast(Tensor, lstm.bias_ih_l0), 1.0, False),
            "body_w": (head.body.weight, 1.0, True),
            "body_b": (head.body.bias, 1.0, False),
            "head_z": (head.z.weight, 1.0, True),
            "head_e": (head.e, 1.0, False),
            "head_s": (head.s, 1.0, False),
            "head_u": (head.u, GAIN, False),
            "head_v": (head.v, GAIN, False),
            "head_what": (head.what, GAIN, False),
        }

    def export(self) -> dict[str, Array]:
        """Weights as ``lstm.LstmPolicy`` wants them (float32)."""
        arrays: dict[str, Array] = {}
        for name, (parameter, gain, turned) in self._parts().items():
            found = gain * parameter.detach().numpy()
            if turned:
                found = found.T
            arrays[name] = np.array(found, np.float32, order="C")
        second_bias = cast(Tensor, self.lstm_actor.bias_hh_l0)
        arrays["lstm_b"] += second_bias.detach().numpy()
        return arrays

    def take(self, weights: dict[str, Array]) -> None:
        """The inverse of :meth:`export`."""
        with torch.no_grad():
            for name, (parameter, gain, turned) in self._parts().items():
                found = torch.as_tensor(weights[name]) / gain
                if turned:
                    found = found.T
                parameter.copy_(found)
            second_bias = cast(Tensor, self.lstm_actor.bias_hh_l0)
            second_bias.zero_()


def _both(states: RNNStates) -> tuple[States, States]:
    """The states of the actor's LSTM, and of the critic's."""
    of_actor = cast(States, states.pi)
    of_critic = cast(States, states.vf)
    return of_actor, of_critic
