"""A language model as a teacher in every place of memory, on two gloo ranks whose batches are of different length."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distiller.config.placements import PLACEMENTS
from distiller.language.model.files import find_model
from distiller.language.network import FEATURES, HIDDEN, LanguageNetwork
from distiller.teachers import Outputs, Request
from distiller.teachers.factory import open_teacher
from tests import toy_causal_lm
from tests.distributed.ranks import on_ranks
from tests.toy_network import setup

pytestmark = pytest.mark.timeout(300)
OPTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"ring_blocks": 2},
    "custom": {"device_map": {"": 0, "layers.1": "cpu", "layers.2": "disk"}},
    "sharded": {"offload": "cpu"},
}
PLACES = [name for name in PLACEMENTS if name != "cached"]
"""All that ask a model."""
MODELS = {
    "llama": toy_causal_lm.llama_config(),
    "untied": toy_causal_lm.llama_config(tie_word_embeddings=False, num_hidden_layers=3),
    "gpt2": toy_causal_lm.gpt2_config(),
}


def network_of(folder: Path) -> LanguageNetwork:
    return LanguageNetwork(find_model("teacher", str(folder), None, None, folder, trusts_code=False))


def requests_of(rank: int) -> list[Request]:
    """Two micro-batches; no two ranks have rows of the same padded length."""
    requests = []
    for lengths in ([5 + 11 * rank, 3], [20 - 9 * rank]):
        batch = toy_causal_lm.batch_of(lengths, first_id=10 * rank)
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        requests.append(Request(batch.sample_ids, inputs, (HIDDEN, f"{FEATURES}1")))
    return requests


def flat(outputs: list[Outputs]) -> list[np.ndarray]:
    return [one[name].float().flatten().numpy() for one in outputs for name in sorted(one)]


def answers_of_places(folder: Path) -> dict[str, Any]:
    from accelerate import PartialState

    rank, results = PartialState(cpu=True).process_index, {}
    for placement in PLACES:
        for model in MODELS:
            options = dict(OPTIONS.get(placement, {}))
            if model == "gpt2" and placement == "custom":
                options["device_map"] = {"": 0, "h.1": "cpu"}
            try:
                teacher = open_teacher(network_of(folder / model), setup(placement=placement, **options))
                results[placement, model] = [flat(teacher.predict(requests_of(rank))) for _ in range(2)]
                teacher.close()
            except Exception:
                results[placement, model] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("language")
    for name, config in MODELS.items():
        toy_causal_lm.save_model(root / name, config)
    return root


@pytest.fixture(scope="module")
def answered(folder):
    return on_ranks(2, answers_of_places, folder, timeout_s=240)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("placement", PLACES)
def test_every_place_answers_as_the_library_does(answered, folder, placement, model):
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder / model).eval()
    for rank, results in enumerate(answered):
        result = results[placement, model]
        assert not isinstance(result, str), f"rank {rank}:\n{result}"
        expected = []
        for request in requests_of(rank):
            with torch.no_grad():
                outputs = whole(**request.inputs, use_cache=False, output_hidden_states=True)
                last = whole.base_model(**request.inputs, use_cache=False).last_hidden_state
            # hidden_states[0] is the embedding; GPT-2's last one is behind the final norm, as its last state is.
            captured = outputs.hidden_states[2] if whole.config.num_hidden_layers > 2 else None
            expected += [captured, last]
        for answers in result:
            for mine, theirs in zip(answers, expected, strict=True):
                if theirs is not None:
                    assert np.abs(mine - theirs.flatten().numpy()).max() <= 5e-6
