"""The older trainer's command line. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from functools import partial
from typing import final

from distiller.errors import UserError

PROGRAM = "train_distillation.py"
BATCH_SIZE, LEARNING_RATE, NUM_EPOCHS, OUTPUT_DIR = 2, 1e-5, 10, "./outputs"
STRATEGIES = {"cpu": "cpu", "balanced": "balanced", "gpu0": "rank0", "auto": "auto"}
"""Value of --teacher_device_strategy -> value of teacher.placement."""
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "half": "float16", "float": "float32"}


@final
class Flags(argparse.Namespace):
    """The flags as given. A flag that was left out is None, a switch False, unless `make_parser` has a default."""

    teacher_path: str
    student_config: str
    data_path: str
    output_dir: str
    teacher_device_strategy: str | None
    teacher_on_cpu: bool
    teacher_rank: int | None
    balanced_teacher: bool
    share_teacher: bool
    teacher_dtype: str
    gradient_checkpointing: bool
    mixed_precision: str | bool | None
    distributed: bool
    local_rank: int | None
    multi_gpu: bool
    batch_size: int
    lr: float | None
    learning_rate: float | None
    num_epochs: int | None
    num_steps: int | None
    num_workers: int
    save_samples: bool
    sample_prompts: list[str] | None
    sample_interval: int | None
    sample_dir: str | None
    image_size: int | None
    resume: bool


def read_flags(arguments: Sequence[str]) -> Flags:
    """Parses a command line. Raises UserError with a message of one line."""
    parser = make_parser()
    flags, unknown = parser.parse_known_args(arguments, namespace=Flags())
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1, cutoff=0.7)
        raise UserError(
            f"unknown argument '{unknown[0]}'; " + (f"did you mean {near[0]}?" if near else f"see {PROGRAM} --help")
        )
    return flags


def make_parser() -> argparse.ArgumentParser:
    """The older flags, with two that are new here: --image_size and --resume."""
    parser = _Parser(prog=PROGRAM, description="The older trainer's flags, turned into a recipe and trained.")
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--teacher_path", type=_location, required=True, help="a diffusers WanPipeline: folder, hub id or asset:NAME")
    add("--student_config", type=_location, required=True, help="an older config, or a WanTransformer3DModel's")
    add("--data_path", type=_location, required=True, help="prompts, one a line")
    add("--output_dir", type=_location, default=OUTPUT_DIR, help="the run's folder (default %(default)s)")
    switch("--resume", help="continue the run of --output_dir")
    add("--image_size", type=_count, metavar="PIXELS", help="height and width (default: the older config's)")

    add("--teacher_device_strategy", choices=[*STRATEGIES], help="where the teacher lives; gpu0 = whole on rank 0")
    switch("--teacher_on_cpu", help="as --teacher_device_strategy cpu")
    switch("--share_teacher", help="one copy in host memory for all ranks: as --teacher_on_cpu")
    switch("--balance_teacher", "--balanced_teacher", dest="balanced_teacher", help="spread over the GPUs")
    add("--teacher_rank", type=_number, metavar="R", help="whole on rank R, which answers for all")
    add("--teacher_dtype", type=_dtype, default="float32", help="float32 (default), float16, bfloat16 or auto")

    switch("--distributed", help="says that a launcher started several processes")
    add("--local_rank", "--local-rank", type=int, help="what older launchers pass to each process")
    switch("--multi_gpu", help="needs a launcher; without one, says the command")

    add("--batch_size", type=_count, default=BATCH_SIZE, help="of each process (default %(default)s)")
    add("--lr", type=_rate, help=f"learning rate (default {LEARNING_RATE:g})")
    add("--learning_rate", type=_rate, help="the same as --lr")
    add("--num_epochs", type=_count, help=f"passes over the prompts (default {NUM_EPOCHS})")
    add("--num_steps", type=_count, help="updates; wins over --num_epochs")
    add("--num_workers", type=_number, default=0, help="loader processes a rank (default %(default)s)")
    switch("--gradient_checkpointing", help="of the student")
    add("--mixed_precision", type=_precision, nargs="?", const=True, help="no, bf16 or fp16; alone: fp16")

    switch("--save_samples", help="samples.png is drawn at the end in any case")
    add("--sample_prompts", nargs="+", metavar="PROMPT", help="of samples.png (default: the data's first)")
    add("--sample_interval", type=_count, metavar="N", help="none here: samples are drawn once, at the end")
    add("--sample_dir", type=_location, metavar="DIR", help="samples.png is copied there")
    return parser


@final
class _Parser(argparse.ArgumentParser):
    """Raises argparse's usage errors as a UserError of one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see {self.prog} --help")


def _location(text: str) -> str:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"given {text!r}; it must be a path")
    return text


def _count(text: str) -> int:
    return _whole(text, 1, "above 0")


def _number(text: str) -> int:
    return _whole(text, 0, "from 0 up")


def _whole(text: str, least: int, range_in_words: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"given {text!r}; it must be a whole number {range_in_words}")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"given {text!r}; it must be a number above 0")
    return value


def _dtype(text: str) -> str:
    name = text.removeprefix("torch.")
    name = DTYPES.get(name, name)
    if name not in ("auto", *DTYPES.values()):
        raise argparse.ArgumentTypeError(f"given {text!r}; it must be float32, float16, bfloat16 or auto")
    return name


def _precision(text: str) -> str:
    if text not in ("no", "bf16", "fp16"):
        raise argparse.ArgumentTypeError(f"given {text!r}; it must be no, bf16 or fp16")
    return text
