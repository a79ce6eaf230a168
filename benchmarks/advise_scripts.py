"""The six trainings of `advise.py`, as plain scripts: what a user has before graphs, with no word of them.

Each has a function that is one step and a loop that calls it. Nothing is done to suit a capture: optimizers have their
default form where people leave it, a schedule moves a learning rate, targets follow their networks in place. The one
exception is the mask of Hugging Face's model, made once: without it the library reads on the host in each step. The two
models of stepgraph (`GPT`, `MoEGPT`) are plain modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOOP = "# the loop"
"""The line of a script above which lines are pasted."""
_ACCUMULATION = """
import torch
{imports}

torch.manual_seed(0)
with torch.device("{device}"):
    model = {model}
model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokens = torch.randint({vocabulary}, (4, {microbatch}, {sequence} + 1), device="{device}")


def train_step(tokens, targets):
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=tokens.device)
    for i in range(len(tokens)):
        loss = {loss} / len(tokens)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


# the loop
for _ in range(1000):
    train_step(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
"""
_CONVNET = """
import timm
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = timm.create_model("convnext_atto", num_classes=100).to("{device}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
images = torch.randn({batch}, 3, {size}, {size}, device="{device}")
labels = torch.randint(100, ({batch},), device="{device}")


def train_step(images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


# the loop
for _ in range(1000):
    train_step(images, labels)
"""
_HUGGING_FACE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192,
    hidden_size={width},
    intermediate_size=2 * {width},
    num_hidden_layers={layers},
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings={sequence},
    use_cache=False,
)
model = LlamaForCausalLM(config).to("{device}").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
batch = torch.randint(8192, ({batch}, {sequence}), device="{device}")
causal = torch.ones({batch}, 1, {sequence}, {sequence}, dtype=torch.bool, device="{device}").tril()


def train_step(batch):
    optimizer.zero_grad()
    loss = model(input_ids=batch, attention_mask=causal, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


# the loop
for _ in range(1000):
    train_step(batch)
    scheduler.step()
"""
_RL = """
import copy

import torch
import torch.nn.functional as F
from torch import nn

OBSERVATION, ACTION, WIDTH, BATCH = 17, 6, {width}, 256
torch.manual_seed(0)


def net(inputs, outputs):
    layers = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]
    return nn.Sequential(*layers).to("{device}")


actor = net(OBSERVATION, 2 * ACTION)
critics = nn.ModuleList([net(OBSERVATION + ACTION, 1), net(OBSERVATION + ACTION, 1)])
targets = copy.deepcopy(critics).requires_grad_(False)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)


def act(observation):
    mean, log_std = actor(observation).chunk(2, dim=-1)
    log_std = log_std.clamp(-5, 2)
    noise = torch.randn_like(mean)
    action = torch.tanh(mean + noise * log_std.exp())
    log_prob = (-0.5 * noise**2 - log_std - torch.log(1 - action**2 + 1e-6)).sum(-1, keepdim=True)
    return action, log_prob


def update(observation, action, reward, following):
    with torch.no_grad():
        next_action, log_prob = act(following)
        inputs = torch.cat([following, next_action], dim=-1)
        value = torch.minimum(targets[0](inputs), targets[1](inputs)) - 0.2 * log_prob
        goal = reward + 0.99 * value
    inputs = torch.cat([observation, action], dim=-1)
    critic_loss = F.mse_loss(critics[0](inputs), goal) + F.mse_loss(critics[1](inputs), goal)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    chosen, log_prob = act(observation)
    inputs = torch.cat([observation, chosen], dim=-1)
    actor_loss = (0.2 * log_prob - torch.minimum(critics[0](inputs), critics[1](inputs))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()

    with torch.no_grad():
        for target, source in zip(targets.parameters(), critics.parameters()):
            target.lerp_(source, 0.005)
    return critic_loss.detach(), actor_loss.detach()


batch = [torch.randn(BATCH, size, device="{device}") for size in (OBSERVATION, ACTION, 1, OBSERVATION)]

# the loop
for _ in range(1000):
    update(*batch)
"""
_GPT = {"imports": "from stepgraph.lab.models import GPT, GPTConfig", "loss": "model(tokens[i], targets[i])"}
_MOE = {
    "imports": "from dataclasses import replace\n\nfrom stepgraph.lab.models import MoEConfig, MoEGPT",
    "loss": "((found := model(tokens[i], targets[i])).out + 0.01 * found.aux_loss)",
}
_GPT2_SMALL = _GPT | {"model": "GPT(GPTConfig.gpt2_small())", "vocabulary": 50257, "sequence": 1024}
_TINY_GPT = _GPT | {"model": "GPT(GPTConfig.tiny())", "vocabulary": 256, "sequence": 32, "microbatch": 1}
_QWEN3 = _MOE | {"model": "MoEGPT(MoEConfig.qwen3_30b_a3b(num_layers=4))", "vocabulary": 151936}
_TINY_MOE = _MOE | {"model": "MoEGPT(replace(MoEConfig.tiny(), num_layers=1))", "vocabulary": 256, "microbatch": 1}


@dataclass(frozen=True)
class Workload:
    """A training: its script, the sizes on a GPU and on a CPU, and what must be installed for it."""

    script: str
    step: str
    """The function that is one step."""
    gpu: Mapping[str, object]
    cpu: Mapping[str, object]
    needs: str | None = None

    def text(self, device: str) -> str:
        """Return the script for a device."""
        sizes = self.gpu if device == "cuda" else self.cpu
        return self.script.format(device=device, **sizes).lstrip()


WORKLOADS: Mapping[str, Workload] = {
    "gpt2_small": Workload(_ACCUMULATION, "train_step", _GPT2_SMALL | {"microbatch": 1}, _TINY_GPT),
    "gpt2_small-mb8": Workload(_ACCUMULATION, "train_step", _GPT2_SMALL | {"microbatch": 8}, _TINY_GPT),
    "qwen3_30b_a3b": Workload(
        _ACCUMULATION, "train_step", _QWEN3 | {"microbatch": 1, "sequence": 1024}, _TINY_MOE | {"sequence": 32}
    ),
    "convnet": Workload(_CONVNET, "train_step", {"batch": 16, "size": 96}, {"batch": 2, "size": 32}, "timm"),
    "hugging_face": Workload(
        _HUGGING_FACE,
        "train_step",
        {"layers": 6, "width": 384, "sequence": 256, "batch": 4},
        {"layers": 1, "width": 48, "sequence": 16, "batch": 2},
        "transformers",
    ),
    "rl": Workload(_RL, "update", {"width": 256}, {"width": 16}),
}
"""Each training by its name."""


def with_lines(text: str, lines: str) -> str:
    """Return a script with lines above its loop."""
    head, loop, tail = text.partition(f"{LOOP}\n")
    assert loop, "the script has no such line"
    return f"{head}{lines}\n{loop}{tail}"
