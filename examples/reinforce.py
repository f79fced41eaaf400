"""Reinforcement learning: REINFORCE with a baseline balances a pole, on episodes that the current policy plays.

    python examples/reinforce.py

The training set is a stream that plays as it is read. The trainer asks for a batch when the update before it is done,
so all games are on-policy; a worker process (`num_workers=1`) would play on with the first weights. The rewards of
evaluations say which policy is the best, and remains.
In plain PyTorch: about 37 lines for the loop, evaluations and the best weights; with unit and trainer 29.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import IterableDataset

from omnitrain import StepOutput, Trainer

LENGTH, GAMES, DISCOUNT = 200, 16, 0.98  # of a game, at once, of a reward that comes a step later


def move(states: Tensor, actions: Tensor) -> Tensor:
    """Return the cart-poles a fiftieth of a second later (Barto, Sutton and Anderson, 1983)."""
    _, speed, angle, spin = states.unbind(1)
    push = (20.0 * actions - 10.0 + 0.05 * spin**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    return states + 0.02 * torch.stack([speed, push - 0.05 * turn * angle.cos() / 1.1, spin, turn], dim=1)


class Episodes(IterableDataset[dict[str, Tensor]]):
    """Plays some games at once, each until the pole falls, the cart leaves the track, or the time is over."""

    def __init__(self, policy: nn.Module, rounds: int) -> None:
        self.policy, self.rounds = policy, rounds

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(self.rounds):
            games = self.play()
            yield from ({name: values[:, game] for name, values in games.items()} for game in range(GAMES))

    @torch.no_grad()
    def play(self) -> dict[str, Tensor]:
        device = next(self.policy.parameters()).device
        state, alive = torch.rand(GAMES, 4) * 0.1 - 0.05, torch.ones(GAMES, dtype=torch.bool)
        steps = []
        for _ in range(LENGTH):
            action = Categorical(logits=self.policy(state.to(device))[:, :2].cpu()).sample()
            steps.append((state, action, alive))
            state = move(state, action)
            alive = alive & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
        states, actions, rewards = map(torch.stack, zip(*steps, strict=True))
        returns = rewards.float()
        for step in reversed(range(LENGTH - 1)):
            returns[step] += DISCOUNT * returns[step + 1]
        return {"states": states, "actions": actions, "rewards": rewards, "returns": returns}


class Reinforce:
    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def __call__(self, batch: dict[str, Tensor]) -> StepOutput:
        logits, baseline = self.policy(batch["states"]).split([2, 1], dim=-1)
        advantage = batch["returns"] / 20 - baseline.squeeze(-1)
        likelihood = Categorical(logits=logits).log_prob(batch["actions"])
        alive = batch["rewards"]  # each step survived is worth 1; what comes after a game has no loss
        losses = (advantage.square() - advantage.detach() * likelihood) * alive
        reward = alive.sum(1).float()
        return StepOutput(losses.sum(), reward, reward, alive.sum(), metrics={"reward": reward.mean()})

    evaluate = __call__


def main(steps: int = 60) -> dict[str, float]:
    torch.manual_seed(0)  # the weights that the policy starts from
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))  # scores of two actions, and the baseline
    unit: Any = Reinforce(policy)
    trainer = Trainer(
        policy,
        Episodes(policy, rounds=steps),
        Episodes(policy, rounds=2),
        unit=unit,
        compute_metrics=lambda results: {"reward": results.predictions.mean()},
        optimization_metric="reward",
        optimization_direction="max",
        eval_on_start=True,
        eval_steps=10,
        epochs=1,
        batch_size=GAMES,
        learning_rate=2e-2,
        lr_scheduler="constant",
        progress_bar=False,
    )
    rewards = [round(row["eval_reward"], 1) for row in trainer.train()["valid"]]
    print(f"steps in balance, of at most {LENGTH}, in evaluations:", *rewards)
    return {"first": rewards[0], "best": max(rewards)}


if __name__ == "__main__":
    main()
