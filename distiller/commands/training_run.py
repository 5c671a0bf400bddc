"""`distiller train` and `train --dry-run`: builds a run, trains, exports the student and writes summary.json."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from distiller.build import Finished, build, check_run
from distiller.checkpoint.format import SessionTotals
from distiller.checkpoint.schedule import most_at_once
from distiller.commands.closing_table import closing_table
from distiller.config.placements import AUTO, PLACEMENTS
from distiller.config.recipe import Recipe
from distiller.distributed.process import is_main_process, world_size
from distiller.distributed.rank_failure import is_lost_rank_error
from distiller.distributed.restart import RestartWatch, can_restart, restart_all
from distiller.distributed.shutdown import NO_STOP_SIGNALS, StopSignals
from distiller.errors import AgreedError, CheckpointError, RunError, StoppedError
from distiller.export import export_run
from distiller.launch.accelerator import resolve_accumulation
from distiller.launch.deepspeed import is_deepspeed_launch
from distiller.report.writing import update_report
from distiller.run_folder.environment import Session, append_session, describe_session
from distiller.run_folder.output_dir import SUMMARY_FILE
from distiller.storage.durable_writes import write_durably
from distiller.storage.folder_lock import remove_lock_file
from distiller.tasks.interfaces import Samplable
from distiller.training.loop import train as run_loop
from distiller.training.run import Outcome, Run
from distiller.training.tracking import GIB, last_metrics, metrics_of
from distiller.training.update_plan import last_step_of, plan_updates

DRY_RUN_STEPS = 3
FLOAT32_BYTES = 4
WRITER_PATIENCE_S = 120.0
"""How long a rank that fails by itself waits for the checkpoint that is being written."""


def train(recipe: Recipe, resume: bool, stops: StopSignals = NO_STOP_SIGNALS, excluded: tuple[str, ...] = ()) -> None:
    """Trains, exports the student, draws samples and writes summary.json, which marks the run as finished.

    StoppedError when a signal asks: in the loop with a checkpoint, elsewhere at once, since stages keep what is done.
    Where `teacher.placement: auto` chose a placement with which an update takes more memory than a GPU has, all ranks'
    processes are started again without it, if there is another.

    Args:
        excluded: placements that `auto` does not choose.
    """
    run_dir = Path(recipe.output_dir)
    run = build(recipe, resume, excluded=excluded)
    if isinstance(run, Finished):
        if is_main_process():
            print(f"{run_dir} is already finished ({run.steps} steps); nothing to do")
        return
    start_trackers(run, _record_session(run))
    try:
        with stops.deferring():
            if run.first_step <= run.last_step:
                outcome = _run_loop(run, stops, excluded)
            else:
                # The loop had ended, and what follows it was cut short.
                metrics = run.ranks.broadcast_from_main(lambda: last_metrics(run_dir))
                outcome = Outcome(metrics, SessionTotals(num_sessions=1))
            export_run(run)
    except AgreedError:
        # A failure that all ranks share must not cost the checkpoint that is being written.
        run.checkpoints.finish()
        raise
    except StoppedError as error:
        if error.is_agreed:
            _close(run)
        raise
    except Exception as error:
        # Nor must a failure of this rank alone. Its thread needs no other rank; rank 0's waits for the others' files.
        if not is_lost_rank_error(error):
            run.checkpoints.wait_for_writer(WRITER_PATIENCE_S)
        raise
    finally:
        run.tracker.close_bar()
    if isinstance(run.task, Samplable):
        run.task.write_samples(run_dir, run.sampling_teacher, run.accelerator)
        run.tracker.log_samples(run_dir, run.last_step)
    summary = None
    if run.accelerator.is_main_process:
        summary = _write_summary(run, outcome)
        if recipe.tracking.report:
            update_report(run_dir)
    _close(run)
    if summary is not None:
        print(closing_table(run_dir, summary, outcome.metrics), flush=True)
    if outcome.save_error is not None:
        raise CheckpointError(f"{outcome.save_error}; the student is complete, in {run_dir / 'student'}")


def _run_loop(run: Run, stops: StopSignals, excluded: tuple[str, ...]) -> Outcome:
    """The loop. Where the placement that `auto` chose does not work, this process is replaced in here."""
    is_chosen = run.recipe.teacher.placement == AUTO
    with closing(RestartWatch()) if is_chosen else nullcontext() as watch:
        try:
            return run_loop(run, stops)
        except Exception as error:
            if watch is not None:
                watch.restart_if_asked()
                watch.close()
                # A restart would forget the signal.
                if isinstance(error, RunError) and can_restart() and not stops.requested:
                    _try_another_placement(run, excluded, error)
            raise


def _try_another_placement(run: Run, excluded: tuple[str, ...], error: RunError) -> None:
    """Starts all ranks again if memory was used up at the start and `auto` has another placement to choose."""
    gpu_bytes, failed = run.planned_memory.teacher, run.placement
    others = [name for name in gpu_bytes if PLACEMENTS[name].is_auto_candidate and name not in (*excluded, failed)]
    # The choice goes by time; what takes as much memory as the one that failed would fail too.
    smaller = [name for name in others if gpu_bytes[name] < gpu_bytes.get(failed, math.inf)]
    if not error.out_of_memory_at_start or not smaller or failed in excluded:
        return
    newly_excluded = [failed, *(name for name in others if name not in smaller)]
    run.tracker.close_bar()
    what = str(error).partition(";")[0]
    restart_all(
        ["--resume", *(f"--auto-without={name}" for name in newly_excluded)],
        f"teacher.placement auto: {failed} takes more memory than was predicted ({what}); the run starts again "
        f"with another placement: {' or '.join(smaller)}",
    )


def start_trackers(run: Run, environment: Session | None = None) -> None:
    """Opens the trackers on rank 0; the others wait, or the first update's time would hold theirs. Communicates.

    `environment`: where this session runs, for the trackers' configuration.
    """
    run.ranks.all_succeed(lambda: run.tracker.start_trackers(run.recipe, environment))


def _record_session(run: Run) -> Session | None:
    """Adds this session to environment.json, on rank 0, which gets it back."""
    if not run.ranks.is_main:
        return None
    gpus = []
    if run.accelerator.device.type == "cuda":
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        gpus = [(gpu.name, gpu.total_memory) for gpu in found]
    cuda = torch.version.cuda
    session = describe_session(run.first_step, run.accelerator.num_processes, run.engine, gpus, cuda)
    # What the summary says at the end, for a run that is looked at before it, or that never comes to it.
    session |= {
        "placement": run.placement,
        "mixed_precision": run.mixed_precision,
        "student_params": run.student_parameters,
        "teacher_params": run.task.network.num_parameters(),
    }
    append_session(Path(run.recipe.output_dir), session)
    return session


def dry_run(recipe: Recipe, excluded: tuple[str, ...] = ()) -> None:
    """Builds everything, trains a few updates on as many samples, and prints what the whole run would take.

    `excluded`: placements that `auto` does not choose.
    """
    task = check_run(recipe, world_size(), is_deepspeed_launch())
    folder = Path(f"{recipe.output_dir}.dry-run")
    if is_main_process():
        shutil.rmtree(folder, ignore_errors=True)
    shortened = _shortened(recipe, folder)
    whole = plan_updates(recipe, task.num_samples, resolve_accumulation(recipe, world_size()), world_size())
    steps = last_step_of(recipe, whole)
    run = build(shortened, planned_updates=steps, excluded=excluded)
    assert isinstance(run, Run)
    metrics = run_loop(run).metrics
    if run.ranks.is_main:
        # The last updates ask the teacher for nothing where it is asked ahead; what they hold is counted.
        metrics |= {"perf/step_ms": metrics_of(folder, DRY_RUN_STEPS)["perf/step_ms"]}
    step_ms, peak = metrics["perf/step_ms"], metrics["memory/gpu_peak_gib_max"]
    if recipe.stage_updates is not None and shortened.stage_updates is not None:
        longer = recipe.stage_updates / shortened.stage_updates
    else:
        longer = whole.num_samples / run.plan.num_samples
    stages_h = run.stages_s / 3600 * longer
    memory = f"GPU peak {peak:.2f} GiB" if peak is not None else f"host {metrics['memory/host_rss_gib']:.2f} GiB a rank"
    run.accelerator.print(
        f"dry run: {step_ms:.0f} ms a step at step {DRY_RUN_STEPS}, {memory}; the whole run takes about "
        f"{stages_h:.2f} h before the loop and {steps * step_ms / 3.6e6:.2f} h for {steps} steps"
    )
    is_main, checkpoint_bytes = run.accelerator.is_main_process, run.checkpoints.total_bytes()
    _close(run)
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        print(disk_line(recipe, checkpoint_bytes, run.student_parameters * FLOAT32_BYTES))


def disk_line(recipe: Recipe, checkpoint_bytes: int, student_bytes: int) -> str:
    """One line that compares what a run keeps in its folder with what the disk has free; a warning where it is less.

    Beside the ones that are kept there is the one that is being written.
    """
    count = most_at_once(recipe.checkpoint)
    existing = Path(os.path.abspath(recipe.output_dir))
    while not existing.exists():
        existing = existing.parent
    needed, free = count * checkpoint_bytes + student_bytes, shutil.disk_usage(existing).free
    checkpoint, student = _format_bytes(checkpoint_bytes), _format_bytes(student_bytes)
    text = (
        f"a checkpoint takes {checkpoint} and the student {student}: {_format_bytes(needed)} with the {count} "
        f"checkpoints that are there at once, and {_format_bytes(free)} are free where output_dir is"
    )
    if needed <= free:
        return f"dry run: {text}"
    return f"warning: {text}; set checkpoint.keep lower, or output_dir to a folder on a larger disk"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _shortened(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with a few updates on as much data, which leaves nothing where the real run would write."""
    # A cache is that of the whole data, and the latents that belong to it lie where they were made.
    is_cached = recipe.teacher.placement == "cached"
    per_update = recipe.train.batch_size * world_size() * resolve_accumulation(recipe, world_size())
    num_updates = DRY_RUN_STEPS + recipe.teacher.prefetch_steps
    # A few documents may fill less than a row.
    is_whole = is_cached or not recipe.data.counts_samples
    # So does the teacher that a stage has trained.
    shortened = recipe if is_cached else recipe.with_short_stages(DRY_RUN_STEPS)
    return shortened.model_copy(
        update={
            "output_dir": str(folder),
            "cache_dir": str(recipe.stages_dir.primary) if is_cached else None,
            "data": recipe.data.model_copy(update={} if is_whole else {"max_samples": per_update * num_updates}),
            "train": recipe.train.model_copy(update={"max_steps": num_updates, "log_every": 1}),
            "checkpoint": recipe.checkpoint.model_copy(
                update={"every_steps": None, "every_minutes": None, "at_end": False, "keep_best": False}
            ),
            "evaluation": recipe.evaluation.model_copy(update={"every_steps": None, "sample_every_steps": None}),
            "tracking": recipe.tracking.model_copy(update={"trackers": ()}),
        }
    )


def _write_summary(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Writes the final figures, and returns them: of all sessions, but for memory, which is the last one's."""
    loss, took = outcome.metrics.get("loss"), replace(outcome.spent, wall_s=time.perf_counter() - run.started)
    spent = run.checkpoints.spent_before + took
    samples_per_s, error = outcome.metrics.get("perf/samples_per_s"), run.quantization_error
    if spent.timed_steps:
        samples_per_s = run.plan.samples_per_update * spent.timed_steps / spent.timed_s
    expected = run.expectation
    summary = {
        "steps": run.last_step,
        "final_loss": loss if loss is not None and math.isfinite(loss) else None,
        "samples_per_s": samples_per_s,
        "placement": run.placement,
        **{name: value for name, value in outcome.metrics.items() if name.startswith("memory/teacher_")},
        "teacher_quantization_error": None if error is None else error.relative,
        "teacher_quantization_figures": {} if error is None else error.bands | error.figures,
        "world_size": run.accelerator.num_processes,
        "engine": run.engine,
        "mixed_precision": run.mixed_precision,
        "student_params": run.student_parameters,
        "teacher_params": run.task.network.num_parameters(),
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None,
        "expected_gpu_peak_gib": None if expected is None else expected.peak_bytes / GIB,
        "expected_step_ms": None if expected is None else expected.step_ms,
        "failed_saves": spent.failed_saves,
        "held_out_loss": outcome.metrics.get("eval/loss"),
        "best": None if outcome.best is None else asdict(outcome.best),
        "evaluation": {},
        "wall_s": spent.wall_s,
        "sessions": spent.num_sessions,
    }
    write_durably(Path(run.recipe.output_dir) / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def _close(run: Run) -> None:
    """Frees the teacher, the folder's lock and the trackers. Communicates."""
    if run.teacher is not None:
        run.teacher.close()
    # Rank 0 may have drawn samples for an hour.
    run.ranks.barrier()
    if run.ranks.is_main:
        remove_lock_file(Path(run.recipe.output_dir))
    run.tracker.close()
