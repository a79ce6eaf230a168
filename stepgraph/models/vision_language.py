"""A GPT that reads images among its tokens, in plain torch.

The text holds a token of its own kind, `image_token`, for each token of an image, in order. The vision encoder turns
the images of a microbatch into vectors, a linear layer brings them to the GPT's width, and they take the places of
those tokens. Which vector goes where is counted on the device: the n-th image token of the microbatch gets the n-th
vector.

The encoder pads to a fixed length, so every shape follows from the text's alone and nothing is read on the host. The
price: the model cannot notice that a text has more or fewer image tokens than its images have.
`VisionEncoder.num_tokens(image)` says how many to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgraph.models.gpt import GPT, GPTConfig, check_length
from stepgraph.models.vision import VisionConfig, VisionEncoder


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(GPTConfig):
    """The shape of a GPT with a vision encoder.

    Example:
        `replace(VisionLanguageConfig.tiny(), vision=replace(VisionConfig.tiny(), num_layers=4))`
    """

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

    @classmethod
    def tiny(cls) -> VisionLanguageConfig:
        """A model of 0.2 million parameters for tests: trains in milliseconds a step on a CPU."""
        language = {f.name: getattr(GPTConfig.tiny(), f.name) for f in fields(GPTConfig)}
        return cls(**language, vision=VisionConfig.tiny(), image_token=255)


class VisionLanguageModel(GPT):
    """A GPT with a vision encoder whose weights follow from torch's global seed.

    Example:
        `VisionLanguageModel(VisionLanguageConfig.tiny())(tokens, images, targets)`
    """

    config: VisionLanguageConfig

    def __init__(self, config: VisionLanguageConfig) -> None:
        super().__init__(config)
        self.vision_model = VisionEncoder(config.vision)
        self.projector = nn.Linear(config.vision.hidden_size, config.hidden_size)

    def forward(  # type: ignore[override]  # the images stand beside the tokens
        self, tokens: Tensor, images: Sequence[Tensor] = (), targets: Tensor | None = None
    ) -> Tensor:
        """Return the logits for `tokens` [batch, sequence] with `images`, or with `targets` the mean cross-entropy.

        The images of all sequences stand in one list, in the order of their tokens. Without any the encoder runs on
        padding alone. A target of -100 is left out of the mean; those of image tokens should be.
        """
        check_length(self, tokens, self.config)
        x = self.place_images(self.embed(tokens), tokens, images)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.read_out(x, targets)

    def place_images(self, x: Tensor, tokens: Tensor, images: Sequence[Tensor]) -> Tensor:
        """Put the vectors of `images` where `tokens` has image tokens into the residual stream `x`."""
        vectors = self.projector(self.vision_model(images)).squeeze(0)
        is_image = tokens == self.config.image_token
        numbers = is_image.flatten().cumsum(0).view_as(tokens) - 1
        found = F.embedding(numbers.clamp(0, vectors.shape[0] - 1), vectors).type_as(x)
        return torch.where(is_image.unsqueeze(-1), found, x)
