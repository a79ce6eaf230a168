"""A vision encoder in plain torch, for images of any sizes at one static length, and a GPT that reads images with it.

An image is cut into patches. A patch becomes a vector and gets the vector of its place; neighbours, a square of them
with `spatial_merge_size` a side, are merged into one token before the layers, which keeps the sequence short. The
images of a microbatch follow each other in one sequence, so the batch dimension is 1.

The sequence is padded, always to the same length (`VisionConfig.seq_length`), so that the layers see one shape whatever
the images are. Each token carries the number of its image and attends only to tokens with that number; padding has the
number -1. Images that need more tokens than fit are an error, found from their shapes without a read on the host.

The text of the GPT holds an `image_token` for each token of an image, in order. A linear layer brings the encoder's
vectors to the GPT's width, and the n-th image token of the microbatch gets the n-th vector, counted on the device. So
every shape follows from the text's alone. The price: the model cannot notice that a text has more or fewer image tokens
than its images have. `VisionEncoder.num_tokens(image)` says how many to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.lab.models.activations import Activation
from stepgraph.lab.models.gpt import GPT, MLP, GPTConfig, check_length
from stepgraph.lab.models.language_model import Config, ModelConfig, init_weights, make_norm
from stepgraph.lab.models.moe import MoEConfig, MoEGPT, MoEOutput


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """The shape of a vision encoder; start from `tiny()` and change it with `dataclasses.replace`.

    Example:
        `replace(VisionConfig.tiny(), max_vision_cuda_graph_seq_length=32)`
    """

    num_heads: int
    """Number of attention heads."""
    ffn_size: int
    """Width inside the MLP."""
    patch_size: int
    """Height and width of a patch in pixels."""
    num_position_embeddings: int
    """Distinct places of patches, a square number: its root is the most patches a side of an image."""
    spatial_merge_size: int = 2
    """Patches a side that are merged into one token."""
    max_vision_cuda_graph_seq_length: int | None = None
    """Tokens of all images of a microbatch together, at most; None has room for one image of the largest size."""
    num_channels: int = 3
    """Colours of a pixel."""
    activation: Activation = "swiglu"
    """The function inside the MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_positive("num_heads", "ffn_size", "patch_size", "num_position_embeddings")
        self._require_positive("spatial_merge_size", "num_channels")
        self._require_multiple("hidden_size", "num_heads")
        self._require(
            self.patches_a_side**2 == self.num_position_embeddings,
            f"`num_position_embeddings` is {self.num_position_embeddings}; it must be a square number",
        )
        self._require(
            self.spatial_merge_size <= self.patches_a_side,
            f"`spatial_merge_size` {self.spatial_merge_size} is more than the {self.patches_a_side} patches of a side",
        )
        longest = self.max_vision_cuda_graph_seq_length
        self._require(
            longest is None or longest >= 1,
            f"`max_vision_cuda_graph_seq_length` is {longest}; it must be at least 1, or None",
        )

    @property
    def patches_a_side(self) -> int:
        """The most patches an image has in a row or a column."""
        return isqrt(self.num_position_embeddings)

    @property
    def seq_length(self) -> int:
        """The length that the layers always run at."""
        if self.max_vision_cuda_graph_seq_length is not None:
            return self.max_vision_cuda_graph_seq_length
        return self.num_position_embeddings // self.spatial_merge_size**2

    @property
    def pixels_a_token(self) -> int:
        """Height and width of a token in pixels; an image's height and width are multiples of it."""
        return self.patch_size * self.spatial_merge_size

    @classmethod
    def tiny(cls) -> VisionConfig:
        """An encoder of 0.1 million parameters for tests: images of up to 32 x 32 pixels, 16 tokens."""
        return cls(num_layers=2, hidden_size=48, num_heads=4, ffn_size=96, patch_size=4, num_position_embeddings=64)


class VisionAttention(nn.Module):
    """Self-attention in both directions, within each image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, image_ids: Tensor) -> Tensor:
        """Attend from each token of `x` [batch, sequence, width] to those with its number in `image_ids`."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        same_image = (image_ids.unsqueeze(-1) == image_ids.unsqueeze(-2)).unsqueeze(1)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=same_image, dropout_p=dropout)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class VisionBlock(nn.Module):
    """One layer: attention, then the MLP, each normed before and added to the residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = VisionAttention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, config.ffn_size, config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, image_ids: Tensor) -> Tensor:
        """Add this layer's two branches to the residual stream `x`."""
        x = x + self.dropout(self.attn(self.attn_norm(x), image_ids))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Tensor]:
        """Return what the layer is called with at this length, all one image: zeros, in its own type."""
        weight: Tensor = self.mlp_norm.weight  # type: ignore[assignment]
        x = weight.new_zeros(micro_batch_size, seq_length, weight.shape[0]).requires_grad_()
        return {"x": x, "image_ids": torch.zeros(x.shape[:2], dtype=torch.int64, device=weight.device)}


class VisionEncoder(nn.Module):
    """From images to a sequence of tokens of fixed length; weights follow from torch's global seed.

    Example:
        `VisionEncoder(VisionConfig.tiny())([torch.randn(3, 16, 32), torch.randn(3, 8, 8)])`
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width, merged = config.hidden_size, config.spatial_merge_size**2 * config.hidden_size
        self.patch_proj = nn.Linear(config.num_channels * config.patch_size**2, width)
        self.positions = nn.Parameter(torch.empty(config.patches_a_side, config.patches_a_side, width))
        self.merge_proj = nn.Linear(merged, width)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        init_weights(self, config)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Return the tokens of `images`, each [channels, height, width], one image after the other, then padding."""
        x, image_ids = self.embed(images)
        for block in self.blocks:
            x = block(x, image_ids)
        out: Tensor = self.norm(x)
        return out

    def embed(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the residual stream [1, `seq_length`, width] and the number of each token's image, -1 for padding."""
        config = self.config
        counts = [self.num_tokens(image) for image in images]
        missing = config.seq_length - sum(counts)
        if missing < 0:
            raise ValueError(
                f"{type(self).__name__}.forward, argument `images`: {len(images)} images have {sum(counts)} tokens, "
                f"more than the {config.seq_length} that the layers run at; raise `max_vision_cuda_graph_seq_length`, "
                "or pass fewer or smaller images"
            )
        # Beginning with nothing lets a microbatch without images be one of padding.
        no_patch = self.patch_proj.weight.new_zeros(0, self.patch_proj.in_features)
        no_place = self.positions.new_zeros(0, config.hidden_size)
        patches = torch.cat([no_patch, *(self._patches(image) for image in images)])
        places = torch.cat([no_place, *(self._places(image) for image in images)])
        x = self.merge_proj(
            (self.patch_proj(patches) + places).unflatten(0, (-1, config.spatial_merge_size**2)).flatten(1)
        )
        device = x.device
        ids = [torch.full((count,), number, device=device) for number, count in enumerate(counts)]
        ids.append(torch.full((missing,), -1, device=device))
        return F.pad(x, (0, 0, 0, missing)).unsqueeze(0), torch.cat(ids).unsqueeze(0)

    def num_tokens(self, image: Tensor) -> int:
        """Return how many tokens an image takes; one whose size does not fit is refused."""
        config, side = self.config, self.config.pixels_a_token
        *_, height, width = image.shape
        if image.dim() != 3 or image.shape[0] != config.num_channels or height % side or width % side:
            raise ValueError(
                f"{type(self).__name__}.forward, argument `images`: an image of shape {tuple(image.shape)}; it must be "
                f"[{config.num_channels}, height, width], both multiples of {side} pixels "
                "(`patch_size` times `spatial_merge_size`)"
            )
        if max(height, width) > config.patches_a_side * config.patch_size:
            raise ValueError(
                f"{type(self).__name__}.forward, argument `images`: an image of {height} x {width} pixels; "
                f"`num_position_embeddings` {config.num_position_embeddings} has places for "
                f"{config.patches_a_side * config.patch_size} a side"
            )
        return int((height // side) * (width // side))

    def _patches(self, image: Tensor) -> Tensor:
        """The patches of an image as rows; those that become one token stand together."""
        merge, size = self.config.spatial_merge_size, self.config.patch_size
        parts = image.to(self.patch_proj.weight.dtype).unflatten(2, (-1, merge, size)).unflatten(1, (-1, merge, size))
        rows: Tensor = parts.permute(1, 4, 2, 5, 0, 3, 6).flatten(4).flatten(0, 3)
        return rows

    def _places(self, image: Tensor) -> Tensor:
        """The vectors of the places of an image's patches, in the order of `_patches`."""
        merge, size = self.config.spatial_merge_size, self.config.patch_size
        grid = self.positions[: image.shape[1] // size, : image.shape[2] // size]
        rows: Tensor = grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)
        return rows


@dataclass(frozen=True, kw_only=True)
class ReadsImages(ModelConfig):
    """The shape of what a language model needs to read images."""

    vision: VisionConfig
    """The shape of the vision encoder."""
    image_token: int
    """The token that stands in the text for one token of an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            0 <= self.image_token < self.vocab_size,
            f"`image_token` is {self.image_token}; it must be one of the {self.vocab_size} tokens",
        )


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(ReadsImages, GPTConfig):
    """The shape of a GPT with a vision encoder.

    Example:
        `replace(VisionLanguageConfig.tiny(), vision=replace(VisionConfig.tiny(), num_layers=4))`
    """

    @classmethod
    def tiny(cls) -> VisionLanguageConfig:
        """A model of 0.2 million parameters for tests: trains in milliseconds a step on a CPU."""
        language = {f.name: getattr(GPTConfig.tiny(), f.name) for f in fields(GPTConfig)}
        return cls(**language, vision=VisionConfig.tiny(), image_token=255)


@dataclass(frozen=True, kw_only=True)
class VisionMoEConfig(ReadsImages, MoEConfig):
    """The shape of a GPT with experts and a vision encoder."""

    @classmethod
    def tiny(cls) -> VisionMoEConfig:
        """A model of 0.4 million parameters for tests: trains in milliseconds a step on a CPU."""
        language = {f.name: getattr(MoEConfig.tiny(), f.name) for f in fields(MoEConfig)}
        return cls(**language, vision=VisionConfig.tiny(), image_token=255)


class ImageReader(nn.Module):
    """What a language model needs to read images: the encoder, and the way to the model's width."""

    vision_model: VisionEncoder
    projector: nn.Linear

    def add_encoder(self, config: ReadsImages) -> None:
        """Make the encoder and the projector."""
        self.vision_model = VisionEncoder(config.vision)
        self.projector = nn.Linear(config.vision.hidden_size, config.hidden_size)

    def place_images(self, x: Tensor, tokens: Tensor, images: Sequence[Tensor], image_token: int) -> Tensor:
        """Put the vectors of `images` where `tokens` has image tokens into the residual stream `x`."""
        vectors = self.projector(self.vision_model(images)).squeeze(0)
        is_image = tokens == image_token
        numbers = is_image.flatten().cumsum(0).view_as(tokens) - 1
        found = F.embedding(numbers.clamp(0, vectors.shape[0] - 1), vectors).type_as(x)
        return torch.where(is_image.unsqueeze(-1), found, x)


class VisionLanguageModel(GPT, ImageReader):
    """A GPT with a vision encoder whose weights follow from torch's global seed.

    Example:
        `VisionLanguageModel(VisionLanguageConfig.tiny())(tokens, images, targets)`
    """

    config: VisionLanguageConfig

    def __init__(self, config: VisionLanguageConfig) -> None:
        super().__init__(config)
        self.add_encoder(config)

    def forward(  # type: ignore[override]  # the images stand beside the tokens
        self, tokens: Tensor, images: Sequence[Tensor] = (), targets: Tensor | None = None
    ) -> Tensor:
        """Return the logits for `tokens` [batch, sequence] with `images`, or with `targets` the mean cross-entropy.

        The images of all sequences stand in one list, in the order of their tokens. Without any the encoder runs on
        padding alone. A target of -100 is left out of the mean; those of image tokens should be.
        """
        check_length(self, tokens, self.config)
        x = self.place_images(self.embed(tokens), tokens, images, self.config.image_token)
        x, _ = self.run_blocks(x, self.rotary)
        return self.read_out(x, targets)


class VisionMoE(MoEGPT, ImageReader):
    """A GPT with experts and a vision encoder whose weights follow from torch's global seed.

    Example:
        `out, aux_loss, load = VisionMoE(VisionMoEConfig.tiny())(tokens, images, targets)`
    """

    config: VisionMoEConfig

    def __init__(self, config: VisionMoEConfig) -> None:
        super().__init__(config)
        self.add_encoder(config)

    def forward(  # type: ignore[override]  # the images stand beside the tokens
        self, tokens: Tensor, images: Sequence[Tensor] = (), targets: Tensor | None = None
    ) -> MoEOutput:
        """Return what `MoEGPT` does for `tokens` with `images`, which `VisionLanguageModel` describes."""
        check_length(self, tokens, self.config)
        x = self.place_images(self.embed(tokens), tokens, images, self.config.image_token)
        return self.read_experts(x, targets)
