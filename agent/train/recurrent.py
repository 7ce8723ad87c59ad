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
    return _BLANK.repeat(len(obs), 1).index_copy(1, _KEPT, obs)


def figures_of(obs: Tensor) -> Tensor:
    """(n, N_OBSERVATION) -> (n, N_PER_CONFIG, N_CONFIGS)."""
    return expand(obs)[:, N_CONTEXT:-N_CONFIGS].unflatten(1, (N_PER_CONFIG, N_CONFIGS))


def read(obs: Tensor) -> Tensor:
    """What the LSTM reads of observations, (n, N_READ)."""
    f = figures_of(obs)
    return torch.cat([obs[:, :N_CONTEXT], (f * f[:, LAST : LAST + 1]).sum(dim=2), f.amax(dim=2)], dim=1)


def rule_of(obs: Tensor, sure: float) -> Tensor:
    """``lstm.rule_scores`` for tensors, nothing of which is learned; rows of zeros (padding) have no mask."""
    scores = torch.as_tensor(rule_scores(obs.numpy(), sure=sure)).clamp(min=-1e8)
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
        configs, what = actions // N_WHAT, actions % N_WHAT
        at = configs * N_NEXT + what
        return cast(Tensor, self.distribution.log_prob(at))  # type: ignore[no-untyped-call]

    def sample(self) -> Tensor:
        """Actions (n,)."""
        return self._actions(self.distribution.sample())  # type: ignore[no-untyped-call]

    def mode(self) -> Tensor:
        """The likeliest actions, (n,)."""
        return self._actions(self.distribution.logits.argmax(dim=1))

    @staticmethod
    def _actions(at: Tensor) -> Tensor:
        return at // N_NEXT * N_WHAT + at % N_NEXT


class TurnHead(nn.Module):
    """(LSTM output beside an observation) -> what is added to the rule's scores, (n, N_CONFIGS, N_NEXT).

    ``v . relu(Z z + e_c + S' f_c) + u . f_c + (W z)_what``: what is believed of a config (``f_c``, the N_PER_CONFIG
    figures of ``observation``) acts on its score the same way for every config, so that it need not be learned 56
    times. ``v``, ``u`` and ``W`` begin at 0: the untrained policy is the rule.
    """

    def __init__(self, hidden: int, width: int, depth: int) -> None:
        super().__init__()
        self.body = nn.Linear(hidden + N_CONTEXT, width)
        self.z = nn.Linear(width, depth, bias=False)
        self.e = nn.Parameter(0.3 * torch.randn(N_CONFIGS, depth))
        self.s = nn.Parameter(0.3 * torch.randn(N_PER_CONFIG, depth))
        self.u = nn.Parameter(torch.zeros(N_PER_CONFIG))
        self.v = nn.Parameter(torch.zeros(depth))
        self.what = nn.Parameter(torch.zeros(width, N_NEXT))

    def forward(self, latent: Tensor) -> Tensor:
        """``latent`` (n, hidden + N_OBSERVATION) -> (n, N_CONFIGS, N_NEXT)."""
        obs = latent[:, -N_OBSERVATION:]
        z, f = torch.tanh(self.body(latent[:, : N_CONTEXT - N_OBSERVATION])), figures_of(obs)
        hidden = self.z(z)[:, None, :] + self.e + f.transpose(1, 2) @ self.s
        config = torch.relu(hidden) @ self.v + (f * self.u[:, None]).sum(dim=1)
        return GAIN * (config[:, :, None] + (z @ self.what)[:, None, :])


class _Extractor(nn.Module):
    """What SB3 calls ``mlp_extractor``: actor and critic on top of an LSTM each. See :class:`MaskedLstmPolicy`."""

    def __init__(self, hidden: int, width: int, depth: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = N_CONFIGS * N_NEXT, width
        self.policy_net = TurnHead(hidden, width, depth)
        self.value_net = nn.Sequential(
            nn.Linear(hidden + N_READ, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh()
        )


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
        self.head_width, self.head_depth = head_width, head_depth
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
        recurrent, others = list[Any](), list[Any]()
        for name, parameter in self.named_parameters():
            (recurrent if name.startswith("lstm_") else others).append(parameter)
        return [{"params": others, "times": 1.0}, {"params": recurrent, "times": self.recurrent_rate}]

    def _build_mlp_extractor(self) -> None:
        extractor = _Extractor(self.lstm_output_dim, self.head_width, self.head_depth)
        self.mlp_extractor = extractor  # type: ignore[assignment]

    def scores(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Masked scores (n, N_CONFIGS, N_NEXT) of observations (n, N_OBSERVATION) in sequences, and the next states."""
        obs = obs.float()
        out, states = self._process_sequence(read(obs), states, starts, self.lstm_actor)
        learned = cast(_Extractor, self.mlp_extractor).policy_net(torch.cat([out, obs], dim=1))
        return rule_of(obs, self.sure) + learned, states

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
        """Actions (n,), values (n, 1), log-probabilities (n,) and the next states."""
        distribution, states = self.get_distribution(obs, cast(States, lstm_states.pi), episode_starts)
        values, of_critic = self._values(obs, cast(States, lstm_states.vf), episode_starts)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions), RNNStates(states, of_critic)

    def get_distribution(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States, episode_starts: Tensor
    ) -> tuple[TurnDistribution, States]:
        """Masked distribution over turns, and the next states."""
        scores, states = self.scores(obs, lstm_states, episode_starts)
        return TurnDistribution().proba_distribution(scores), states

    def predict_values(  # type: ignore[override]
        self, obs: Tensor, lstm_states: States, episode_starts: Tensor
    ) -> Tensor:
        """(n, 1), from the states of the critic."""
        return self._values(obs, lstm_states, episode_starts)[0]

    def _values(self, obs: Tensor, states: States, starts: Tensor) -> tuple[Tensor, States]:
        """Values (n, 1) and the critic's next states."""
        seen = read(obs.float())
        out, states = self._process_sequence(seen, states, starts, cast(nn.LSTM, self.lstm_critic))
        found = cast(_Extractor, self.mlp_extractor).value_net(torch.cat([out, seen], dim=1))
        return self.value_net(found), states

    def evaluate_actions(  # type: ignore[override]
        self, obs: Tensor, actions: Tensor, lstm_states: RNNStates, episode_starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (n, 1), log-probabilities (n,) and entropies (n,) of ``actions`` (n,) in padded sequences."""
        distribution, _ = self.get_distribution(obs, cast(States, lstm_states.pi), episode_starts)
        logs = distribution.log_prob(actions)
        values, _ = self._values(obs, cast(States, lstm_states.vf), episode_starts)
        return values, logs, distribution.entropy()

    def _parts(self) -> dict[str, tuple[Tensor, float, bool]]:
        """Weights by the name that they have at run time: the parameter, by what it is multiplied there, and whether it
        is transposed."""
        head, lstm = cast(_Extractor, self.mlp_extractor).policy_net, self.lstm_actor
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
            arrays[name] = np.array(found.T if turned else found, np.float32, order="C")
        arrays["lstm_b"] += cast(Tensor, self.lstm_actor.bias_hh_l0).detach().numpy()
        return arrays

    def take(self, weights: dict[str, Array]) -> None:
        """The inverse of :meth:`export`."""
        with torch.no_grad():
            for name, (parameter, gain, turned) in self._parts().items():
                found = torch.as_tensor(weights[name]) / gain
                parameter.copy_(found.T if turned else found)
            cast(Tensor, self.lstm_actor.bias_hh_l0).zero_()
