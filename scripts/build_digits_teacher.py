"""Makes the embedded teacher, ``distiller/assets/digits-wan``: a complete small Wan pipeline that draws digits.

    python scripts/build_digits_teacher.py --device cuda
    python scripts/build_digits_teacher.py --evaluate-only

The transformer (0.98 M parameters) and the text encoder (0.09 M) learn together, by flow matching in the latents of a
VAE (0.64 M) that was trained before them, on the 1,797 digits of scikit-learn and every wording of
``distiller.demo.digits.seen_wordings``. The folder holds 6.8 MB. The VAE serves single frames only: nothing trains its
temporal kernels.

Measured with the defaults: 91 s on one NVIDIA H200 (26 s of them the VAE, 61 s the transformer), torch 2.11. Then, by
the reloaded pipeline on two CPU cores with torch 2.13 (237 s beside other work), 99.9% of 1,000 drawings recognised,
all of the 100 with unseen wordings among them, and at least 99% of every digit. Numbers from another device or library
version differ slightly. On two CPU cores a step of the VAE takes about 1 s, and one of the transformer at batch 64
about 0.2 s: after 900 of those it drew 86% of 200 digits recognisably.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from distiller.demo import digits
from distiller.diffusion.wan.short_text import install_short_text, remove_short_text

ASSET = Path(__file__).resolve().parent.parent / "distiller" / "assets" / "digits-wan"
MINIMUM_ACCURACY = 0.97
MAX_ASSET_BYTES = 8_000_000
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
PAD, UNKNOWN = SPECIAL_TOKENS.index("<pad>"), SPECIAL_TOKENS.index("<unk>")


# ---- the pipeline's parts -------------------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; capitals and punctuation do not matter; other words are all ``<unk>``."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *digits.vocabulary()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[^a-z0-9]+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=vocab_size,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_heads=4,
        num_layers=2,
        dropout_rate=0.0,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
    )
    return UMT5EncoderModel(config)


def build_vae() -> AutoencoderKLWan:
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    # A single frame sees only the last of a causal kernel's temporal taps. The others are never trained: let them add
    # nothing instead of noise.
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, WanCausalConv3d):
                module.weight[:, :, :-1] = 0
    return vae


def build_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=256,
        ffn_dim=256,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )


# ---- training -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """How one of the two trainings runs; AdamW without weight decay, linear warm-up, cosine decay to zero."""

    num_steps: int
    batch_size: int
    lr: float
    betas: tuple[float, float]
    warmup_steps: int
    max_grad_norm: float = 1.0

    def lr_at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))


def train(
    name: str,
    parameters: list[torch.nn.Parameter],
    loss_of_random_batch: Callable[[], torch.Tensor],
    training: Training,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Minimises a loss whose batches are drawn on the device; on a GPU as one replayed CUDA graph.

    The models are so small that a GPU would otherwise wait for Python most of the time.
    """
    device = parameters[0].device
    lr = torch.tensor(0.0, device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=training.betas, weight_decay=0.0, fused=True, capturable=device.type == "cuda"
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of_random_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm, foreach=True)
        optimizer.step()
        after_step()
        return loss.detach()

    start = time.perf_counter()
    run_step = step
    for index in range(training.num_steps):
        if device.type == "cuda" and index == 10:
            run_step = capture(step)
        lr.fill_(training.lr_at(index))
        loss = run_step()
        if index % max(1, training.num_steps // 10) == 0 or index == training.num_steps - 1:
            print(f"{name} step {index + 1}: loss {loss.item():.5f}, {time.perf_counter() - start:.1f} s", flush=True)


def capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Records ``step``, which has run before, as a CUDA graph; the result replays it."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


@contextlib.contextmanager
def single_frame_convolutions() -> Iterator[None]:
    """Runs Wan's causal convolutions as two-dimensional ones: the same for one frame, and several times faster."""
    original = WanCausalConv3d.forward

    def forward(self: WanCausalConv3d, x: torch.Tensor, cache_x: None = None) -> torch.Tensor:
        padding = (self._padding[2], self._padding[0])
        weight, bias = self.weight[:, :, -1], self.bias
        # torch's stub knows neither strides nor padding of fewer dimensions.
        return F.conv2d(x[:, :, 0], weight, bias, self.stride[1:], padding).unsqueeze(2)  # type: ignore[call-overload]

    WanCausalConv3d.forward = forward
    try:
        yield
    finally:
        WanCausalConv3d.forward = original


def train_vae(vae: AutoencoderKLWan, pixels: torch.Tensor, training: Training, kl_weight: float) -> None:
    """Trains on single frames ``pixels`` [N, 3, 1, 64, 64] in -1..1, then measures the latents' mean and deviation.

    The noise of the posterior makes the decoder forgive small errors of the transformers that will feed it.
    """

    def loss_of_random_batch() -> torch.Tensor:
        batch = pixels[torch.randint(len(pixels), (training.batch_size,), device=pixels.device)]
        posterior = DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(batch)))
        latents = posterior.mean + posterior.std * torch.randn_like(posterior.mean)
        # Without decode()'s clamp, which has no gradient at the black background.
        reconstruction = vae.decoder(vae.post_quant_conv(latents))
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        return F.mse_loss(reconstruction, batch) + kl_weight * kl

    with single_frame_convolutions():
        train("vae", list(vae.parameters()), loss_of_random_batch, training)
    mean, std = posterior_of(vae, pixels)
    # Of sampled latents, not of their means: a channel that the pictures do not need is all noise, with a mean that
    # hardly varies, and dividing it by the deviation of that mean would blow the noise up.
    deviation = (mean.var(dim=(0, 2, 3, 4)) + std.square().mean(dim=(0, 2, 3, 4))).sqrt()
    vae.register_to_config(
        latents_mean=[round(value, 5) for value in mean.mean(dim=(0, 2, 3, 4)).tolist()],
        latents_std=[round(value, 5) for value in deviation.tolist()],
    )


@torch.no_grad()
def posterior_of(vae: AutoencoderKLWan, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of the unscaled latents, each [N, 4, 1, 8, 8]."""
    posteriors = [vae.encode(part).latent_dist for part in pixels.split(256)]
    return torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])


@torch.no_grad()
def report_vae(vae: AutoencoderKLWan, pixels: torch.Tensor) -> None:
    mean, std = posterior_of(vae, pixels)
    decoded = torch.cat([vae.decode(part).sample for part in mean.split(256)])
    noisy = torch.cat([vae.decode(part).sample for part in (mean + std * torch.randn_like(mean)).split(256)])
    signal = mean.var(dim=(0, 2, 3, 4)).cpu() / torch.tensor(vae.config.latents_std).square()
    print(
        f"vae: squared error {F.mse_loss(decoded, pixels):.5f}, {F.mse_loss(noisy, pixels):.5f} with the posterior's "
        f"noise; share of signal in the latents by channel {[round(value, 2) for value in signal.tolist()]}"
    )


def all_training_tokens(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Token ids of every seen wording with every digit, as word and as numeral: int64 [10, prompts a digit, L].

    Every row ends with at least one padding token.
    """
    prompts = [
        digits.make_prompt(wording, digit, numeral=numeral)
        for digit in range(10)
        for wording in digits.seen_wordings()
        for numeral in (False, True)
    ]
    ids = tokenizer(prompts, padding=True, return_tensors="pt").input_ids
    return F.pad(ids, (0, 1), value=PAD).unflatten(0, (10, -1))


def train_transformer(
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    latents: tuple[torch.Tensor, torch.Tensor],
    labels: torch.Tensor,
    training: Training,
    shift: float,
    ema_decay: float,
) -> None:
    """Trains transformer and text encoder together by flow matching and leaves the averaged weights in them.

    Args:
        latents: Mean and standard deviation of the normalised latents, each [N, 4, 1, 8, 8].
        labels: The digits they show, [N].
        shift: Three quarters of the noise levels are spread like the sampler's at this shift, the rest evenly.
        ema_decay: Of the exponential average of the weights, per step.
    """
    device = labels.device
    mean, std = latents
    tokens = all_training_tokens(tokenizer).to(device)
    # One word in ten, but no digit, is unknown to the model in half of the prompts: users may write others.
    is_digit_word = [word in digits.DIGIT_WORDS or word.isdigit() for word in digits.vocabulary()]
    may_be_unknown = ~torch.tensor([True] * len(SPECIAL_TOKENS) + is_digit_word, device=device)
    lowest = torch.finfo(torch.float32).min
    batch_size = training.batch_size
    strata = torch.arange(batch_size, device=device)

    def encode(ids: torch.Tensor) -> torch.Tensor:
        is_real = ids != PAD
        # A ready additive mask: from a mask of zeros and ones the library would read a value back from the GPU.
        mask = torch.where(is_real, 0.0, lowest)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        return text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state * is_real[:, :, None]

    def loss_of_random_batch() -> torch.Tensor:
        index = torch.randint(len(labels), (batch_size,), device=device)
        clean = mean[index] + std[index] * torch.randn_like(mean[index])
        ids = tokens[labels[index], torch.randint(tokens.shape[1], (batch_size,), device=device)]
        rate = torch.where(torch.rand(batch_size, 1, device=device) < 0.5, 0.1, 0.0)
        ids = torch.where((torch.rand(ids.shape, device=device) < rate) & may_be_unknown[ids], UNKNOWN, ids)
        level = (strata + torch.rand(batch_size, device=device)) / batch_size
        level = torch.where(strata % 4 > 0, shift * level / (1 + (shift - 1) * level), level)
        sigma = level.view(-1, 1, 1, 1, 1)
        noise = torch.randn_like(clean)
        velocity = transformer(
            hidden_states=(1 - sigma) * clean + sigma * noise,
            timestep=1000 * level,
            encoder_hidden_states=encode(ids),
            return_dict=False,
        )[0]
        return F.mse_loss(velocity, noise - clean)

    parameters = [*transformer.parameters(), *text_encoder.parameters()]
    averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update_averages() -> None:
        torch._foreach_lerp_(averages, parameters, 1 - ema_decay)  # type: ignore[call-overload]

    install_short_text(transformer)
    train("transformer", parameters, loss_of_random_batch, training, after_step=update_averages)
    remove_short_text(transformer)
    with torch.no_grad():
        torch._foreach_copy_(parameters, averages)


def build(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    start = time.perf_counter()
    device = torch.device(args.device)
    images, labels = digits.real_digits()
    pixels = torch.from_numpy(images).to(device).float() / 127.5 - 1
    pixels = pixels[:, None, None].repeat(1, 3, 1, 1, 1)

    vae = build_vae().to(device)
    vae_training = Training(args.vae_steps, batch_size=64, lr=3e-3, betas=(0.9, 0.99), warmup_steps=100)
    train_vae(vae, pixels, vae_training, kl_weight=args.kl_weight)
    report_vae(vae, pixels)
    mean, std = posterior_of(vae, pixels)
    latents_mean = torch.tensor(vae.config.latents_mean, device=device).view(1, 4, 1, 1, 1)
    latents_std = torch.tensor(vae.config.latents_std, device=device).view(1, 4, 1, 1, 1)

    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(len(tokenizer)).to(device)
    transformer = build_transformer().to(device)
    train_transformer(
        transformer,
        text_encoder,
        tokenizer,
        latents=((mean - latents_mean) / latents_std, std / latents_std),
        labels=torch.from_numpy(labels).to(device),
        training=Training(args.steps, args.batch_size, lr=args.lr, betas=(0.9, 0.98), warmup_steps=200),
        shift=args.shift,
        ema_decay=args.ema_decay,
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=args.shift),
        transformer=transformer,
    )
    save(pipeline, args.output)
    print(f"trained in {time.perf_counter() - start:.0f} s on {describe(device)}")


def save(pipeline: WanPipeline, folder: Path) -> None:
    pipeline.to("cpu").save_pretrained(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o644)  # safetensors writes 0600, which nobody else could read once packaged
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{folder}: {num_bytes / 1e6:.2f} MB")
    assert num_bytes <= MAX_ASSET_BYTES
    for name in ("transformer", "vae", "text_encoder"):
        print(f"  {name}: {sum(p.numel() for p in getattr(pipeline, name).parameters()):,} parameters")


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"the CPU ({torch.get_num_threads()} threads)"


# ---- evaluation -----------------------------------------------------------------------------------------------------


def draw(pipeline: WanPipeline, prompts: list[str], seed: int) -> np.ndarray:
    """Draws one picture a prompt the way any user would: uint8 [N, 64, 64, 3]."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, len(prompts), 100):
        frames = pipeline(
            prompt=prompts[start : start + 100],
            height=digits.IMAGE_SIZE,
            width=digits.IMAGE_SIZE,
            num_frames=1,
            num_inference_steps=20,
            guidance_scale=1.0,
            generator=generator,
        ).frames
        parts.append(np.rint(np.asarray(frames)[:, 0] * 255).astype(np.uint8))
    return np.concatenate(parts)


def evaluate(args: argparse.Namespace) -> float:
    """Loads the folder with diffusers alone, draws the judge's prompts and returns the share that is recognised."""
    start = time.perf_counter()
    pipeline = WanPipeline.from_pretrained(args.output).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    judge = digits.DigitJudge()

    prompts, labels = digits.judge_prompts(args.num_per_digit, seed=args.seed)
    images = draw(pipeline, prompts, seed=args.seed)
    is_right = judge.recognise(images) == labels
    unseen = digits.all_prompts(digits.unseen_wordings())
    is_unseen = np.array([prompt in unseen for prompt in prompts])
    by_digit = ", ".join(f"{digit}: {is_right[labels == digit].mean():.1%}" for digit in range(10))
    print(
        f"recognised {is_right.mean():.2%} of {len(prompts)} drawings in {time.perf_counter() - start:.0f} s on "
        f"{describe(torch.device(args.device))}; {is_right[is_unseen].mean():.1%} of the {is_unseen.sum()} with unseen "
        f"wordings\n  {by_digit}"
    )
    if args.grid:
        rows = [np.concatenate(list(images[labels == digit][:16]), axis=1) for digit in range(10)]
        Image.fromarray(np.concatenate(rows, axis=0)).save(args.grid)
    return float(is_right.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ASSET, help="the pipeline's folder (default: the asset's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=2500)
    parser.add_argument("--kl-weight", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=12_000, help="of the transformer and the text encoder")
    parser.add_argument("--batch-size", type=int, default=256, help="of the transformer and the text encoder")
    parser.add_argument("--lr", type=float, default=2e-3, help="of the transformer and the text encoder")
    parser.add_argument("--shift", type=float, default=3.0, help="of the noise levels: training and scheduler")
    parser.add_argument("--ema-decay", type=float, default=0.999)
    parser.add_argument("--evaluate-only", action="store_true", help="judge the folder that is there")
    parser.add_argument("--num-per-digit", type=int, default=100, help="drawings to judge")
    parser.add_argument("--grid", type=Path, help="write 16 of the judged drawings of each digit to this PNG")
    args = parser.parse_args()
    if not args.evaluate_only:
        build(args)
    accuracy = evaluate(args)
    if accuracy < MINIMUM_ACCURACY:
        raise SystemExit(f"recognised {accuracy:.2%}, below the {MINIMUM_ACCURACY:.0%} that the asset promises")


if __name__ == "__main__":
    main()
