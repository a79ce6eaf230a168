"""Actor-critic: a rollout without gradients, then an update."""

import random

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state):
        hidden = self.body(state)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
Categorical.set_default_validate_args(False)

for episode in range(7):
    states, actions, returns = [], [], []
    state = torch.randn(4)
    for _ in range(20):
        with torch.no_grad():
            logits, _ = policy(state)
        action = Categorical(logits=logits).sample().item()
        states.append(state)
        actions.append(action)
        returns.append(random.random())
        state = torch.randn(4)

    states, actions, returns = torch.stack(states), torch.tensor(actions), torch.tensor(returns)
    logits, values = policy(states)
    advantage = returns - values
    loss = -(Categorical(logits=logits).log_prob(actions) * advantage.detach()).mean() + advantage.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(episode, loss.item())
