"""Answers `accelerate config`'s questions by program, and returns the file that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import cluster


def answer(monkeypatch: pytest.MonkeyPatch, file: Path, answers: Mapping[str, str]) -> Path:
    """Writes the file of a questionnaire in which a question that contains a key gets its answer, others the default.

    Every key must be asked for: an answer to a question that this Accelerate no longer has is no test.
    """
    unused = dict(answers)

    def find(question: str) -> str | None:
        key = next((key for key in answers if key in question), None)
        if key is not None:
            unused.pop(key, None)
        return None if key is None else answers[key]

    def ask_field(question: str, convert: Callable[[str], Any] | None = None, default: Any = None, **_: Any) -> Any:
        given = find(question)
        if given is None:
            return default
        return given if convert is None else convert(given)

    def ask_options(
        question: str, options: list[Any], convert: Callable[[Any], Any] | None = None, default: int = 0
    ) -> Any:
        given = find(question)
        index = default if given is None else [str(option) for option in options].index(given)
        return index if convert is None else convert(index)

    monkeypatch.setattr(cluster, "_ask_field", ask_field)
    monkeypatch.setattr(cluster, "_ask_options", ask_options)
    config = cluster.get_cluster_input()
    assert not unused, f"not asked: {sorted(unused)}"
    config.to_yaml_file(file)
    return file


MULTI_GPU = {"Which type of machine": "multi-GPU", "How many GPU(s)": "2"}
DEEPSPEED = {**MULTI_GPU, "Do you want to use DeepSpeed?": "yes"}
FSDP = {**MULTI_GPU, "Do you want to use FullyShardedDataParallel?": "yes"}
QUESTIONNAIRES: dict[str, dict[str, str]] = {
    "single": {"Which type of machine": "No distributed training"},
    "ddp": MULTI_GPU,
    "ddp-bf16": {**MULTI_GPU, "mixed precision": "bf16"},
    **{f"zero{stage}": {**DEEPSPEED, "ZeRO optimization stage": str(stage)} for stage in (1, 2, 3)},
    "zero2-offload": {**DEEPSPEED, "ZeRO optimization stage": "2", "Where to offload optimizer": "cpu"},
    # It asks about offload of parameters for every stage; DeepSpeed has it for stage 3 only.
    "zero2-parameters": {**DEEPSPEED, "ZeRO optimization stage": "2", "Where to offload parameters": "cpu"},
    # Return, where class names are asked for, is an empty text.
    "fsdp1": {**FSDP, "FSDP version": "1", "layer class names": ""},
    "fsdp2": {**FSDP, "layer class names": ""},
    "zero3-offload": {
        **DEEPSPEED,
        "ZeRO optimization stage": "3",
        "Where to offload optimizer": "cpu",
        "Where to offload parameters": "cpu",
        "gradient accumulation": "4",
        "use gradient clipping": "yes",
        "gradient clipping value": "0.5",
        "deepspeed.zero.Init": "yes",
    },
}
