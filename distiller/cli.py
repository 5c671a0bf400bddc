"""The command line. Recipes are validated before torch is imported, so a misspelt key answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from distiller import __version__
from distiller.errors import AgreedError, QualityGateError, RunError, UserError
from distiller.process import is_main_process, prepare_environment, rank

EXIT_USE, EXIT_FAILED, EXIT_GATE = 2, 1, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 wrong use, 1 failed while running, 3 a gate not met."""
    prepare_environment()
    try:
        options = _parse(arguments)
        options.run(options)
    except UserError as error:
        return complain(error, EXIT_USE)
    except QualityGateError as error:
        return complain(error, EXIT_GATE)
    except RunError as error:
        return complain(error, EXIT_FAILED)
    return 0


def complain(error: Exception, code: int) -> int:
    """One line on stderr: from rank 0 where all ranks found the same, else from the rank that failed."""
    is_shared = isinstance(error, UserError | AgreedError)
    if is_main_process() or not is_shared:
        who = "distiller" if is_main_process() else f"distiller, rank {rank()}"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses; overrides may stand before and after options, which argparse alone does not allow."""
    options, rest = _parser().parse_known_args(arguments)
    for word in rest:
        if word.startswith("-") or not hasattr(options, "overrides"):
            raise UserError(f"unknown argument '{word}'; see distiller --help")
        options.overrides.append(word)
    return options


class _Parser(argparse.ArgumentParser):
    """argparse's usage errors as one line on rank 0, exit 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distiller",
        description="Knowledge distillation for teachers that are too large to sit beside the student.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

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
    mode.add_argument("--resume", action="store_true", help="continue output_dir from its latest complete checkpoint")
    mode.add_argument("--dry-run", action="store_true", help="build everything, run a few steps, say what a run takes")
    mode.add_argument("--check", action="store_true", help="validate recipe, files and launch file; needs no launcher")
    train.add_argument("--config_file", metavar="FILE", help="with --check: the accelerate config file to validate")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="compare a run's student with its teacher")
    evaluate.add_argument("run_dir", type=Path, metavar="RUN", help="a run's output folder")
    evaluate.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="for example evaluation.num_samples=1000"
    )
    evaluate.set_defaults(run=_evaluate)

    sample = commands.add_parser("sample", help="draw teacher and student side by side")
    sample.add_argument("run_dir", type=Path, metavar="RUN", help="a run's output folder")
    sample.add_argument("--prompts", nargs="+", required=True, help="one picture of each for every prompt")
    sample.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    sample.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/samples.png")
    sample.set_defaults(run=_sample)

    export = commands.add_parser("export", help="write the student of any checkpoint in its library's format")
    export.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/step-N, or RUN: its newest"
    )
    export.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder; default: RUN/student-step-N")
    export.set_defaults(run=_export)

    recipes = commands.add_parser("recipes", help="list the packaged recipes, or print one")
    recipes.add_argument("name", nargs="?", help="print this recipe")
    recipes.set_defaults(run=_recipes)

    configs = commands.add_parser("configs", help="list the launch files, or copy them out with paths that work")
    configs.add_argument("folder", nargs="?", type=Path, help="copy accelerate_configs/ and ds_configs/ into it")
    configs.set_defaults(run=_configs)
    return parser


def _train(options: argparse.Namespace) -> None:
    from distiller.recipe_file import load

    recipe = load(options.recipe, options.overrides)
    if options.config_file and not options.check:
        raise UserError("--config_file belongs to accelerate launch (before -m distiller), or to --check")
    from distiller import commands

    if options.check:
        commands.check(recipe, options.config_file)
    elif options.dry_run:
        commands.dry_run(recipe)
    else:
        commands.train(recipe, options.resume)


def _evaluate(options: argparse.Namespace) -> None:
    from distiller import commands

    commands.evaluate(options.run_dir, options.overrides)


def _sample(options: argparse.Namespace) -> None:
    from distiller import commands

    commands.sample(options.run_dir, options.prompts, options.seed, options.output)


def _export(options: argparse.Namespace) -> None:
    from distiller import commands

    commands.export(options.checkpoint, options.output)


def _recipes(options: argparse.Namespace) -> None:
    from distiller.resources import find_recipe, first_line, recipe_names

    if options.name:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return
    for name in recipe_names():
        print(f"{name:<24} {first_line(find_recipe(name))}")


def _configs(options: argparse.Namespace) -> None:
    from distiller.resources import copy_launch_files, first_line, launch_files_dir

    if options.folder is not None:
        for file in copy_launch_files(options.folder):
            print(file)
        return
    for file in sorted((launch_files_dir() / "accelerate_configs").glob("*.yaml")):
        print(f"{file.name:<24} {first_line(file)}")
