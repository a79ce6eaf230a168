"""Gradient accumulation over microbatches in one graph, by Megatron's contract, with validation in between.

Run it as it stands: `python examples/full_iteration.py`. On a GPU all microbatches of an iteration, forward and
backward, are one CUDA graph; without one they are recorded and replayed on the CPU, which shows the same numbers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import stepgraph

VOCABULARY, SEQ_LENGTH, MICRO_BATCH_SIZE, NUM_MICROBATCHES = 32, 16, 4, 4


def make_microbatches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count upwards from a random token; the label is the next token."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, 1), generator=generator)
        counting = (first + torch.arange(SEQ_LENGTH + 1)) % VOCABULARY
        yield {"tokens": counting[:, :-1], "labels": counting[:, 1:]}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """One microbatch: the model's output, and how to make a loss of it."""
    batch = next(data_iterator)
    where = next(model.parameters()).device
    tokens, labels = batch["tokens"].to(where), batch["labels"].to(where)

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())
        return loss, {"lm loss": loss.detach()}

    return model(tokens), loss_func


def forward_backward(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[dict[str, Tensor]],
    model: nn.Module,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool = False,
) -> list[dict[str, Tensor]]:
    """All microbatches of an iteration, as a training framework runs them."""
    stored = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, reduced = loss_func(output)
        stored.append(reduced)
        if not forward_only:
            (loss / num_microbatches).backward()
    return stored


def main() -> None:
    """Train, validate now and then, and print the losses and what was captured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Dropout(0.1), nn.Linear(32, VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training, validation = make_microbatches(seed=1), make_microbatches(seed=2)

    # The line that is new. The wrapper is called just as the function is.
    with stepgraph.FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=1) as forward_backward_func:

        def iterate(data_iterator: Iterator[dict[str, Tensor]], *, forward_only: bool) -> float:
            losses = forward_backward_func(
                forward_step_func=forward_step,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=NUM_MICROBATCHES,
                seq_length=SEQ_LENGTH,
                micro_batch_size=MICRO_BATCH_SIZE,
                forward_only=forward_only,
            )
            return torch.stack([loss["lm loss"] for loss in losses]).mean().item()

        for step in range(40):
            optimizer.zero_grad()
            loss = iterate(training, forward_only=False)
            optimizer.step()
            if step % 10 == 9:
                model.eval()
                with torch.no_grad():
                    validated = iterate(validation, forward_only=True)
                model.train()
                print(f"step {step:2d}  loss {loss:.4f}  validation {validated:.4f}")
        print(forward_backward_func.report())


if __name__ == "__main__":
    main()
