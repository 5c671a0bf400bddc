"""Students of task causal_lm: cut out of a teacher, saved, or new; and what is refused of recipes and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoConfig

from distiller import commands
from distiller.build import build_task
from distiller.config.loading import parse
from distiller.errors import UserError
from tests import toy_causal_lm
from tests.reference_cases import LANGUAGE_MODELS


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    configs = {"llama": toy_causal_lm.llama_config(), "gpt2": toy_causal_lm.gpt2_config()}
    return {name: toy_causal_lm.save_model(folder / name, config) for name, config in configs.items()}


@pytest.fixture
def task_of(teachers, tmp_path):
    def make(model: str = "llama", **sections: Any) -> Any:
        path = sections.pop("teacher_path", teachers[model])
        return build_task(parse(toy_causal_lm.recipe(tmp_path, path, **sections)))

    return make


def test_kept_layers_are_evenly_spaced_and_their_own(task_of, teachers):
    student = task_of(student={"num_layers": 3}).build_student().model
    teacher = AutoModelForCausalLM.from_pretrained(teachers["llama"])
    for ours, theirs in zip(student.model.layers, (teacher.model.layers[i] for i in (0, 2, 4)), strict=True):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert student.lm_head.weight is student.model.embed_tokens.weight


def test_saved_buffers_of_kept_layers_are_the_teacher_s(task_of, tmp_path):
    """DeepSeek-V3 chooses experts by a bias that is a buffer, not a parameter."""
    config = toy_causal_lm.deepseek_config(num_hidden_layers=3)
    folder = toy_causal_lm.save_model(tmp_path / "deepseek", config)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layers.2.mlp.gate.e_score_correction_bias"))
    weights[name] = torch.tensor([0.1, -0.2, 0.3, -0.4])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    student = task_of(teacher_path=folder, student={"num_layers": 2}).build_student().model
    assert torch.equal(student.model.layers[1].mlp.gate.e_score_correction_bias, weights[name])


def test_leading_dense_layers_stay_dense_and_the_others_mixtures(task_of, tmp_path):
    config = toy_causal_lm.deepseek_config(num_hidden_layers=6, first_k_dense_replace=3)
    folder = toy_causal_lm.save_model(tmp_path / "deepseek", config)
    student = task_of(teacher_path=folder, student={"num_layers": 3}).build_student().model
    # Of the teacher's layers 0, 2 and 5.
    assert [hasattr(layer.mlp, "experts") for layer in student.model.layers] == [False, False, True]


def test_a_tied_tensor_may_have_the_name_of_the_output_layer(task_of, tmp_path):
    task = task_of(student={"num_layers": 2})
    state = task.build_student().state_dict()
    (name,) = (name for name in state if name.endswith("embed_tokens.weight"))
    state.setdefault("model.lm_head.weight", state[name])
    del state[name]
    task.export(state, tmp_path / "student")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert torch.equal(exported.get_input_embeddings().weight, state["model.lm_head.weight"])


def test_a_tied_tensor_that_has_both_names_is_written_once(task_of, tmp_path):
    task = task_of(student={"num_layers": 2})
    state = {name: value.clone() for name, value in task.build_student().state_dict().items()}
    assert state.keys() >= {"model.lm_head.weight", "model.model.embed_tokens.weight"}
    task.export(state, tmp_path / "student")
    written = load_file(tmp_path / "student" / "model.safetensors")
    assert [name for name in written if "layers" not in name] == ["model.embed_tokens.weight", "model.norm.weight"]


def test_features_of_blocks_that_return_tuples(task_of, tmp_path):
    """Falcon's, GPT-Neo's, Bloom's and MPT's do."""
    values = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]}
    config = GPTNeoConfig(vocab_size=toy_causal_lm.VOCABULARY, max_position_embeddings=64, **values)
    folder = toy_causal_lm.save_model(tmp_path / "neo", config)
    features = {"weight": 1.0, "student_blocks": [0, 1], "teacher_blocks": [1, 3]}
    recipe = toy_causal_lm.recipe(
        tmp_path, folder, student={"num_layers": 2}, task={"losses": {"features": features}}, train={"max_steps": 1}
    )
    commands.train(parse(recipe), resume=False)


def test_all_of_a_teachers_parameters_are_counted(task_of, tmp_path):
    """Phi's output layer has a bias."""
    folder = toy_causal_lm.save_model(tmp_path / "phi", LANGUAGE_MODELS["phi"])
    network = task_of(teacher_path=folder).network
    assert network.num_parameters() == AutoModelForCausalLM.from_pretrained(folder).num_parameters()


@pytest.mark.parametrize("name", ["phi", "untied"])
def test_an_output_layer_without_data_is_as_the_one_that_is_read(task_of, tmp_path, name):
    """With a bias and without."""
    network = task_of(teacher_path=toy_causal_lm.save_model(tmp_path / name, LANGUAGE_MODELS[name])).network
    for dtype in (torch.float32, torch.bfloat16):
        planned, read = network.head_without_data(dtype), network.load_head(dtype, torch.device("cpu"))
        described = [
            [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in (head.weight, head.bias)]
            for head in (planned, read)
        ]
        assert described[0] == described[1]
        assert (described[0][1] is None) == (name != "phi")
        assert (planned.change, planned.ids) == (read.change, read.ids)
        assert network.head_bytes(dtype) == sum(tensor.nbytes for tensor in planned[:2] if tensor is not None)


def test_an_exported_student_has_the_teachers_chat_templates(task_of, teachers, tmp_path):
    folder = shutil.copytree(teachers["llama"], tmp_path / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}{{ messages }}"}
    tokenizer.save_pretrained(folder)
    task = task_of(teacher_path=folder, student={"num_layers": 2})
    task.export(task.build_student().state_dict(), tmp_path / "student")
    assert AutoTokenizer.from_pretrained(tmp_path / "student").chat_template == tokenizer.chat_template


def test_narrower_students_have_the_first_heads_and_channels(task_of, teachers):
    cut = {"num_layers": None, "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 16}
    student = task_of(student=cut).build_student().model
    teacher = AutoModelForCausalLM.from_pretrained(teachers["llama"])
    ours, theirs = student.model.layers[1].self_attn, teacher.model.layers[1].self_attn
    assert (student.config.num_key_value_heads, student.config.head_dim) == (1, 8)
    assert torch.equal(ours.q_proj.weight, theirs.q_proj.weight[:16, :24])
    assert torch.equal(ours.k_proj.weight, theirs.k_proj.weight[:8, :24])
    assert torch.equal(ours.o_proj.weight, theirs.o_proj.weight[:24, :16])


def test_the_same_student_on_every_rank_whatever_was_drawn_before(task_of, tmp_path):
    file = toy_causal_lm.write_config(tmp_path / "new.json", toy_causal_lm.llama_config(num_hidden_layers=1))
    task = task_of(student={"num_layers": None, "config": str(file)})
    first = task.build_student().state_dict()
    torch.rand(3)
    second = task.build_student().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_skeleton_has_what_is_trained(task_of):
    features = {"weight": 1.0, "student_blocks": [0], "teacher_blocks": [1]}
    task = task_of(student={"num_layers": 2}, task={"losses": {"features": features}})
    built = task.build_student()
    shapes = {name: tuple(value.shape) for name, value in built.named_parameters()}
    assert shapes == {name: tuple(value.shape) for name, value in task.student_skeleton().named_parameters()}
    assert task.student_skeleton().num_trained_parameters() == sum(value.numel() for value in built.parameters())
    assert task.block_classes == ("LlamaDecoderLayer",)


def test_a_body_saved_alone_and_tensors_that_the_library_ignores_are_read(task_of, teachers, tmp_path):
    """As GPT-2 lies on the hub: no `transformer.` before the names, and buffers that are none any more."""
    folder = toy_causal_lm.save_model(tmp_path / "old", toy_causal_lm.gpt2_config())
    state = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in state.items()}
    save_file(renamed | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "model.safetensors")
    task = task_of(teacher_path=folder, student={"num_layers": 2})
    model = task.build_student().model
    assert torch.equal(model.transformer.wte.weight, state["transformer.wte.weight"])


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"losses": {"divergence": {"temperature": 0}}}}, ["temperature", "given 0", "greater than 0"]),
        ({"task": {"losses": {"divergence": {"temperature": -1.0}}}}, ["temperature", "given -1.0"]),
        ({"task": {"losses": {"divergence": {"temperature": float("nan")}}}}, ["temperature", "nan"]),
        ({"task": {"losses": {"divergence": {"temperature": "2"}}}}, ["temperature", "'2'", "a number"]),
        ({"task": {"losses": {"divergence": {"kind": "kl"}}}}, ["divergence.kind", "'kl'", "forward_kl"]),
        ({"task": {"losses": {"divergence": {"beta": 1.5}}}}, ["beta", "1.5"]),
        ({"task": {"losses": {"divergence": {"skew": 1}}}}, ["skew", "less than 1"]),
        ({"task": {"losses": {"alpha": 1.1}}}, ["alpha", "1.1"]),
        ({"task": {"losses": {"prediction": {}}}}, ["unknown key", "task.losses.prediction"]),
        ({"task": {"losses": {"features": {"weight": 1.0}}}}, ["student_blocks is empty"]),
        (
            {"task": {"losses": {"features": {"weight": 1.0, "student_blocks": [2], "teacher_blocks": [0]}}}},
            ["student_blocks names block 2", "from 0 to 1"],
        ),
        ({"student": {"config": "x.json"}}, ["exactly one of student.config"]),
        ({"student": {"num_layers": 6}}, ["student.num_layers is 6", "only 5"]),
        ({"student": {"num_layers": None, "hidden_size": 64}}, ["student.hidden_size is 64", "only 32"]),
        ({"student": {"num_attention_heads": 3}}, ["num_attention_heads 3", "2 times as many"]),
        ({"student": {"num_layers": None, "config": "nosuch.json"}}, ["student.config", "does not exist"]),
        (
            {"student": {"num_layers": None, "path": "nosuch"}},
            ["student.path: nosuch", "neither a folder nor a hub id"],
        ),
        ({"teacher_path": "nosuch"}, ["teacher.path: nosuch", "neither a folder nor a hub id"]),
        ({"teacher_path": "package:nosuch/x.gguf"}, ["package nosuch is not installed"]),
        ({"data": {"max_length": 100}}, ["data.max_length is 100", "at most 64"]),
        ({"evaluation": {"sample_prompts": ["the cat", ""]}}, ["the prompt '' has no tokens"]),
        (
            {"evaluation": {"sample_prompts": ["the cat"], "max_new_tokens": 63}},
            ["max_new_tokens is 63 after a prompt of 2 tokens", "teacher reads at most 64"],
        ),
        ({"evaluation": {"max_new_tokens": 64}}, ["max_new_tokens is 64 after a prompt of", "at most 64"]),
    ],
    ids=str,
)
def test_recipes_that_are_refused(task_of, sections, words):
    with pytest.raises(UserError) as caught:
        task_of(**sections)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "unheard"}, ["model type unheard is none of transformers'"]),
        ({"model_type": "unheard", "auto_map": {"AutoConfig": "x.Y"}}, ["Python code", "task.trust_remote_code=true"]),
        ({"model_type": None}, ["names no model_type"]),
        ({"quantization_config": {"bits": 4}}, ["quantised"]),
        ({"hidden_size": "wide"}, ["not a valid config"]),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}},
            ["data.max_length is 32", "more than 16 tokens"],
        ),
        ({"vocab_size": 12}, ["embed_tokens.weight has shape [23, 32] in the weights and [12, 32] by its config.json"]),
    ],
    ids=str,
)
def test_teachers_that_are_refused_by_their_config(task_of, teachers, tmp_path, changes, words):
    import shutil

    folder = shutil.copytree(teachers["llama"], tmp_path / "changed")
    change_config(folder, **changes)
    with pytest.raises(UserError) as caught:
        task_of(teacher_path=folder)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize(
    ("removed", "words"),
    [("tokenizer*", ["no tokenizer"]), ("*.safetensors", ["no weights"]), ("config.json", ["config.json", "exist"])],
)
def test_incomplete_teachers_are_refused(task_of, teachers, tmp_path, removed, words):
    import shutil

    folder = shutil.copytree(teachers["llama"], tmp_path / "incomplete")
    for file in folder.glob(removed):
        file.unlink()
    with pytest.raises(UserError) as caught:
        task_of(teacher_path=folder)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_another_tokenizer_is_refused_by_its_first_token_that_differs(task_of, tmp_path):
    words = list(toy_causal_lm.WORDS)
    words[4], words[5] = words[5], words[4]
    other = toy_causal_lm.make_tokenizer(tuple(words))
    folder = toy_causal_lm.save_model(tmp_path / "other", toy_causal_lm.llama_config(), tokenizer=other)
    with pytest.raises(UserError, match="id 7 is 'old' and the teacher's 'green'"):
        task_of(student={"num_layers": None, "path": str(folder)})


OWN_CONFIG = """from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
OWN_MODEL = """from transformers import LlamaForCausalLM

from .own_config import OwnConfig


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
OWN_TOKENIZER = """from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def write_own_code(folder: Path) -> Path:
    """Beside a saved Llama: its classes as Python files, and none of the library's names in its descriptions."""
    for name, text in (("config", OWN_CONFIG), ("model", OWN_MODEL), ("tokenizer", OWN_TOKENIZER)):
        (folder / f"own_{name}.py").write_text(text)
    names = {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    change_config(folder, model_type="own_llama", auto_map=names)
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return folder


def test_code_of_a_models_folder_runs_where_it_is_trusted(task_of, tmp_path):
    folder = write_own_code(toy_causal_lm.save_model(tmp_path / "own"))
    with pytest.raises(UserError, match=r"task\.trust_remote_code=true"):
        task_of(teacher_path=folder)
    trusting = {"task": {"trust_remote_code": True}}
    task = task_of(teacher_path=folder, **trusting)
    assert type(task.files.tokenizer).__name__ == "OwnTokenizer"
    student = task_of(student={"num_layers": None, "path": str(folder)}, **trusting).build_student()
    assert type(student.model).__name__ == "OwnModel"
    other = (folder / "config.json").rename(folder / "student.json")
    with pytest.raises(UserError, match=r"student\.config: \S+student.json: .* must be called config.json"):
        task_of(student={"num_layers": None, "config": str(other)}, **trusting)


def test_fused_heads_are_not_cut(task_of):
    with pytest.raises(UserError, match=r"student.hidden_size: the teacher's transformer.*give num_layers alone"):
        task_of("gpt2", student={"num_layers": None, "hidden_size": 16})
