"""Short text embeddings give what fully padded ones give, forward and backward."""

import copy

import pytest
import torch
from diffusers import WanTransformer3DModel

from distiller.diffusion.wan.short_text import (
    NUM_KEPT_ROWS,
    install_short_text,
    padding_bias,
    remove_short_text,
    short_length,
)

TEXT_DIM = 12


@pytest.fixture
def transformer() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=16,
    )


def make_inputs(lengths: tuple[int, ...], seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch with prompts of these lengths, padded to 512 rows."""
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.zeros(len(lengths), 512, TEXT_DIM)
    for index, length in enumerate(lengths):
        embeds[index, :length] = torch.randn(length, TEXT_DIM, generator=generator)
    return {
        "hidden_states": torch.randn(len(lengths), 4, 1, 8, 8, generator=generator),
        "timestep": torch.rand(len(lengths), generator=generator) * 1000,
        "encoder_hidden_states": embeds,
    }


def trim_padding(embeds: torch.Tensor) -> torch.Tensor:
    """The rows up to the longest prompt, and the zero rows that short text keeps."""
    num_rows = int((embeds != 0).any(-1).sum(1).max())
    return embeds[:, : num_rows + NUM_KEPT_ROWS]


def trimmed(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return inputs | {"encoder_hidden_states": trim_padding(inputs["encoder_hidden_states"])}


def loss_of(transformer: WanTransformer3DModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return transformer(**inputs).sample.square().mean()


def gradient_of(transformer: WanTransformer3DModel) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in transformer.parameters()])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("lengths", [(5, 5), (1, 3, 9), (0, 4), (511, 2)])
def test_output_and_gradient_equal_the_padded_form(
    transformer: WanTransformer3DModel, lengths: tuple[int, ...]
) -> None:
    inputs = make_inputs(lengths)
    padded_output = transformer(**inputs).sample
    padded_output.square().mean().backward()
    padded_gradient = gradient_of(transformer)
    transformer.zero_grad()

    install_short_text(transformer)
    short_inputs = trimmed(inputs)
    assert short_inputs["encoder_hidden_states"].shape[1] == min(max(lengths) + 2, 512)
    short_output = transformer(**short_inputs).sample
    short_output.square().mean().backward()

    torch.testing.assert_close(short_output, padded_output, rtol=1e-5, atol=1e-5)
    assert relative_error(gradient_of(transformer), padded_gradient) < 1e-4


def test_correction_matters(transformer: WanTransformer3DModel) -> None:
    inputs = make_inputs((5, 3))
    padded, uncorrected = transformer(**inputs).sample, transformer(**trimmed(inputs)).sample
    assert relative_error(uncorrected, padded) > 1e-3


def test_full_length_is_untouched(transformer: WanTransformer3DModel) -> None:
    inputs = make_inputs((7, 512))
    plain = transformer(**inputs).sample
    install_short_text(transformer)
    assert torch.equal(transformer(**inputs).sample, plain)


def test_other_padded_length_and_positional_inputs(transformer: WanTransformer3DModel) -> None:
    inputs = make_inputs((6, 2))
    padded = transformer(**inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :40]}).sample
    install_short_text(transformer, padded_length=40)
    torch.testing.assert_close(transformer(*trimmed(inputs).values()).sample, padded, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_with_two_forwards_before_the_backward(transformer: WanTransformer3DModel) -> None:
    first, second = make_inputs((5, 3), seed=1), make_inputs((2, 5), seed=2)
    (loss_of(transformer, first) + loss_of(transformer, second)).backward()
    expected = gradient_of(transformer)
    transformer.zero_grad()

    install_short_text(transformer)
    transformer.enable_gradient_checkpointing()
    transformer.train()
    (loss_of(transformer, trimmed(first)) + loss_of(transformer, trimmed(second))).backward()
    assert relative_error(gradient_of(transformer), expected) < 1e-4


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast(transformer: WanTransformer3DModel) -> None:
    inputs = make_inputs((5, 3))
    exact = transformer(**inputs).sample
    install_short_text(transformer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(transformer, trimmed(inputs))
        output = transformer(**trimmed(inputs)).sample
    loss.backward()
    assert relative_error(output.float(), exact) < 2e-2


def test_deep_copy_has_a_correction_of_its_own(transformer: WanTransformer3DModel) -> None:
    first, second = make_inputs((5, 3), seed=1), make_inputs((2, 9), seed=2)
    padded = transformer(**first).sample
    install_short_text(transformer)
    duplicate = copy.deepcopy(transformer)
    transformer(**trimmed(second))
    torch.testing.assert_close(duplicate(**trimmed(first)).sample, padded, rtol=1e-5, atol=1e-5)
    remove_short_text(duplicate)
    torch.testing.assert_close(transformer(**trimmed(first)).sample, padded, rtol=1e-5, atol=1e-5)
    assert torch.equal(duplicate(**first).sample, padded)


def test_remove_restores_the_plain_transformer(transformer: WanTransformer3DModel) -> None:
    inputs = trimmed(make_inputs((5, 3)))
    plain, processors = transformer(**inputs).sample, dict(transformer.attn_processors)
    install_short_text(transformer)
    remove_short_text(transformer)
    assert transformer.attn_processors == processors
    assert torch.equal(transformer(**inputs).sample, plain)
    remove_short_text(transformer)


def test_installing_twice_is_refused(transformer: WanTransformer3DModel) -> None:
    install_short_text(transformer)
    with pytest.raises(ValueError, match="already installed"):
        install_short_text(transformer)


def test_text_without_a_zero_row_is_refused(transformer: WanTransformer3DModel) -> None:
    install_short_text(transformer)
    inputs = make_inputs((5, 3))
    cut = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :5]}
    with pytest.raises(ValueError, match="without a zero row"):
        transformer(**cut)
    with pytest.raises(ValueError, match="more than the 4"):
        padding_bias(cut["encoder_hidden_states"], padded_length=4)


def test_zero_rows_weigh_as_much_as_all_the_padding() -> None:
    embeds = torch.zeros(3, 5, TEXT_DIM)
    embeds[0, :4], embeds[1, :3], embeds[2, :1] = 1, 1, 1
    bias = padding_bias(embeds, 512)
    assert bias is not None
    assert bias.shape == (3, 1, 1, 5)
    for sample, num_real in enumerate((4, 3, 1)):
        assert bias[sample, 0, 0, :num_real].abs().max() == 0
        weight = bias[sample, 0, 0, num_real:].double().exp().sum().item()
        assert weight == pytest.approx(512 - num_real, rel=1e-6)


@pytest.mark.parametrize("num_zero", [2, 5, 9])
@pytest.mark.parametrize("num_real", [1, 5, 60, 300, 500])
def test_the_weight_of_the_padding_survives_bfloat16(num_real, num_zero):
    embeds = torch.zeros(1, num_real + num_zero, 8)
    embeds[:, :num_real] = 1
    bias = padding_bias(embeds, 512)
    assert bias is not None
    weight = bias[0, 0, 0, num_real:].bfloat16().double().exp().sum().item()
    assert weight == pytest.approx(512 - num_real, rel=1e-3)


def test_few_numbers_of_rows_are_ever_used():
    """Each is planned by cuDNN, and torch.compile makes another code where it is no multiple of 8."""
    lengths = {longest: short_length(longest, 512) for longest in range(1, 513)}
    assert len(set(lengths.values())) == 64
    assert all(length % 8 == 0 for length in lengths.values())
    # Two zero rows, but where all of the padding is there anyway.
    assert all(length == 512 or longest + 2 <= length < longest + 10 for longest, length in lengths.items())
    assert short_length(223, 226) == 226
