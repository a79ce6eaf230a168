"""Train, stop, resume and fine-tune with the training loop, graphed, and compare with eager.

Run it as it stands: `python examples/train.py`. A GPT of two layers learns a small text, as one graph an iteration. The
run stops half-way, resumes from its checkpoint, and ends with the losses of an eager run that never stopped. Then LoRA
fine-tunes the saved model on small sums.
"""

import tempfile
from pathlib import Path

import torch

import stepgraph
from stepgraph.lab.train import finetune, pretrain

ITERATIONS = 12


def config(folder: Path, implementation: str, *scope: str) -> stepgraph.ConfigContainer:
    """Describe a small run, with the names of Megatron Bridge."""
    cfg = stepgraph.ConfigContainer()
    cfg.model.cuda_graph_impl, cfg.model.cuda_graph_scope = implementation, list(scope)
    cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_attention_heads = 2, 64, 4
    cfg.model.ffn_hidden_size, cfg.model.vocab_size, cfg.model.seq_length = 128, 256, 32
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = ITERATIONS, 4, 2
    cfg.optimizer.lr, cfg.scheduler.lr_decay_iters = 1e-2, ITERATIONS
    cfg.logger.log_dir = str(folder)
    return cfg


def main() -> None:
    """Train four times."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        eager = pretrain(config(folder, "none"), quiet=True)

        first = config(folder, "local", "full_iteration")
        first.train.train_iters, first.checkpoint.save = ITERATIONS // 2, str(folder / "saved")
        pretrain(first, quiet=True)

        second = config(folder, "local", "full_iteration")
        second.checkpoint.load = second.checkpoint.save = str(folder / "saved")
        resumed = pretrain(second, quiet=True)
        late = {step: loss for step, loss in eager.losses.items() if step > ITERATIONS // 2}
        print(f"resumed at {resumed.start}, {resumed.replays} iterations replayed")
        print(f"losses equal to eager, bit for bit: {resumed.losses == late}")
        assert resumed.losses == late

        tuning = config(folder, "transformer_engine", "attn")
        tuning.peft.scheme, tuning.peft.dim = "lora", 4
        tuning.checkpoint.pretrained_checkpoint = str(folder / "saved")
        print(finetune(tuning, quiet=True))


if __name__ == "__main__":
    main()
