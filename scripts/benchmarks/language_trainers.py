"""The trainer for language models against TRL's two distillation trainers, on one GPU and the same rows of tokens.

    pip install trl liger-kernel
    python scripts/benchmarks/language_trainers.py --length 2048 --batch-size 4

Random weights in the layouts of Llama 3.1 8B (teacher, bfloat16) and Llama 3.2 1B (student, float32 under bfloat16
autocast), forward KL, fused AdamW, no activation checkpointing. Sides:

- `trainer`, with compiled blocks as in a long run, without them (`trainer, eager`), and with an fp8 teacher, whose
  error is printed;
- `gkd`: TRL's GKDTrainer off-policy (`lmbda=0`), and with Liger kernels;
- `distillation`: TRL's DistillationTrainer, which is on-policy by design. Here it is given the same fixed tokens in
  place of its own generation. Also with `torch_compile=True`.

Each side runs in a process of its own, in turn, `--repeats` times. The second half of the steps is timed, and the
figure is the median of the runs. `--shortest` makes rows of unequal length, from that many tokens to `--length`; all
sides then pad a batch to its longest row. The limit is the matrix products' time at the GPU's dense bf16 peak.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, TrainerCallback

from distiller.training.tracking import peak_flops

ROOT = Path(__file__).parents[2]
PAD, EOS = "<pad>", "<eos>"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Of the published config.json files; vocabulary, then teacher and student.
MODELS = {
    "toy": (512, (64, 128, 4, 4, 2), (32, 64, 2, 4, 2)),
    "llama-8b": (128_256, (4096, 14_336, 32, 32, 8), (2048, 8192, 16, 32, 8)),
}
SIDES = {
    "trainer": {"compile": "default"},
    "trainer, eager": {"compile": "none"},
    "trainer, fp8 teacher": {"compile": "default", "quantization": "fp8"},
    "gkd": {},
    "gkd, liger": {"use_liger_kernel": True},
    "distillation": {},
    "distillation, compiled": {"torch_compile": True},
}


def config_of(options: argparse.Namespace, is_student: bool) -> LlamaConfig:
    """The layout of one of the two models."""
    vocabulary, *sizes = MODELS[options.model]
    return LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=max(8192, options.length),
        tie_word_embeddings=is_student,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **dict(zip(SIZES, sizes[is_student], strict=True)),
    )


def write_models(folder: Path, options: argparse.Namespace) -> tuple[int, int]:
    """Writes the teacher and its tokenizer, and the student's config; returns parameters in products of both."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        teacher = AutoModelForCausalLM.from_config(config_of(options, False), dtype=torch.bfloat16)
    teacher.save_pretrained(folder / "teacher")
    words = {PAD: 0, EOS: 1} | {f"w{number}": number for number in range(2, MODELS[options.model][0])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS).save_pretrained(
        folder / "teacher"
    )
    config_of(options, True).save_pretrained(folder / "student")
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(config_of(options, True))
    embedding = teacher.get_input_embeddings().weight.numel()
    return teacher.num_parameters() - embedding, student.num_parameters()


def make_rows(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of all rows, the same for every side."""
    numbers, vocabulary = random.Random(0), MODELS[options.model][0]
    count = options.steps * options.batch_size
    lengths = [numbers.randint(options.shortest or options.length, options.length) for _ in range(count)]
    return [[numbers.randrange(2, vocabulary) for _ in range(length)] for length in lengths]


def write_recipe(folder: Path, rows: list[list[int]], options: argparse.Namespace) -> None:
    """A recipe for the trainer, with its texts."""
    # The row's last token is the end of the document, which the trainer adds.
    lines = (json.dumps({"text": " ".join(f"w{number}" for number in row[:-1])}) for row in rows)
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    recipe = {
        "output_dir": "-",
        "cache_dir": str(folder / "stages"),
        "task": {"kind": "causal_lm"},
        "teacher": {"path": str(folder / "teacher"), "dtype": "bfloat16"},
        "student": {"config": str(folder / "student" / "config.json")},
        "data": {
            "kind": "jsonl",
            "path": str(folder / "texts.jsonl"),
            "max_length": options.length,
            "packing": False,
            "held_out": 0,
        },
        "train": {
            "batch_size": options.batch_size,
            "max_steps": options.steps,
            "log_every": options.steps // 2,
            "mixed_precision": "bf16" if torch.cuda.is_available() else "no",
        },
        "optim": {"lr": 1e-5, "max_grad_norm": 1.0},
        "tracking": {"trackers": []},
        "checkpoint": {"at_end": False, "every_minutes": None},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def run_trainer(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """This project's side."""
    settings = SIDES[name]
    output_dir = folder / f"run-{len(list(folder.glob('run-*')))}"
    overrides = [f"output_dir={output_dir}"]
    overrides += [f"{section}.compile={settings['compile']}" for section in ("train", "teacher")]
    if "quantization" in settings:
        overrides.append(f"teacher.quantization={settings['quantization']}")
    launch = "single_gpu" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [f"accelerate_configs/{launch}.yaml", "-m", "distiller", "train", str(folder / "recipe.yaml")]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True, stdout=sys.stderr)
    last = json.loads((output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((output_dir / "summary.json").read_text())
    found = {"step_ms": last["perf/step_ms"], "peak_gib": last["memory/gpu_peak_gib_max"], "loss": last["loss"]}
    error = {"relative": summary["teacher_quantization_error"]} | summary["teacher_quantization_figures"]
    return found | {"error": error, "teacher_ms": last["perf/teacher_ms"]}


class Clock(TrainerCallback):
    """Times the second half of the steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.started, self.step_ms = steps, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step not in (self.steps // 2, self.steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.step_ms = (now - self.started) * 1e3 / (self.steps - self.steps // 2)
        self.started = now


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right to its longest row; the first token is the prompt."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    input_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def run_trl(folder: Path, name: str, rows: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """One of TRL's trainers, in this process."""
    on_gpu = torch.cuda.is_available()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "teacher")
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        student = AutoModelForCausalLM.from_config(config_of(options, True), dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.bfloat16)
    common = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": options.batch_size,
        "max_steps": options.steps,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "beta": 0.0,
        "temperature": 1.0,
        "logging_steps": options.steps // 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **SIDES[name],
    }
    clock = Clock(options.steps)
    given = {"model": student, "teacher_model": teacher, "processing_class": tokenizer, "callbacks": [clock]}
    if name.startswith("gkd"):
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        arguments = GKDConfig(lmbda=0.0, max_length=options.length, **common)
        data = Dataset.from_dict({"input_ids": rows})
        trainer = GKDTrainer(args=arguments, train_dataset=data, data_collator=padded, **given)
    else:
        from datasets import Dataset
        from trl import DistillationConfig, DistillationTrainer

        class FixedTokens(DistillationTrainer):
            """Generates nothing: a batch is the rows as they are."""

            def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
                device = self.accelerator.device
                batch = {key: value.to(device) for key, value in padded(inputs).items()}
                mask = batch["attention_mask"]
                return {
                    "prompt_ids": batch["input_ids"][:, :1],
                    "prompt_mask": mask[:, :1],
                    "completion_ids": batch["input_ids"][:, 1:],
                    "completion_mask": mask[:, 1:],
                    "num_items_in_batch": mask[:, 1:].sum(),
                }

        arguments = DistillationConfig(max_completion_length=options.length, **common)
        data = Dataset.from_dict({"prompt": ["w2"] * len(rows), "input_ids": rows})
        trainer = FixedTokens(args=arguments, train_dataset=data, **given)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {"step_ms": clock.step_ms, "peak_gib": peak, "loss": losses[-1]}


def measure(folder: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A side in a process of its own."""
    if name.startswith("trainer"):
        return run_trainer(folder, name, options)
    command = [sys.executable, __file__, *sys.argv[1:], "--inside", name, "--folder", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return json.loads((folder / "side.json").read_text())


def print_table(results: dict[str, list[dict[str, Any]]], num_tokens: float, options: argparse.Namespace) -> None:
    """Medians of all sides; speeds and memory relative to the first one of TRL's that ran."""
    steps = {name: median(one["step_ms"] for one in found) for name, found in results.items()}
    theirs = {name: step for name, step in steps.items() if not name.startswith("trainer")}
    best = min(theirs.values()) if theirs else None
    least = min((results[name][0]["peak_gib"] or 0 for name in theirs), default=None)
    print(f"\nmedians of {options.repeats} runs; compared with the fastest of TRL's, and the one of least memory")
    print("| side | ms a step | tokens/s | of TRL's | peak GiB | of TRL's | loss |")
    print("| --- " * 7 + "|")
    for name, step in steps.items():
        one = results[name][0]
        speed = "" if best is None else f"{best / step:.2f}"
        memory = "" if not least else f"{one['peak_gib'] / least:.2f}"
        peak = "-" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        figures = f"{step:.1f} | {num_tokens / step * 1e3:,.0f} | {speed} | {peak} | {memory} | {one['loss']:.4f}"
        print(f"| {name} | {figures} |")
        if one.get("error", {}).get("relative") is not None:
            print(f"  error of the quantised teacher: {one['error']}")
        if one.get("teacher_ms"):
            print(f"  of it the teacher: {one['teacher_ms']:.1f} ms")


def main() -> None:
    """Runs all sides in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--side", choices=SIDES, action="append", help="default: all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest row; default: all rows are as long")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, in alternating order")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = make_rows(options)
    if options.inside:
        result = run_trl(options.folder, options.inside, rows, options)
        (options.folder / "side.json").write_text(json.dumps(result))
        return
    sides = options.side or list(SIDES)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = write_models(folder, options)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        write_recipe(folder, rows, options)
        for number in range(options.repeats):
            for side in sides if number % 2 == 0 else reversed(sides):
                try:
                    results[side].append(measure(folder, side, options))
                    print(f"{side}: {results[side][-1]}", flush=True)
                except subprocess.CalledProcessError:
                    print(f"{side}: failed, see above", flush=True)
    timed = rows[len(rows) // 2 :]
    num_tokens = sum(map(len, timed)) / (options.steps - options.steps // 2)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{options.model}, {where}, torch {torch.__version__}; {num_tokens:,.0f} tokens a step, {options}")
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), "bf16")
    if peak:
        limits = [1e3 * flop * num_tokens / peak for flop in (2 * parameters[0], 6 * parameters[1])]
        print(f"limit of the matrix products: teacher {limits[0]:.0f} ms, student {limits[1]:.0f} ms")
    print_table({name: found for name, found in results.items() if found}, num_tokens, options)


if __name__ == "__main__":
    main()
