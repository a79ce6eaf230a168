"""The sections of a configuration besides the model: random numbers, data, optimizer, training, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from stepgraph.config.section import Section
from stepgraph.core.errors import InvalidArgument, nearest

NanCheck = bool | Literal["device"] | None


@dataclass(kw_only=True)
class RngSection(Section):
    """Random numbers."""

    section_name: ClassVar[str] = "rng"

    seed: Annotated[int, "The seed of parameters, dropout and data."] = 1234
    te_rng_tracker: Annotated[
        bool | None, "Random states that graphs can replay. None: on with graphs. Together with use_te_rng_tracker."
    ] = None
    inference_rng_tracker: Annotated[bool, "A tracker that forks no state, for inference."] = False
    data_parallel_random_init: Annotated[bool, "Give each data-parallel rank its own initial weights."] = False


@dataclass(kw_only=True)
class DdpSection(Section):
    """Data parallelism."""

    section_name: ClassVar[str] = "ddp"

    check_for_nan_in_grad: Annotated[
        NanCheck, 'Stop on a NaN in a gradient; "device" keeps a flag on the device. None: "device" in full iteration.'
    ] = None
    grad_reduce_in_fp32: Annotated[bool, "Sum gradients over ranks in float32."] = False
    overlap_grad_reduce: Annotated[bool, "Sum gradients while backward still runs."] = True
    overlap_param_gather: Annotated[bool, "Shard parameters, and gather them before each layer's forward."] = False
    use_distributed_optimizer: Annotated[bool, "Shard the optimizer's state over ranks."] = False
    use_torch_fsdp2: Annotated[bool, "Shard parameters with torch's fully_shard."] = False
    bucket_size: Annotated[int | None, "Parameters in one bucket of gradients; None is torch's choice."] = None


@dataclass(kw_only=True)
class RerunStateMachineSection(Section):
    """Checks of results."""

    section_name: ClassVar[str] = "rerun_state_machine"

    check_for_nan_in_loss: Annotated[
        NanCheck,
        'Stop on a NaN in the loss; "device" keeps a flag on the device. None: on, "device" in full iteration.',
    ] = None
    check_for_spiky_loss: Annotated[bool, "Stop on a loss far above the ones before."] = False
    spiky_loss_factor: Annotated[float, "How far above counts as a spike."] = 10.0


@dataclass(kw_only=True)
class OptimizerSection(Section):
    """The optimizer."""

    section_name: ClassVar[str] = "optimizer"

    optimizer: Annotated[Literal["adam", "sgd"], "AdamW, or SGD with momentum."] = "adam"
    lr: Annotated[float, "The highest learning rate."] = 3e-4
    min_lr: Annotated[float, "The lowest learning rate, at the end."] = 0.0
    weight_decay: Annotated[float, "Weight decay."] = 0.01
    adam_beta1: Annotated[float, "Decay of AdamW's first moment."] = 0.9
    adam_beta2: Annotated[float, "Decay of AdamW's second moment."] = 0.999
    adam_eps: Annotated[float, "Added to the denominator of AdamW."] = 1e-8
    sgd_momentum: Annotated[float, "Momentum of SGD."] = 0.9
    clip_grad: Annotated[float, "The largest norm of the gradient; 0 does not clip."] = 1.0


@dataclass(kw_only=True)
class SchedulerSection(Section):
    """The learning rate over time."""

    section_name: ClassVar[str] = "scheduler"

    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root"], "How the learning rate falls after warm-up."
    ] = "cosine"
    lr_warmup_iters: Annotated[int, "Iterations in which the learning rate rises."] = 0
    lr_warmup_fraction: Annotated[float | None, "The same as a share of lr_decay_iters; replaces it."] = None
    lr_warmup_init: Annotated[float, "The learning rate at the first iteration of warm-up."] = 0.0
    lr_decay_iters: Annotated[int | None, "Iterations until min_lr is reached; None is train.train_iters."] = None
    start_weight_decay: Annotated[float | None, "Weight decay at the start; None is optimizer.weight_decay."] = None
    end_weight_decay: Annotated[float | None, "Weight decay at the end; None is optimizer.weight_decay."] = None
    weight_decay_incr_style: Annotated[
        Literal["constant", "linear", "cosine"], "How weight decay moves between the two."
    ] = "constant"


@dataclass(kw_only=True)
class TrainSection(Section):
    """Training."""

    section_name: ClassVar[str] = "train"

    train_iters: Annotated[int, "Number of training iterations."] = 20
    global_batch_size: Annotated[int, "Sequences in an iteration, over all ranks."] = 1
    micro_batch_size: Annotated[int, "Sequences in a microbatch, the same at every step."] = 1
    rampup_batch_size: Annotated[
        Sequence[int] | None, "Start, increment and samples of a batch size that grows; None for a fixed one."
    ] = None
    eval_interval: Annotated[int | None, "Iterations between evaluations; None for none."] = None
    eval_iters: Annotated[int, "Iterations of one evaluation."] = 0
    skip_train: Annotated[bool, "Evaluate only."] = False
    exit_interval: Annotated[int | None, "Stop after an iteration that is a multiple of this."] = None
    exit_duration_in_mins: Annotated[int | None, "Stop after so many minutes."] = None
    exit_signal_handler: Annotated[bool, "Save and leave in order on SIGINT and SIGTERM."] = True
    manual_gc: Annotated[bool, "Collect garbage between iterations only."] = False
    manual_gc_interval: Annotated[int, "Iterations between collections; 0 for none."] = 0
    iterations_to_skip: Annotated[Sequence[int], "Iterations whose data is read and not trained on."] = field(
        default_factory=list
    )


@dataclass(kw_only=True)
class DatasetSection(Section):
    """The data."""

    section_name: ClassVar[str] = "dataset"

    kind: Annotated[
        Literal["text", "synthetic", "tokens", "sft"],
        "A small text made on the spot, random tokens, memory-mapped tokens, or pairs of prompt and answer.",
    ] = "text"
    data_path: Annotated[str | Sequence[str] | None, "The file of tokens, or the JSONL file of prompts."] = None
    seq_length: Annotated[int | None, "Tokens in a sequence; None is model.seq_length."] = None
    split: Annotated[str, "Shares of training, validation and test data."] = "949,50,1"
    random_seed: Annotated[int | None, "The seed of the data's order; None is rng.seed."] = None
    num_workers: Annotated[int, "Processes that read data; 0 reads in the training process."] = 0
    packed_sequence: Annotated[bool, "Put several examples into one sequence."] = False
    packed_sequence_size: Annotated[int | None, "Tokens in a packed sequence; None is seq_length."] = None
    pad_cu_seqlens: Annotated[
        bool, "Give the metadata of packed sequences a fixed length, so that graphs can take it as tensors."
    ] = False
    max_packed_examples: Annotated[int | None, "Examples that the padded metadata has room for."] = None
    pad_to_max_length: Annotated[bool, "Pad every sequence to seq_length."] = True


@dataclass(kw_only=True)
class CheckpointSection(Section):
    """Checkpoints."""

    section_name: ClassVar[str] = "checkpoint"

    save: Annotated[str | None, "The directory to save to; None saves nothing."] = None
    load: Annotated[str | None, "The directory to resume from; None starts from the beginning."] = None
    save_interval: Annotated[int | None, "Iterations between checkpoints; None saves at the end only."] = None
    most_recent_k: Annotated[int, "Checkpoints to keep; -1 keeps all."] = -1
    pretrained_checkpoint: Annotated[str | None, "Weights to start fine-tuning from."] = None
    load_optim: Annotated[bool, "Load the optimizer's state."] = True
    load_rng: Annotated[bool, "Load the random states."] = True
    save_optim: Annotated[bool, "Save the optimizer's state."] = True
    save_rng: Annotated[bool, "Save the random states."] = True


@dataclass(kw_only=True)
class LoggerSection(Section):
    """What a run says."""

    section_name: ClassVar[str] = "logger"

    log_interval: Annotated[int, "Iterations between lines of the log."] = 1
    log_dir: Annotated[str | None, "The directory of the JSONL log; None is the working directory."] = None
    tensorboard_dir: Annotated[str | None, "The directory of TensorBoard's files; None writes none."] = None
    log_throughput: Annotated[bool, "Log tokens and TFLOP a second."] = True
    log_memory: Annotated[bool, "Log memory before and after capture."] = True
    log_progress: Annotated[bool, "Show a progress bar."] = True


@dataclass(kw_only=True)
class DistSection(Section):
    """Processes."""

    section_name: ClassVar[str] = "dist"

    distributed_backend: Annotated[
        Literal["nccl", "gloo"] | None, "How ranks talk; None is nccl with a GPU and gloo without."
    ] = None
    distributed_timeout_minutes: Annotated[int, "Minutes after which a collective has failed."] = 10
    local_rank: Annotated[int | None, "The GPU of this process; None reads LOCAL_RANK."] = None


@dataclass(kw_only=True)
class PeftSection(Section):
    """Fine-tuning of a few parameters."""

    section_name: ClassVar[str] = "peft"

    scheme: Annotated[Literal["lora"] | None, "None trains all parameters."] = None
    target_modules: Annotated[
        Sequence[str], "The linear layers that get adapters, by name or glob; empty for those of attention and MLP."
    ] = field(default_factory=list)
    dim: Annotated[int, "Rank of the adapters."] = 32
    alpha: Annotated[int, "Scale of the adapters, divided by their rank."] = 32
    dropout: Annotated[float, "Dropout in the adapters."] = 0.0
    dropout_position: Annotated[Literal["pre", "post"], "Dropout before or after the adapter."] = "pre"


@dataclass(kw_only=True)
class CommOverlapSection(Section):
    """Communication that runs beside computation."""

    section_name: ClassVar[str] = "comm_overlap"

    tp_comm_overlap: Annotated[bool, "Overlap the communication of tensor parallelism."] = False
    overlap_p2p_comm: Annotated[bool | None, "Overlap the pipeline's sends and receives; None decides by itself."] = (
        None
    )
    batch_p2p_comm: Annotated[bool | None, "Send and receive together; None decides by itself."] = None
    overlap_moe_expert_parallel_comm: Annotated[bool, "Overlap the dispatch of tokens to experts."] = False
    delay_wgrad_compute: Annotated[bool, "Compute the gradients of weights later, while ranks communicate."] = False


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16_mixed": {"bf16": True, "params_dtype": "bf16"},
    "fp16_mixed": {"fp16": True, "params_dtype": "fp16"},
    "bf16_autocast": {"autocast_enabled": True, "autocast_dtype": "bf16"},
    "fp16_autocast": {"autocast_enabled": True, "autocast_dtype": "fp16"},
    "bf16_with_fp8_delayed_scaling_mixed": {
        "bf16": True,
        "params_dtype": "bf16",
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
    },
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "params_dtype": "bf16",
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    },
    "bf16_with_mxfp8_mixed": {"bf16": True, "params_dtype": "bf16", "fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""The names that `cfg.mixed_precision = name` takes, and the fields that each sets."""
_Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(kw_only=True)
class MixedPrecisionSection(Section):
    """Number formats. `cfg.mixed_precision = "bf16_mixed"` sets the fields of a known mix."""

    section_name: ClassVar[str] = "mixed_precision"

    bf16: Annotated[bool, "Compute in bfloat16."] = False
    fp16: Annotated[bool, "Compute in float16, with a scaled loss."] = False
    params_dtype: Annotated[_Dtype, "The type of the parameters."] = "fp32"
    autocast_enabled: Annotated[bool, "Run the model under torch.autocast."] = False
    autocast_dtype: Annotated[_Dtype, "The type that autocast computes in."] = "bf16"
    grad_reduce_in_fp32: Annotated[bool, "Sum gradients over ranks in float32."] = True
    fp8: Annotated[Literal["hybrid", "e4m3"] | None, "The format of FP8; None computes without."] = None
    fp8_recipe: Annotated[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], "How FP8 is scaled."] = "tensorwise"
    loss_scale: Annotated[float | None, "A fixed scale of the loss; None adapts it, with fp16."] = None

    @classmethod
    def named(cls, name: str) -> MixedPrecisionSection:
        """The section of a known mix of formats."""
        if name not in PRECISIONS:
            near = nearest(name, PRECISIONS)
            raise InvalidArgument(
                f"mixed_precision = {name!r} is not a known mix",
                rule="config-value",
                why=f"the mixes are {', '.join(PRECISIONS)}.",
                fix=f"did you mean {near!r}?" if near else "use one of them, or set the fields of the section.",
            )
        return cls(**PRECISIONS[name])
