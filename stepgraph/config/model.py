"""`ModelSection`: the shape of a model, how it is computed, how it is spread over ranks, and what of it is captured.

The fields have Megatron Bridge's names and stand in groups, one class each. The section inherits from all of them, so
that `cfg.model.num_layers` and `cfg.model.cuda_graph_impl` are found in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from stepgraph.config.scope import CudaGraphScope
from stepgraph.config.section import Section


@dataclass(kw_only=True)
class GraphFields(Section):
    """What is captured, and how."""

    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine"],
        '"none" captures nothing, "local" while training runs, "transformer_engine" ahead of time.',
    ] = "none"
    cuda_graph_scope: Annotated[
        Sequence[CudaGraphScope], "What is captured, as a list, enum members or one string; empty for whole layers."
    ] = field(default_factory=list)
    cuda_graph_warmup_steps: Annotated[int, "Eager training steps before the capture."] = 3
    cuda_graph_use_single_mempool: Annotated[
        bool, "Share memory between calls by their order, and check each replay against it."
    ] = False
    cuda_graph_max_runners: Annotated[int, "Calls of one layer that may wait for their backward at a time."] = 16
    use_te_rng_tracker: Annotated[
        bool | None, "Random states that graphs can replay. None: on with graphs. Together with rng.te_rng_tracker."
    ] = None


@dataclass(kw_only=True)
class ShapeFields(Section):
    """The size of the model."""

    kind: Annotated[
        Literal["gpt", "moe", "mamba", "hybrid", "vision_language"],
        "The architecture: dense, with experts, Mamba-2, Mamba-2 mixed with attention, or with a vision encoder.",
    ] = "gpt"
    num_layers: Annotated[int, "Number of layers."] = 12
    hidden_size: Annotated[int, "Width of the residual stream."] = 768
    ffn_hidden_size: Annotated[int | None, "Width inside a dense MLP; None is 4 * hidden_size."] = None
    vocab_size: Annotated[int, "Number of tokens in the vocabulary."] = 50257
    make_vocab_size_divisible_by: Annotated[int, "The embedding is padded to a multiple of this."] = 1
    seq_length: Annotated[int, "Tokens in a sequence, the same at every step."] = 1024
    variable_seq_lengths: Annotated[bool, "Let sequences have another length at each step."] = False
    share_embeddings_and_output_weights: Annotated[bool, "Use one matrix for the embedding and the output."] = False
    init_method_std: Annotated[float, "Standard deviation of the initial weights."] = 0.02


@dataclass(kw_only=True)
class LayerFields(Section):
    """What all layers have: norms, activation, positions, biases, dropout."""

    normalization: Annotated[Literal["LayerNorm", "RMSNorm"], "The norm before attention and MLP."] = "RMSNorm"
    layernorm_epsilon: Annotated[float, "Added to the variance in norms."] = 1e-5
    activation_func: Annotated[
        Literal["gelu", "silu", "squared_relu", "clamped_swiglu"], "The activation of the MLP."
    ] = "silu"
    gated_linear_unit: Annotated[bool, "Whether the MLP multiplies its activation by a second projection."] = True
    add_bias_linear: Annotated[bool, "Biases in all linear layers."] = False
    hidden_dropout: Annotated[float, "Dropout on the output of attention and MLP."] = 0.0
    position_embedding_type: Annotated[
        Literal["rope", "yarn", "learned_absolute", "none"], "How positions enter the model."
    ] = "rope"
    rotary_base: Annotated[float, "Base of the rotary frequencies."] = 10_000.0
    rotary_percent: Annotated[float, "Share of each head that is rotated."] = 1.0
    rotary_scaling_factor: Annotated[float | None, "YaRN: the new context as a multiple of the original."] = None
    original_max_position_embeddings: Annotated[int | None, "YaRN: the context before it was extended."] = None


@dataclass(kw_only=True)
class AttentionFields(Section):
    """Attention."""

    num_attention_heads: Annotated[int, "Number of query heads."] = 12
    num_query_groups: Annotated[int | None, "Number of key and value heads; None is one for each query head."] = None
    kv_channels: Annotated[int | None, "Width of a head; None is hidden_size / num_attention_heads."] = None
    attention_dropout: Annotated[float, "Dropout on the attention probabilities."] = 0.0
    add_qkv_bias: Annotated[bool, "Biases in the projection to queries, keys and values only."] = False
    qk_layernorm: Annotated[bool, "Norms on queries and keys."] = False
    softmax_type: Annotated[
        Literal["vanilla", "off-by-one", "learnable"], 'The softmax of attention; "learnable" has a sink a head.'
    ] = "vanilla"
    window_size: Annotated[int | None, "Tokens that attention looks back; None is all of them."] = None
    window_attn_skip_freq: Annotated[int | None, "Every n-th layer attends to all tokens; None: no layer does."] = None


@dataclass(kw_only=True)
class LatentAttentionFields(Section):
    """Multi-head latent attention."""

    multi_latent_attention: Annotated[bool, "Keys and values are kept as one narrow latent vector."] = False
    q_lora_rank: Annotated[int | None, "Width of the latent query; None for none."] = None
    kv_lora_rank: Annotated[int, "Width of the latent keys and values."] = 512
    qk_head_dim: Annotated[int, "Width of a head's part without positions."] = 128
    qk_pos_emb_head_dim: Annotated[int, "Width of a head's part with positions."] = 64
    v_head_dim: Annotated[int, "Width of a head's values."] = 128


@dataclass(kw_only=True)
class RouterFields(Section):
    """The router of a mixture of experts."""

    moe_router_topk: Annotated[int, "Experts that each token chooses."] = 2
    moe_router_score_function: Annotated[Literal["softmax", "sigmoid"], "How logits become scores."] = "softmax"
    moe_router_pre_softmax: Annotated[bool, "Whether scores are taken over all experts, before the choice."] = False
    moe_router_topk_scaling_factor: Annotated[float | None, "Factor on the weights of the chosen experts."] = None
    moe_router_enable_expert_bias: Annotated[bool, "A bias that steers tokens to idle experts."] = False
    moe_router_bias_update_rate: Annotated[float, "Step of that bias."] = 1e-3
    moe_router_num_groups: Annotated[int | None, "Groups of experts from which tokens choose; None for one."] = None
    moe_router_group_topk: Annotated[int | None, "Groups that each token chooses."] = None
    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "none"], "How the load of the experts is balanced."
    ] = "aux_loss"
    moe_router_bias: Annotated[bool, "Whether the router's logits have a learned bias."] = False
    moe_aux_loss_coeff: Annotated[float, "Factor on the balancing loss."] = 0.0


@dataclass(kw_only=True)
class ExpertFields(Section):
    """The experts, and how tokens reach them."""

    num_moe_experts: Annotated[int | None, "Experts in each layer; None for a dense model."] = None
    moe_ffn_hidden_size: Annotated[int | None, "Width inside one expert; None is ffn_hidden_size."] = None
    moe_layer_freq: Annotated[int | Sequence[int], "Every n-th layer has experts; or a list, 1 where it has."] = 1
    moe_shared_expert_intermediate_size: Annotated[
        int | None, "Width inside the expert that every token passes; None for none."
    ] = None
    moe_shared_expert_gate: Annotated[bool, "Whether tokens scale the output of the shared expert."] = False
    moe_token_dispatcher_type: Annotated[
        Literal["sync_free", "allgather", "alltoall", "flex"],
        'How tokens reach experts; all but "sync_free" read token counts on the host.',
    ] = "sync_free"
    moe_grouped_gemm: Annotated[bool, "Compute all experts in one grouped product."] = True
    moe_expert_capacity_factor: Annotated[
        float | None, "Tokens an expert takes, as a multiple of its even share; None drops no token."
    ] = None
    moe_pad_expert_input_to_capacity: Annotated[bool, "Pad each expert's tokens to its capacity."] = False


@dataclass(kw_only=True)
class StateSpaceFields(Section):
    """Mamba-2 layers, and stacks that mix them with others."""

    mamba_state_dim: Annotated[int, "Rows of a head's state."] = 128
    mamba_head_dim: Annotated[int, "Width of one head."] = 64
    mamba_num_groups: Annotated[int, "Groups of heads that share their input and output maps."] = 1
    mamba_num_heads: Annotated[int | None, "Number of heads; None fills twice the hidden size."] = None
    mamba_chunk_size: Annotated[int, "Positions that are computed at once."] = 128
    hybrid_override_pattern: Annotated[
        str | None, 'The kind of each layer of a hybrid stack: "M" Mamba, "*" attention, "-" MLP, "E" experts.'
    ] = None


@dataclass(kw_only=True)
class VisionFields(Section):
    """The vision encoder of a vision-language model."""

    vision_num_layers: Annotated[int, "Layers of the vision encoder."] = 4
    vision_hidden_size: Annotated[int, "Width of the vision encoder."] = 256
    vision_num_attention_heads: Annotated[int, "Heads of the vision encoder."] = 4
    vision_ffn_hidden_size: Annotated[int | None, "Width inside its MLP; None is 4 * vision_hidden_size."] = None
    vision_image_size: Annotated[int, "Pixels on each side of an image."] = 224
    vision_patch_size: Annotated[int, "Pixels on each side of a patch."] = 16
    vision_spatial_merge_size: Annotated[int, "Patches on each side that become one token."] = 1
    max_vision_cuda_graph_seq_length: Annotated[
        int | None, "Tokens of all images of a microbatch together; None has room for one image of the largest size."
    ] = None
    image_token_id: Annotated[int | None, "The token that stands for one of an image; None is the last token."] = None


@dataclass(kw_only=True)
class ComputeFields(Section):
    """How gradients are computed and what is stored for them."""

    recompute_granularity: Annotated[
        Literal["full", "selective"] | None, "Recompute whole layers, or parts of them, in backward; None: nothing."
    ] = None
    recompute_method: Annotated[Literal["uniform", "block"] | None, "How whole layers are chosen."] = None
    recompute_num_layers: Annotated[int | None, "Layers that are recomputed together, or at all."] = None
    recompute_modules: Annotated[Sequence[str], "The parts to recompute: core_attn, layernorm, mlp, moe, moe_act."] = (
        field(default_factory=list)
    )
    delay_wgrad_compute: Annotated[
        bool, "Compute the gradients of weights later. Together with comm_overlap.delay_wgrad_compute."
    ] = False
    gradient_accumulation_fusion: Annotated[bool, "Add the gradients of weights into main_grad in one step."] = False
    cpu_offloading: Annotated[bool, "Move activations to host memory between forward and backward."] = False
    cpu_offloading_num_layers: Annotated[int, "Layers whose activations are moved."] = 0


@dataclass(kw_only=True)
class ParallelFields(Section):
    """How the model is spread over ranks."""

    tensor_model_parallel_size: Annotated[int, "Ranks that share each matrix."] = 1
    pipeline_model_parallel_size: Annotated[int, "Ranks that share the layers, one after the other."] = 1
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, "Chunks of layers on each rank of the pipeline; None for one."
    ] = None
    microbatch_group_size_per_vp_stage: Annotated[
        int | None, "Microbatches that a chunk runs in a row; None is the number of pipeline ranks."
    ] = None
    context_parallel_size: Annotated[int, "Ranks that share each sequence."] = 1
    expert_model_parallel_size: Annotated[int, "Ranks that share the experts."] = 1
    expert_tensor_parallel_size: Annotated[int | None, "Ranks that share each expert's matrices."] = None
    overlap_moe_expert_parallel_comm: Annotated[
        bool, "Overlap the dispatch of tokens to experts. Together with comm_overlap.overlap_moe_expert_parallel_comm."
    ] = False
    sequence_parallel: Annotated[bool, "Share activations between the ranks of tensor parallelism."] = False


@dataclass(kw_only=True)
class ModelSection(
    ParallelFields,
    ComputeFields,
    VisionFields,
    StateSpaceFields,
    ExpertFields,
    RouterFields,
    LatentAttentionFields,
    AttentionFields,
    LayerFields,
    ShapeFields,
    GraphFields,
):
    """The model: what is captured, its shape, its parts, and how it is computed and spread over ranks.

    Its fields are listed from the last group to the first, as dataclasses have them.
    """

    section_name: ClassVar[str] = "model"

    @property
    def captures_iteration(self) -> bool:
        """True if the whole iteration is one graph."""
        return CudaGraphScope.full_iteration in self.cuda_graph_scope

    @property
    def use_cudagraphable_rng(self) -> bool:
        """True if random states must be such that graphs can replay them."""
        return self.cuda_graph_impl != "none"
