"""The loop, AdamW and a resumed run beside a plain loop: every key of `optim` and `train`, on the smallest model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from distiller.config.loading import parse
from distiller.config.recipe import Recipe, RecipeOf
from distiller.errors import StoppedError
from tests import toy_causal_lm
from tests.beside_plain import (
    assert_named_tests_exist,
    assert_same,
    changes_key,
    keys_of,
    merged,
    nested,
    run,
    unique_rows,
)
from tests.plain_language import train_plainly
from tests.plain_loop import rate

SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
STEPS, STOPPED_AFTER = 6, 3
SCHEDULES = [
    {"optim.schedule": schedule, "optim.warmup_steps": warmup}
    for schedule in ("constant", "linear", "cosine")
    for warmup in (0, 2)
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "optim.lr": [{"optim.lr": 0.05}],
    "optim.betas": [{"optim.betas": betas} for betas in ((0.5, 0.9), (0.0, 0.99))],
    "optim.eps": [{"optim.eps": eps} for eps in (1e-8, 1e-2)],
    "optim.weight_decay": [{"optim.weight_decay": 2.0}],
    "optim.max_grad_norm": [{"optim.max_grad_norm": limit} for limit in (None, 0.01, 0.5)],
    "optim.schedule": SCHEDULES,
    "optim.warmup_steps": [{"optim.warmup_steps": 99}, {"optim.warmup_steps": STEPS, "optim.schedule": "linear"}],
    "optim.fused": [{"optim.fused": is_fused, "optim.weight_decay": 0.5} for is_fused in (True, False)],
    # Data of 10 rows: an epoch is 3 updates of 3 rows, and another row is left out each time.
    "train.max_steps": [{"train.max_steps": 4, "train.num_epochs": 1, "optim.schedule": "cosine"}],
    "train.num_epochs": [
        {"train.max_steps": None, "train.num_epochs": 2, "train.batch_size": 3, "optim.schedule": "linear"},
        {"train.max_steps": None, "train.num_epochs": 1, "train.batch_size": 5, "optim.schedule": "cosine"},
    ],
    "train.batch_size": [{"train.batch_size": 1}, {"train.batch_size": 10}],
    "train.gradient_accumulation_steps": [{"train.batch_size": 2, "train.gradient_accumulation_steps": 2}],
    "train.samples_per_update": [
        {"train.samples_per_update": 8, "train.batch_size": size, "optim.max_grad_norm": 0.3} for size in (2, 8)
    ],
    "train.ema_decay": [{"train.ema_decay": decay, "optim.schedule": "cosine"} for decay in (0.5, 0.99)],
    # These change no number on a CPU.
    "train.tf32": [{"train.tf32": True}],
    "train.mixed_precision": [{"train.mixed_precision": "no"}],
    "train.num_workers": [{"train.num_workers": 1}],
    "train.gradient_checkpointing": [{"train.gradient_checkpointing": True}],
}
LOOP_TESTS = "tests/unit/test_trainer.py"
ELSEWHERE = {
    "optim.max_bad_steps": f"{LOOP_TESTS}::test_too_many_bad_updates_in_a_row_end_the_run_before_another_one",
    "train.compile": "tests/unit/test_block_compilation.py::test_runs_are_the_same_with_compiled_blocks",
    "train.log_every": f"{LOOP_TESTS}::test_only_logged_steps_are_written_and_the_first_and_last_are",
}
"""Where a key is held that no plain loop can show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("reference-training")
    config = toy_causal_lm.llama_config(**SMALL, num_hidden_layers=2, tie_word_embeddings=False)
    toy_causal_lm.save_model(root / "teacher", config)
    toy_causal_lm.write_config(root / "student.json", toy_causal_lm.llama_config(**SMALL, num_hidden_layers=1))
    toy_causal_lm.write_texts(root / "texts.jsonl", num_documents=10)
    return root


def recipe_of(folder: Path, place: Path, changes: dict[str, Any]) -> Recipe:
    base = {
        "output_dir": str(place / "run"),
        "cache_dir": str(folder / "stages"),
        "task": {"kind": "causal_lm", "losses": {"alpha": 0.5}},
        "teacher": {"path": str(folder / "teacher")},
        "student": {"config": str(folder / "student.json")},
        "data": {
            "kind": "jsonl",
            "path": str(folder / "texts.jsonl"),
            "max_length": 16,
            "packing": False,
            "held_out": 0.0,
        },
        "train": {"max_steps": STEPS, "batch_size": 4, "log_every": 1},
        "optim": {"lr": 1e-2, "eps": 1e-5},
        "checkpoint": {"at_end": False},
    }
    return parse(merged(base, nested(changes)))


@pytest.mark.parametrize("changes", unique_rows(ROWS))
def test_the_product_is_the_plain_loop(folder, tmp_path, changes):
    recipe = recipe_of(folder, tmp_path, changes)
    ours = run(recipe)
    assert_same(ours, *train_plainly(recipe))
    assert ours.is_fused == recipe.optim.fused
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == recipe.train.tf32


class StopsAfter:
    """Asks for a stop once it has been looked at so many times, which the loop does before each update."""

    def __init__(self, num_updates: int) -> None:
        self._left = num_updates

    @property
    def requested(self) -> int:
        self._left -= 1
        return 0 if self._left >= 0 else signal.SIGTERM


@pytest.mark.parametrize(
    "changes", [SCHEDULES[1], SCHEDULES[3], SCHEDULES[4]], ids=lambda row: "-".join(map(str, row.values()))
)
def test_a_resumed_run_goes_on_at_the_rate_of_the_whole_one(folder, tmp_path, changes):
    """Stopped and continued it is the plain loop that nothing stops: rates, moments, order and average."""
    kept = {"train.ema_decay": 0.8, "optim.weight_decay": 0.5, "optim.max_grad_norm": 0.5}
    recipe = recipe_of(folder, tmp_path, changes | kept)
    with pytest.raises(StoppedError, match=f"at step {STOPPED_AFTER}"):
        run(recipe, stops=StopsAfter(STOPPED_AFTER))
    assert_same(run(recipe, resume=True), *train_plainly(recipe))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_that_is_made_longer_goes_on_at_the_longer_run_s_rate(folder, tmp_path, schedule):
    changes = {"optim.schedule": schedule, "optim.warmup_steps": 1, "checkpoint.at_end": True}
    short, long = (recipe_of(folder, tmp_path, changes | {"train.max_steps": last}) for last in (STOPPED_AFTER, STEPS))
    run(short)
    rates = [line["lr"] for line in run(long, resume=True).metrics]
    expected = [
        rate(long.optim, step, STOPPED_AFTER if step <= STOPPED_AFTER else STEPS) for step in range(1, STEPS + 1)
    ]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_every_key_has_a_row_that_changes_it():
    assert [key for key, rows in ROWS.items() if not any(changes_key(row, key) for row in rows)] == []
    keys = keys_of(RecipeOf, ("train", "optim"))
    held = ROWS.keys() | ELSEWHERE.keys()
    assert [key for key in keys if key not in held] == []
    assert held <= set(keys)
    assert_named_tests_exist(ELSEWHERE.values())
