"""Ranks tokenise once between them, and every update holds the same rows however many ranks there are."""

import json
import os
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from distiller.data.order import RankSampler, UpdatePlan
from distiller.language.data.batch import collate, count
from distiller.language.data.source import LanguageSource
from tests.distributed.ranks import on_ranks
from tests.toy_language import byte_level, language_recipe

UPDATES = 6


def _updates(folder: Path, world_size: int, accumulation_steps: int) -> dict[str, object]:
    rank = int(os.environ.get("RANK", "0"))
    recipe = language_recipe(folder, kind="jsonl", path=str(folder / "texts.jsonl"), max_length=32)
    source = LanguageSource(recipe, folder / "tokenizer")
    plan = UpdatePlan(source.num_samples, 8 // (world_size * accumulation_steps), accumulation_steps, world_size, 5)
    sampler = RankSampler(plan, rank, 0, UPDATES)
    loader = DataLoader(source.load(), batch_sampler=sampler, collate_fn=partial(collate, pad_id=source.pad_id))
    batches = list(loader)
    rows = [[(i, ids[:n].tolist(), labels[:n].tolist()) for i, ids, labels, n in _rows(batch)] for batch in batches]
    firsts = range(0, len(rows), accumulation_steps)
    steps = [list(chain.from_iterable(rows[first : first + accumulation_steps])) for first in firsts]
    counts = [count(batch) for batch in batches]
    return {"steps": steps, "count": sum(counts), "digest": source.data_digest, "samples": source.num_samples}


def _rows(batch):
    return zip(batch.sample_ids, batch.input_ids, batch.labels, batch.lengths, strict=True)


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps({"text": f"document {number} " * (1 + number % 9)}) for number in range(80)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    byte_level(tmp_path / "tokenizer")
    return tmp_path


def test_updates_hold_the_same_rows_on_one_rank_and_on_two(folder):
    ours = on_ranks(2, _updates, folder, 2, 2)
    theirs = _updates(folder, 1, 1)
    assert ours[0]["digest"] == ours[1]["digest"] == theirs["digest"]
    assert ours[0]["samples"] == ours[1]["samples"] == theirs["samples"]
    assert ours[0]["count"] + ours[1]["count"] == theirs["count"]
    together = [sorted(a + b) for a, b in zip(ours[0]["steps"], ours[1]["steps"], strict=True)]
    assert together == [sorted(step) for step in theirs["steps"]]
    assert len(list((folder / "cache").glob("tokens-*"))) == 1
