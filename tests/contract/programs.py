"""Training programs of every kind that users write, each built anew from the current seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgraph.lab.models import GPT, GPTConfig
from tests.harness import Program

CALLS = 14


def classifier_program(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Any, ...]],
    loss_of: Callable[..., torch.Tensor],
    after_backward: Callable[[], Any] = lambda: None,
) -> Program:
    """The plain loop: zero_grad, forward, backward, step."""

    def step(*batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        after_backward()
        optimizer.step()
        return loss

    return Program(step, batches, [model], [optimizer])


def vectors(device: torch.device, *shape: int, calls: int = CALLS) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(*shape, device=device),) for _ in range(calls)]


def mlp(device: torch.device) -> Program:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return classifier_program(model, optimizer, vectors(device, 8, 16), lambda x: model(x).pow(2).mean())


def conv_batchnorm(device: torch.device) -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    batches = [(torch.randn(4, 3, 8, 8, device=device), torch.randint(4, (4,), device=device)) for _ in range(CALLS)]
    return classifier_program(model, optimizer, batches, lambda x, y: F.cross_entropy(model(x), y))


def lstm(device: torch.device) -> Program:
    model = nn.LSTM(8, 8, num_layers=2, dropout=0.3).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return classifier_program(model, optimizer, vectors(device, 5, 3, 8), lambda x: model(x)[0].pow(2).mean())


def transformer_dropout(device: torch.device) -> Program:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return classifier_program(model, optimizer, vectors(device, 2, 6, 16), lambda x: model(x).pow(2).mean())


class TiedLanguageModel(nn.Module):
    """An embedding whose weight is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(ids))))


def tied_embedding(device: torch.device) -> Program:
    model = TiedLanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [(torch.randint(50, (4, 7), device=device),) for _ in range(CALLS)]

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return classifier_program(model, optimizer, batches, loss_of)


class Attention(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.masked = nn.Linear(16, 48), nn.Linear(16, 16), masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.masked)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def attention(masked: bool) -> Callable[[torch.device], Program]:
    def build(device: torch.device) -> Program:
        model = Attention(masked).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return classifier_program(model, optimizer, vectors(device, 2, 8, 16), lambda x: model(x).pow(2).mean())

    return build


def checkpointed(use_reentrant: bool) -> Callable[[torch.device], Program]:
    def build(device: torch.device) -> Program:
        first, second = (
            nn.Linear(8, 8).to(device),
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()).to(device),
        )
        model = nn.Sequential(first, second)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(second, first(x), use_reentrant=use_reentrant).pow(2).mean()

        return classifier_program(model, optimizer, vectors(device, 4, 8), loss_of)

    return build


def autocast_inside(device: torch.device) -> Program:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return model(model[0](x)).float().pow(2).mean()

    return classifier_program(model, optimizer, vectors(device, 8, 16), loss_of)


def clipped(device: torch.device) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return classifier_program(model, optimizer, vectors(device, 4, 8), lambda x: model(x).pow(2).mean(), clip)


def accumulation_inside(device: torch.device) -> Program:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for micro in batch.unbind(0):
            loss = model(micro).pow(2).mean() / 4
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return Program(step, vectors(device, 4, 2, 8), [model], [optimizer])


def accumulation_across_calls(device: torch.device) -> Program:
    """The step adds to whatever gradient it finds; the loop zeroes it every third call."""
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    def before_call(index: int) -> None:
        if index % 3 == 0 and index:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index % 2 == 0)

    return Program(step, vectors(device, 4, 8), [model], [optimizer], before_call=before_call)


def step_first(make_optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[torch.device], Program]:
    """The optimizer uses the gradients of the call before: carried in, or None where they were dropped."""

    def build(device: torch.device) -> Program:
        model = nn.Linear(8, 4).to(device)
        optimizer = make_optimizer(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        def before_call(index: int) -> None:
            if index % 5 == 4:
                optimizer.zero_grad(set_to_none=True)

        return Program(step, vectors(device, 4, 8), [model], [optimizer], before_call=before_call)

    return build


def zeroing_in_place(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(step, vectors(device, 4, 8), [model], [optimizer])


def zeroing_last(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(step, vectors(device, 4, 8), [model], [optimizer])


def moving_average_inside(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)
        return loss

    return Program(step, vectors(device, 4, 8), [model], [optimizer], tensors=average)


def frozen_and_unused(device: torch.device) -> Program:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "frozen": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}).to(device)
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return classifier_program(
        model, optimizer, vectors(device, 4, 8), lambda x: model["frozen"](model["used"](x)).pow(2).mean()
    )


def changing_batch_size(device: torch.device) -> Program:
    """Epochs with a smaller last batch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(torch.randn(3 if i % 4 == 3 else 6, 8, device=device),) for i in range(32)]
    return classifier_program(model, optimizer, batches, lambda x: model(x).pow(2).mean())


def train_eval_train(device: torch.device) -> Program:
    """One function for both modes: the model's flag alone tells."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = classifier_program(model, optimizer, vectors(device, 4, 8, calls=24), lambda x: model(x).pow(2).mean())
    program.before_call = lambda index: model.train(index // 6 % 2 == 0) and None
    return program


def dict_batch(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [
        ({"x": torch.randn(4, 8, device=device), "y": torch.randn(4, 4, device=device), "scale": 2.0},)
        for _ in range(CALLS)
    ]

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        optimizer.zero_grad()
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"]) * batch["scale"]
        loss.backward()
        optimizer.step()
        return {"loss": loss, "out": [out, None], "kind": "mse"}

    return Program(step, batches, [model], [optimizer])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    weight: float = 1.0


def dataclass_batch(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(Batch(torch.randn(4, 8, device=device), torch.randn(4, 4, device=device)),) for _ in range(CALLS)]
    return classifier_program(model, optimizer, batches, lambda b: F.mse_loss(model(b.x), b.y) * b.weight)


def own_generator(device: torch.device) -> Program:
    model = nn.Linear(8, 4).to(device)
    generator = torch.Generator(device).manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(4, 8, device=device, generator=generator)
        return model(F.dropout(x + noise, 0.2)).pow(2).mean()

    program = classifier_program(model, optimizer, vectors(device, 4, 8), loss_of)
    program.generators = [generator]
    return program


def parameters_without_module(device: torch.device) -> Program:
    weights = [torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            weight.grad = None
        loss = (x @ weights[0]).relu().matmul(weights[1]).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad
        return loss

    return Program(step, vectors(device, 4, 8), tensors=weights)


def two_optimizers(device: torch.device) -> Program:
    """A generator and a critic in one step: two cuts, with work between and after them."""
    generator, critic = nn.Linear(4, 8).to(device), nn.Linear(8, 1).to(device)
    first = torch.optim.Adam(critic.parameters(), lr=1e-2)
    second = torch.optim.RMSprop(generator.parameters(), lr=1e-2)

    def step(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(4, 4, device=device)
        first.zero_grad()
        critic_loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        critic_loss.backward()
        first.step()
        second.zero_grad()
        loss = -critic(generator(noise)).mean()
        loss.backward()
        second.step()
        return critic_loss, loss

    return Program(step, vectors(device, 4, 8), [generator, critic], [first, second])


def small_gpt(device: torch.device) -> Program:
    config = dataclasses.replace(GPTConfig.tiny(), dropout=0.1)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [tuple(torch.randint(config.vocab_size, (2, 16), device=device) for _ in range(2)) for _ in range(CALLS)]
    return classifier_program(model, optimizer, batches, lambda tokens, targets: model(tokens, targets))


PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "mlp": mlp,
    "conv_batchnorm": conv_batchnorm,
    "lstm": lstm,
    "transformer_dropout": transformer_dropout,
    "tied_embedding": tied_embedding,
    "attention_causal": attention(masked=False),
    "attention_masked": attention(masked=True),
    "checkpoint": checkpointed(use_reentrant=False),
    "checkpoint_reentrant": checkpointed(use_reentrant=True),
    "autocast_inside": autocast_inside,
    "clipped": clipped,
    "accumulation_inside": accumulation_inside,
    "accumulation_across_calls": accumulation_across_calls,
    "step_first_inside": step_first(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "step_first_outside": step_first(lambda p: torch.optim.Adam(p, lr=0.1)),
    "zeroing_in_place": zeroing_in_place,
    "zeroing_last": zeroing_last,
    "moving_average_inside": moving_average_inside,
    "frozen_and_unused": frozen_and_unused,
    "changing_batch_size": changing_batch_size,
    "train_eval_train": train_eval_train,
    "dict_batch": dict_batch,
    "dataclass_batch": dataclass_batch,
    "own_generator": own_generator,
    "parameters_without_module": parameters_without_module,
    "two_optimizers": two_optimizers,
    "small_gpt": small_gpt,
}

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), True),
    "sgd momentum foreach": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), True),
    "sgd fused": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True), True),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2), False),
    "adam for-loop": (lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False), False),
    "adam amsgrad fused": (lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True), True),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False), False),
    "adamw foreach": (lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), False),
    "adamw fused": (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), True),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-2), True),
    "rmsprop centered": (lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, foreach=True), True),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1), False),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=1e-2), False),
    "radam": (lambda p: torch.optim.RAdam(p, lr=1e-2), False),
    "adadelta": (lambda p: torch.optim.Adadelta(p), False),
}
"""Each optimizer, and whether it is captured inside the graph."""
