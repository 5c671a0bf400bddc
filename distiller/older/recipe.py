"""Translates the older flags into a recipe: each becomes a key or gives a notice, none is ignored. No torch.

docs/MIGRATING.md has the table.
"""

from __future__ import annotations

from typing import Any

from distiller.errors import UserError
from distiller.older.flags import LEARNING_RATE, NUM_EPOCHS, STRATEGIES, Flags
from distiller.older.launch import Launch

WEIGHT_DECAY = 0.01
"""The default of torch's AdamW, which the older trainer used."""
SAMPLING_STEPS = 20
"""Denoising steps, for pictures that the teacher draws and for samples."""
ROLLOUT_BATCHES = 4
"""Training batches that the rollout draws at once; without a backward pass it keeps no activations."""
MAX_SAMPLES = 10
"""Prompts that samples are drawn for, at most."""


def translate(flags: Flags, launch: Launch) -> tuple[dict[str, Any], list[str]]:
    """(The recipe as a mapping, notices to print). `student.config` is the path that the flag gives.

    Raises:
        UserError: flags contradict each other, or name a rank that does not exist.
    """
    notices = [
        f"the teacher first draws one picture a prompt in {SAMPLING_STEPS} steps, and the student learns around those; "
        "the older trainer's random latents are rollout.enabled: false in a recipe"
    ]
    train: dict[str, Any] = {
        "batch_size": flags.batch_size,
        "mixed_precision": _mixed_precision(flags, launch, notices),
        "gradient_checkpointing": flags.gradient_checkpointing,
        "num_workers": flags.num_workers,
    }
    if flags.num_steps is None:
        train["num_epochs"] = flags.num_epochs or NUM_EPOCHS
    else:
        train["max_steps"] = flags.num_steps
        if flags.num_epochs is not None:
            notices.append(f"--num_steps {flags.num_steps} wins over --num_epochs {flags.num_epochs}")
    teacher_keys = _teacher_place(flags, launch)
    if teacher_keys["placement"] == "auto":
        taken = "balanced (two GPUs or more)" if launch.num_gpus >= 2 else "cpu (fewer than two GPUs)"
        notices.append(f"teacher.placement auto chooses by what fits; the older trainer's would have taken {taken}")
    recipe: dict[str, Any] = {
        "output_dir": flags.output_dir,
        "task": {"num_frames": 1}
        | ({} if flags.image_size is None else {"height": flags.image_size, "width": flags.image_size}),
        "sampling": {"num_inference_steps": SAMPLING_STEPS, "guidance_scale": 1.0},
        "rollout": {"enabled": True, "batch_size": ROLLOUT_BATCHES * flags.batch_size},
        "teacher": {"path": flags.teacher_path, **teacher_keys, "dtype": flags.teacher_dtype},
        "student": {"config": flags.student_config},
        "data": {"kind": "prompts", "path": flags.data_path},
        "train": train,
        "optim": {"lr": _learning_rate(flags), "weight_decay": WEIGHT_DECAY},
    }
    if flags.sample_prompts:
        recipe["evaluation"] = {"sample_prompts": flags.sample_prompts[:MAX_SAMPLES]}
    notices += _about_samples(flags)
    return recipe, notices


def _teacher_place(flags: Flags, launch: Launch) -> dict[str, Any]:
    """Keys `placement` and `rank` of `teacher`. Without a flag: `replicated` for one process, `auto` for several."""
    given: dict[str, tuple[str, int]] = {}
    if flags.teacher_device_strategy is not None:
        placement = STRATEGIES[flags.teacher_device_strategy]
        given[f"--teacher_device_strategy {flags.teacher_device_strategy}"] = (placement, 0)
    if flags.teacher_on_cpu:
        given["--teacher_on_cpu"] = ("cpu", 0)
    if flags.share_teacher:
        given["--share_teacher"] = ("cpu", 0)
    if flags.balanced_teacher:
        given["--balanced_teacher"] = ("balanced", 0)
    if flags.teacher_rank is not None:
        given[f"--teacher_rank {flags.teacher_rank}"] = ("rank0", flags.teacher_rank)
        if flags.teacher_rank >= launch.world_size:
            ranks = "one process runs, rank 0" if launch.world_size == 1 else f"ranks go to {launch.world_size - 1}"
            raise UserError(f"--teacher_rank is {flags.teacher_rank} and {ranks}; name a rank that runs")
    if len(set(given.values())) > 1:
        listed = " and ".join(f"{flag} ({_place_in_words(*place)})" for flag, place in given.items())
        raise UserError(f"given {listed}; the teacher lives in one place: remove all but one")
    placement, rank = next(iter(given.values()), ("replicated" if launch.world_size == 1 else "auto", 0))
    return {"placement": placement, "rank": rank} if placement == "rank0" else {"placement": placement}


def _place_in_words(placement: str, rank: int) -> str:
    return f"on rank {rank}" if placement == "rank0" else f"placement {placement}"


def _mixed_precision(flags: Flags, launch: Launch, notices: list[str]) -> str:
    """The value of `train.mixed_precision`. May add to `notices`."""
    if flags.mixed_precision is True:
        if launch.num_gpus:
            return "fp16"
        notices.append("--mixed_precision alone means fp16, which needs a GPU: training in float32")
        return "no"
    if flags.mixed_precision is None:
        # A recipe must not contradict the launch file. Without one float32, as in the older trainer.
        return "no" if launch.precision == "no" else "auto"
    return str(flags.mixed_precision)


def _learning_rate(flags: Flags) -> float:
    if None not in (flags.lr, flags.learning_rate) and flags.lr != flags.learning_rate:
        raise UserError(
            f"given --lr {flags.lr:g} and --learning_rate {flags.learning_rate:g}, which mean the same; remove one"
        )
    return flags.lr or flags.learning_rate or LEARNING_RATE


def _about_samples(flags: Flags) -> list[str]:
    """At most one notice: about flags for samples, which are now drawn in another way."""
    parts = []
    if flags.sample_interval is not None:
        key = "evaluation.sample_every_steps"
        parts.append(f"--sample_interval {flags.sample_interval} has no counterpart but {key} in a recipe")
    if flags.sample_dir is not None:
        parts.append(f"--sample_dir {flags.sample_dir} gets a copy")
    if flags.sample_prompts and len(flags.sample_prompts) > MAX_SAMPLES:
        parts.append(f"of {len(flags.sample_prompts)} --sample_prompts the first {MAX_SAMPLES} are drawn")
    return [f"samples.png is drawn once, at the end, by teacher and student: {'; '.join(parts)}"] if parts else []
