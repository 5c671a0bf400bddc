"""The arguments of every command, with their help. Imports no torch, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distiller import __version__
from distiller.errors import UserError

RUN_HELP = "a run's output folder, or RUN/checkpoints/step-N"
Handler = Callable[[argparse.Namespace, Any], None]


class Parser(argparse.ArgumentParser):
    """argparse's usage errors as one line on rank 0, exit 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see {self.prog} --help")


def make_parser(handlers: Mapping[str, Handler]) -> Parser:
    """The parser of all commands; `handlers`: command -> what runs it, given the options and the stop signals."""
    parser = Parser(
        prog="distiller",
        description="Knowledge distillation for teachers that are too large to sit beside the student.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(by_all_ranks=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    train = commands.add_parser(
        "train",
        help="distil a student (through accelerate launch)",
        description="accelerate launch --config_file FILE.yaml -m distiller train RECIPE [key.sub=value ...]",
    )
    train.add_argument("recipe", help="a packaged recipe's name (see `recipes`) or a YAML file")
    train.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="recipe keys to set, for example optim.lr=1e-4",
    )
    mode = train.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="build everything, run a few steps, say what a run takes")
    mode.add_argument("--check", action="store_true", help="validate recipe, files and launch file; needs no launcher")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue output_dir from its latest complete checkpoint; with --check: whether this recipe may",
    )
    train.add_argument(
        "--auto-without",
        action="append",
        default=[],
        metavar="PLACEMENT",
        help="do not let teacher.placement auto choose PLACEMENT; may be repeated",
    )
    train.add_argument("--config_file", metavar="FILE", help="with --check: the accelerate config file to validate")
    train.set_defaults(run=handlers["train"], by_all_ranks=True)

    plan = commands.add_parser(
        "plan",
        help="what every placement of the teacher takes, and how long a run lasts; needs no GPU and no weights",
        description="distiller plan RECIPE [key.sub=value ...]; without options of the machine: for this one",
    )
    plan.add_argument("recipe", help="a packaged recipe's name (see `recipes`) or a YAML file")
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="for example train.batch_size=2"
    )
    plan.add_argument("--machine", metavar="NxGPU-MEMORY", help="number, kind and memory of the GPUs, as 4x3090-24G")
    plan.add_argument("--gpus", type=int, metavar="N", help="of each machine, a process for each")
    plan.add_argument("--gpu", metavar="NAME", help="kind of the GPUs, as H100: its rates; memory too if not given")
    plan.add_argument("--gpu-memory", metavar="SIZE", help="of each GPU, as 24GiB")
    plan.add_argument("--host-memory", metavar="SIZE", help="of each machine, as 128GiB")
    plan.add_argument("--machines", type=int, default=1, metavar="M", help="how many of them (default 1)")
    plan.add_argument("--config_file", metavar="FILE", help="the accelerate config file: the student's engine")
    plan.add_argument("--processes", type=int, metavar="N", help="of all machines (default: as many as GPUs)")
    plan.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine's rates first, and keep them for later plans and runs",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw memory and time of all placements (.png, .svg)")
    plan.set_defaults(run=handlers["plan"])

    cache = commands.add_parser(
        "cache",
        help="write the teacher's outputs to disk, so that training needs no teacher (through accelerate launch)",
        description="accelerate launch --config_file FILE.yaml -m distiller cache RECIPE [key.sub=value ...] "
        "teacher.cache=FOLDER; goes on where an interrupted run stopped",
    )
    cache.add_argument("recipe", help="a packaged recipe's name (see `recipes`) or a YAML file")
    cache.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help="for example cache.draws=2")
    instead = cache.add_mutually_exclusive_group()
    instead.add_argument("--repair", action="store_true", help="read all that is there, and make damaged files again")
    instead.add_argument(
        "--compare",
        action="store_true",
        help="write nothing; print bytes a token, bias and gradient of each form in which outputs could be stored",
    )
    cache.set_defaults(run=handlers["cache"], by_all_ranks=True)

    evaluate = commands.add_parser("evaluate", help="compare a run's student with its teacher")
    evaluate.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    evaluate.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="for example evaluation.num_samples=1000"
    )
    for side, word in (("min", "below"), ("max", "above")):
        evaluate.add_argument(
            f"--{side}",
            action="append",
            default=[],
            type=_bound,
            metavar="FIGURE=NUMBER",
            help=f"exit 3 where this figure of the report lies {word} the number; nested ones as a.b; may be repeated",
        )
    evaluate.add_argument(
        "--lm-eval",
        metavar="TASK[,TASK]",
        help="of a language model: run these tasks of lm-evaluation-harness (pip install lm-eval) on the student too",
    )
    evaluate.add_argument(
        "--lm-eval-include", type=Path, metavar="FOLDER", help="with --lm-eval: task files of your own (.yaml)"
    )
    evaluate.set_defaults(run=handlers["evaluate"])

    sample = commands.add_parser(
        "sample",
        help="teacher and student side by side: drawings, or texts that they continue",
        description="distiller sample RUN [key.sub=value ...] --prompts PROMPT [PROMPT ...]",
    )
    sample.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    sample.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="before --prompts, for example sampling.num_inference_steps=50 or teacher.placement=streamed",
    )
    sample.add_argument("--prompts", nargs="+", required=True, help="one picture or text of each for every prompt")
    sample.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    sample.add_argument("--output", type=Path, metavar="FILE", help="default: a new RUN/samples-1.png or .txt")
    sample.set_defaults(run=handlers["sample"])

    export = commands.add_parser("export", help="write the student of any checkpoint in its library's format")
    export.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-N, or RUN: its newest"
    )
    export.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder; default: RUN/student-step-N")
    export.set_defaults(run=handlers["export"])

    report = commands.add_parser(
        "report",
        help="one HTML page of a run: curves, time, memory, quality, samples; of several runs, a comparison",
        description="distiller report RUN [RUN ...] [-o FILE]; also of a run that is not finished",
    )
    report.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN", help="a run's output folder")
    report.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: RUN/report.html; of several runs ./report.html"
    )
    report.set_defaults(run=handlers["report"])

    recipes = commands.add_parser("recipes", help="list the packaged recipes, or print one")
    recipes.add_argument("name", nargs="?", help="print this recipe")
    recipes.set_defaults(run=handlers["recipes"])

    configs = commands.add_parser("configs", help="list the launch files, or copy them out with paths that work")
    configs.add_argument("folder", nargs="?", type=Path, help="copy accelerate_configs/ and ds_configs/ into it")
    configs.set_defaults(run=handlers["configs"])
    return parser


def _bound(text: str) -> tuple[str, float]:
    """`FIGURE=NUMBER` as a pair; the name of a figure may hold dots, spaces and equals signs."""
    key, sign, number = text.rpartition("=")
    try:
        bound = float(number) if sign and key else math.nan
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise argparse.ArgumentTypeError(f"given '{text}'; give FIGURE=NUMBER, for example size_ratio=4")
    return key, bound
