"""The vision encoder and the vision-language model: what they compute, what padding and masks leave alone."""

import math
from dataclasses import replace

import pytest
import torch

from stepgraph.lab.models import (
    VisionConfig,
    VisionEncoder,
    VisionLanguageConfig,
    VisionLanguageModel,
    VisionMoE,
    VisionMoEConfig,
)

TINY = VisionConfig.tiny()
MODEL = VisionLanguageConfig.tiny()


def make_encoder(config: VisionConfig = TINY) -> VisionEncoder:
    torch.manual_seed(0)
    encoder = VisionEncoder(config)
    with torch.no_grad():
        encoder.positions.normal_()  # large enough to be seen in a result
    return encoder


def make_model(config: VisionLanguageConfig = MODEL) -> VisionLanguageModel:
    torch.manual_seed(0)
    return VisionLanguageModel(config)


def make_images(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, height, width, generator=generator) for height, width in sizes]


def text_with_images(counts: list[int], length: int = 12) -> torch.Tensor:
    """One sequence for each count: that many image tokens after two others."""
    tokens = torch.randint(250, (len(counts), length), generator=torch.Generator().manual_seed(2))
    for row, count in zip(tokens, counts, strict=True):
        row[2 : 2 + count] = MODEL.image_token
    return tokens


def tokens_by_hand(encoder: VisionEncoder, image: torch.Tensor) -> torch.Tensor:
    """Patch by patch, in float64: project, add the place, put squares of patches together, project."""
    config = encoder.config
    size, merge = config.patch_size, config.spatial_merge_size
    rows, columns = image.shape[1] // size, image.shape[2] // size
    found = []
    for top in range(0, rows, merge):
        for left in range(0, columns, merge):
            square = []
            for row in range(top, top + merge):
                for column in range(left, left + merge):
                    patch = image[:, row * size : (row + 1) * size, column * size : (column + 1) * size].double()
                    vector = encoder.patch_proj.weight.double() @ patch.flatten() + encoder.patch_proj.bias
                    square.append(vector + encoder.positions[row, column])
            found.append(encoder.merge_proj.weight.double() @ torch.cat(square) + encoder.merge_proj.bias)
    return torch.stack(found)


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_encoder_tokens_equal_written_out_form(merge: int) -> None:
    encoder = make_encoder(replace(TINY, spatial_merge_size=merge, max_vision_cuda_graph_seq_length=64))
    images = make_images((16, 32), (16, 16))
    x, image_ids = encoder.embed(images)
    expected = torch.cat([tokens_by_hand(encoder, image) for image in images])
    assert x.shape == (1, 64, TINY.hidden_size)
    torch.testing.assert_close(x[0, : len(expected)].double(), expected, rtol=1e-4, atol=1e-5)  # float32 roundings
    assert not x[0, len(expected) :].any()
    first, second = (encoder.num_tokens(image) for image in images)
    assert image_ids.tolist() == [[0] * first + [1] * second + [-1] * (64 - first - second)]


def test_attention_equals_written_out_form_in_each_image() -> None:
    encoder = make_encoder()
    attention = encoder.blocks[0].attn
    x, image_ids = torch.randn(1, 7, TINY.hidden_size), torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    out = attention(x, image_ids)[0]
    size = TINY.hidden_size // TINY.num_heads
    for part in (slice(0, 3), slice(3, 5)):
        rows = x[0, part].double()
        q, k, v = (rows @ attention.qkv_proj.weight.double().T + attention.qkv_proj.bias).chunk(3, dim=-1)
        heads = []
        for head in range(TINY.num_heads):
            own = slice(head * size, (head + 1) * size)
            heads.append((q[:, own] @ k[:, own].T / math.sqrt(size)).softmax(-1) @ v[:, own])
        expected = torch.cat(heads, -1) @ attention.out_proj.weight.double().T + attention.out_proj.bias
        torch.testing.assert_close(out[part].double(), expected, rtol=1e-4, atol=1e-6)


def test_encoder_result_does_not_depend_on_padding() -> None:
    images = make_images((16, 16), (8, 24))
    exact = make_encoder(replace(TINY, max_vision_cuda_graph_seq_length=7))(images)
    padded = make_encoder(replace(TINY, max_vision_cuda_graph_seq_length=40))(images)
    assert exact.shape[1] == 7
    torch.testing.assert_close(padded[:, :7], exact, rtol=1e-5, atol=1e-5)


def test_encoder_images_do_not_see_each_other() -> None:
    encoder = make_encoder()
    one, two, three = make_images((16, 16), (8, 16), (8, 16))
    before, after = encoder([one, two]), encoder([one, three])
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 4:6], after[:, 4:6], atol=1e-3)
    torch.testing.assert_close(encoder([two, one])[:, 2:6], before[:, :4], rtol=1e-5, atol=1e-5)


def test_encoder_attends_in_both_directions() -> None:
    encoder = make_encoder()
    (image,) = make_images((16, 16))
    changed = image.clone()
    changed[:, 8:, 8:] += 1.0  # the last of four tokens
    assert not torch.allclose(encoder([image])[:, 0], encoder([changed])[:, 0], atol=1e-5)


def test_encoder_length_is_static_whatever_the_images() -> None:
    encoder = make_encoder()
    for sizes in ([], [(8, 8)], [(32, 32)], [(16, 16), (8, 16)]):
        assert encoder(make_images(*sizes)).shape == (1, 16, TINY.hidden_size)


@pytest.mark.parametrize(
    ("change", "length"), [({}, 16), ({"spatial_merge_size": 4}, 4), ({"max_vision_cuda_graph_seq_length": 48}, 48)]
)
def test_vision_config_length_follows_from_its_fields(change: dict[str, int], length: int) -> None:
    assert replace(TINY, **change).seq_length == length


def test_encoder_refuses_more_tokens_than_its_length() -> None:
    with pytest.raises(ValueError, match=r"3 images have 20 tokens, more than the 16 .*max_vision_cuda_graph_seq"):
        make_encoder()(make_images((16, 32), (16, 32), (16, 16)))


@pytest.mark.parametrize("shape", [(3, 12, 16), (3, 16, 20), (1, 16, 16), (16, 16), (1, 3, 16, 16)])
def test_encoder_refuses_an_image_that_does_not_divide(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiples of 8 pixels"):
        make_encoder()([torch.zeros(shape)])


def test_encoder_refuses_an_image_without_places() -> None:
    with pytest.raises(ValueError, match="num_position_embeddings"):
        make_encoder(replace(TINY, max_vision_cuda_graph_seq_length=99))([torch.zeros(3, 8, 40)])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_position_embeddings": 60}, "num_position_embeddings"),
        ({"num_heads": 5}, "num_heads"),
        ({"spatial_merge_size": 9}, "spatial_merge_size"),
        ({"max_vision_cuda_graph_seq_length": 0}, "max_vision_cuda_graph_seq_length"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_vision_config_names_the_wrong_field(change: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}`"):
        replace(TINY, **change)


def test_vision_block_is_called_with_its_static_inputs() -> None:
    encoder = make_encoder().to(torch.bfloat16)
    block = encoder.blocks[0]
    given = block.get_layer_static_inputs(seq_length=5, micro_batch_size=1)
    assert given["x"].requires_grad
    assert given["x"].dtype is torch.bfloat16
    assert block(**given).shape == (1, 5, TINY.hidden_size)


def test_model_puts_vectors_at_image_tokens_in_order() -> None:
    model, images = make_model(), make_images((8, 16), (8, 8), (8, 16))
    tokens = text_with_images([2, 0, 3])  # the first row has the first image, the third the other two
    embedded = model.embed(tokens)
    x = model.place_images(embedded, tokens, images, model.config.image_token)
    vectors = model.projector(model.vision_model(images))[0]
    expected = embedded.clone()
    expected[0, 2:4], expected[2, 2:5] = vectors[:2], vectors[2:5]
    assert torch.equal(x, expected)


def test_model_without_images_is_the_plain_gpt() -> None:
    model, tokens = make_model(), text_with_images([0, 0])
    plain = super(VisionLanguageModel, model).forward(tokens)
    assert torch.equal(model(tokens), plain)


def test_model_gives_every_parameter_a_gradient() -> None:
    model, tokens = make_model(), text_with_images([4, 2])
    images = make_images((16, 16), (8, 16))
    model(tokens, images, text_with_images([0, 0])).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_model_loss_ignores_padding_of_the_vision_length() -> None:
    tokens, targets, images = text_with_images([4, 2]), text_with_images([0, 0]), make_images((16, 16), (8, 16))
    losses = []
    for length in (6, 30):
        vision = replace(TINY, max_vision_cuda_graph_seq_length=length)
        losses.append(make_model(replace(MODEL, vision=vision))(tokens, images, targets))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_model_gradients_are_deterministic_by_default() -> None:
    torch.use_deterministic_algorithms(False)
    tokens, targets, images = text_with_images([4, 2]), text_with_images([0, 0]), make_images((16, 16), (8, 16))
    runs = []
    for _ in range(3):
        model = make_model()
        model(tokens, images, targets).backward()
        runs.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_model_runs_in_bfloat16_with_float32_loss() -> None:
    tokens, targets, images = text_with_images([4, 2]), text_with_images([0, 0]), make_images((16, 16), (8, 16))
    expected = make_model()(tokens, images, targets)
    loss = make_model().to(torch.bfloat16)(tokens, images, targets)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-2)  # bf16 keeps 8 bits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(make_model()(tokens, images, targets), expected, rtol=0, atol=1e-2)


def test_model_refuses_longer_vision_input() -> None:
    with pytest.raises(ValueError, match="32 tokens, more than the 16"):
        make_model()(text_with_images([4]), make_images((32, 32), (32, 32)))


def test_model_config_refuses_image_token_outside_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="image_token"):
        replace(MODEL, image_token=256)


def test_model_with_experts_reads_images_like_the_dense_one() -> None:
    torch.manual_seed(0)
    model, images = VisionMoE(VisionMoEConfig.tiny()), make_images((16, 16), (8, 16))
    tokens, targets = text_with_images([4, 2]), text_with_images([0, 0])
    out, aux_loss, load = model(tokens, images, targets)
    (out + aux_loss).backward()
    assert load.shape == (2, 8)
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert model.vision_model.patch_proj.weight.grad.any()
    changed = model(tokens, [images[0] + 1, images[1]], targets).out
    assert not torch.equal(changed, out)
    with pytest.raises(ValueError, match="image_token"):
        replace(VisionMoEConfig.tiny(), image_token=256)
