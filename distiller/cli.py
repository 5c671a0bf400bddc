"""The command line. Recipes are validated before torch is imported, so a misspelt key answers at once."""

from __future__ import annotations

import argparse
import re
import signal
import socket
from collections.abc import Callable, Sequence

from distiller.arguments import make_parser
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
    options, rest = make_parser(HANDLERS).parse_known_args(arguments)
    for word in rest:
        if word.startswith("-") or not hasattr(options, "overrides"):
            raise UserError(f"unknown argument '{word}'; see distiller --help")
        options.overrides.append(word)
    return options


def _train(options: argparse.Namespace, stops: StopSignals) -> None:
    from distiller.config.loading import load
    from distiller.config.placements import AUTO, PLACEMENTS

    if options.resume and options.dry_run:
        raise UserError("argument --resume: not allowed with argument --dry-run; see distiller train --help")
    recipe = load(options.recipe, options.overrides)
    if unknown := set(options.auto_without) - set(PLACEMENTS):
        raise UserError(f"--auto-without {unknown.pop()} is no placement; choose one of {', '.join(PLACEMENTS)}")
    if options.auto_without and recipe.teacher.placement != AUTO:
        raise UserError(
            f"--auto-without is for teacher.placement auto, and the recipe says {recipe.teacher.placement}; leave out "
            "one of them"
        )
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
        commands.dry_run(recipe, tuple(options.auto_without))
    else:
        commands.train(recipe, options.resume, stops, tuple(options.auto_without))


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
    if options.lm_eval_include is not None and options.lm_eval is None:
        raise UserError(f"--lm-eval-include {options.lm_eval_include}: names tasks for --lm-eval, which is not given")
    with collections_paused():
        from distiller import commands

    # So that a checkpoint's exported student is removed again.
    stops.listen(is_training=False)
    gates = commands.make_gates(options.min, options.max)
    commands.evaluate(options.run_dir, options.overrides, gates, options.lm_eval, options.lm_eval_include)


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


def _report(options: argparse.Namespace, stops: StopSignals) -> None:
    # Not in `distiller.commands`, which imports torch: the page needs only what lies in the folders.
    from distiller.report.writing import report

    print(report(options.run_dirs, options.output))


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


HANDLERS = {
    "train": _train,
    "plan": _plan,
    "cache": _cache,
    "evaluate": _evaluate,
    "sample": _sample,
    "export": _export,
    "report": _report,
    "recipes": _recipes,
    "configs": _configs,
}
"""Command -> what runs it."""
