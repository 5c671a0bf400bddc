"""The command line. Recipes are validated before torch is imported, so a misspelt key answers at once."""

from __future__ import annotations

import argparse
import re
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from distiller import __version__
from distiller.distributed.importing import collections_paused
from distiller.distributed.process import (
    end_loader_processes,
    is_main_process,
    prepare_environment,
    print_to_stderr,
    rank,
)
from distiller.distributed.rank_failure import (
    describe_lost_ranks,
    is_first_to_report,
    is_lost_rank_error,
    write_error_file,
)
from distiller.distributed.rendezvous import is_first_machine, refuse_mpi, report_failure
from distiller.distributed.shutdown import StopSignals
from distiller.errors import (
    AgreedError,
    AgreedUserError,
    OwnUserError,
    QualityGateError,
    RunError,
    SilentUserError,
    StoppedError,
    UserError,
    full_disk,
    full_gpu,
)

RUN_HELP = "a run's output folder, or RUN/checkpoints/step-N"
EXIT_USE, EXIT_FAILED, EXIT_GATE, EXIT_SIGNALLED = 2, 1, 3, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 done, 2 wrong use, 1 failed while running, 3 a gate not met, 128 + n stopped by signal n.
    """
    prepare_environment()

    def command(stops: StopSignals) -> None:
        options = _parse(arguments)
        if options.by_all_ranks or is_main_process():
            options.run(options, stops)

    return guarded(command)


def guarded(command: Callable[[StopSignals], None]) -> int:
    """Runs a command that may listen for signals; its failures become one line and an exit code."""
    stops = StopSignals()
    try:
        refuse_mpi()
        command(stops)
    except (UserError, RunError) as error:
        # What torch's agent sends to the other ranks now must not replace the reason.
        stops.defer()
        _tell_other_machines(error)
        codes = {UserError: EXIT_USE, QualityGateError: EXIT_GATE, RunError: EXIT_FAILED}
        return report_error(error, next(code for kind, code in codes.items() if isinstance(error, kind)))
    except StoppedError as error:
        _tell_other_machines(error)
        return report_error(error, EXIT_SIGNALLED + error.signal_number)
    except KeyboardInterrupt:
        # Commands that write nothing which goes on, and the imports of the others, do not listen for signals.
        stopped = StoppedError("stopped by SIGINT; start it again", signal.SIGINT, is_agreed=False)
        _tell_other_machines(stopped)
        return report_error(stopped, EXIT_SIGNALLED + signal.SIGINT)
    except Exception as error:
        stops.defer()
        if isinstance(error, RuntimeError) and is_lost_rank_error(error):
            return report_error(RunError(describe_lost_ranks(str(error).splitlines()[0])), EXIT_FAILED)
        _tell_other_machines(error)
        if (text := full_disk(error) or full_gpu(error)) is None:
            _report_unexpected(error)
            raise
        return report_error(RunError(text), EXIT_FAILED)
    finally:
        stops.close()
        end_loader_processes()
    return 0


def _tell_other_machines(error: BaseException) -> None:
    """Ends the wait of other machines' ranks for this one, if they still wait. Does not wait."""
    if not _is_agreed(error):
        report_failure(one_line(error))


def report_error(error: BaseException, code: int) -> int:
    """One line on stderr, from one rank of a machine; from rank 0 where all ranks know the same.

    And the same where the launcher looks for each rank's reason, whoever speaks.
    """
    # The ranks of rank 0's machine see the same files: a wrong recipe is no single rank's.
    is_elsewhere = not is_first_machine()
    is_own = isinstance(error, OwnUserError) or not isinstance(error, UserError) or is_elsewhere
    where = f" on {socket.gethostname()}" if is_elsewhere else ""
    named = f"distiller, rank {rank()}{where}: {one_line(error)}"
    plain = f"distiller{where}: {one_line(error)}"
    reason = named if is_own and not _is_agreed(error) else plain
    if _prints(error, reason):
        print_to_stderr(named if is_own and not is_main_process() else plain)
    write_error_file(reason, is_own=isinstance(error, OwnUserError))
    return code


def one_line(error: BaseException) -> str:
    """What the error says, without line breaks."""
    return " ".join(str(error).split())


def _is_agreed(error: BaseException) -> bool:
    """Whether every rank ends with this error."""
    return isinstance(error, AgreedError | AgreedUserError) or (isinstance(error, StoppedError) and error.is_agreed)


def _prints(error: BaseException, reason: str) -> bool:
    is_first = is_first_to_report(reason)
    if isinstance(error, OwnUserError | SilentUserError):
        return isinstance(error, OwnUserError)
    return is_main_process() if _is_agreed(error) else is_first


def _report_unexpected(error: BaseException) -> None:
    """For an error without a message of ours, whose traceback follows."""
    reason = f"distiller, rank {rank()}: {type(error).__name__}: {one_line(error)}"
    is_first_to_report(reason)
    write_error_file(reason, is_own=False)


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
    parser.set_defaults(by_all_ranks=False)
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
    mode.add_argument("--dry-run", action="store_true", help="build everything, run a few steps, say what a run takes")
    mode.add_argument("--check", action="store_true", help="validate recipe, files and launch file; needs no launcher")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue output_dir from its latest complete checkpoint; with --check: whether this recipe may",
    )
    train.add_argument("--config_file", metavar="FILE", help="with --check: the accelerate config file to validate")
    train.set_defaults(run=_train, by_all_ranks=True)

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
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="draw memory and time of all placements (.png, .svg)")
    plan.set_defaults(run=_plan)

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
    cache.set_defaults(run=_cache, by_all_ranks=True)

    evaluate = commands.add_parser("evaluate", help="compare a run's student with its teacher")
    evaluate.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    evaluate.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="for example evaluation.num_samples=1000"
    )
    evaluate.set_defaults(run=_evaluate)

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


def _train(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.config.loading import load

    if options.resume and options.dry_run:
        raise UserError("argument --resume: not allowed with argument --dry-run; see distiller train --help")
    recipe = load(options.recipe, options.overrides)
    if options.config_file and not options.check:
        raise UserError("--config_file belongs to accelerate launch (before -m distiller), or to --check")
    with collections_paused():
        from distiller import commands

    if options.check:
        if is_main_process():
            commands.check(recipe, options.config_file, options.resume)
        return
    stops.listen()
    if options.dry_run:
        commands.dry_run(recipe)
    else:
        commands.train(recipe, options.resume, stops)


def _plan(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.config.loading import load

    recipe = load(options.recipe, options.overrides)
    with collections_paused():
        from distiller import commands

    commands.plan(recipe, options)


def _cache(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.config.loading import load

    recipe = load(options.recipe, options.overrides)
    if recipe.teacher.cache is None and not options.compare:
        raise UserError("distiller cache needs teacher.cache; give the folder to write, with teacher.cache=FOLDER")
    with collections_paused():
        from distiller.commands import make_cache

    stops.listen()
    make_cache(recipe, options.repair, options.compare)


def _evaluate(options: argparse.Namespace, stops: StopSignals) -> None:
    with collections_paused():
        from distiller import commands

    # So that a checkpoint's exported student is removed again.
    stops.listen(is_training=False)
    commands.evaluate(options.run_dir, options.overrides)


def _sample(options: argparse.Namespace, stops: StopSignals) -> None:
    for prompt in options.prompts:
        if re.fullmatch(r"[a-z_]+(\.\w+)*=\S*", prompt):
            raise UserError(f"--prompts: '{prompt}' is an override and no prompt; give it before --prompts")
    with collections_paused():
        from distiller import commands

    stops.listen(is_training=False)
    commands.sample(options.run_dir, options.overrides, options.prompts, options.seed, options.output)


def _export(options: argparse.Namespace, stops: StopSignals) -> None:
    with collections_paused():
        from distiller import commands

    commands.export(options.checkpoint, options.output)


def _recipes(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.storage.packaged_files import find_recipe, first_line, recipe_names

    if options.name:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return
    for name in recipe_names():
        print(f"{name:<24} {first_line(find_recipe(name))}")


def _configs(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.storage.packaged_files import copy_launch_files, first_line, launch_files_dir

    if options.folder is not None:
        for file in copy_launch_files(options.folder):
            print(file)
        return
    for file in sorted((launch_files_dir() / "accelerate_configs").glob("*.yaml")):
        print(f"{file.name:<28} {first_line(file)}")
