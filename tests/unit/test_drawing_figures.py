"""What `evaluate` measures on finished drawings, against plain computations in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.linalg import sqrtm
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoImageProcessor,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

from distiller.commands.gates import figures_of
from distiller.config.loading import parse
from distiller.demo.digits import DigitJudge
from distiller.diffusion import drawing_measures
from distiller.diffusion.clip_score import Clip, ClipScores
from distiller.diffusion.drawing_distances import (
    Distances,
    JudgeFeatures,
    ModelFeatures,
    frechet_distance,
    kernel_distance,
)
from distiller.diffusion.drawing_figures import Recognised
from distiller.diffusion.seed_spread import with_spread
from distiller.errors import UserError
from distiller.tasks import open_task
from tests import classifiers, toys

CPU = torch.device("cpu")
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**VISION, "vocab_size": 14, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"image_size": 32, "patch_size": 8}


def pictures(count: int, seed: int, size: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def save(folder: Path, model: Any) -> Path:
    """With the processor of an image model."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
    return folder


def make(kind: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "clip":
            return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION | SMALL, projection_dim=12))
        if kind == "clip vision":
            return CLIPVisionModel(CLIPVisionConfig(**VISION, **SMALL))
        if kind == "vit":
            return ViTModel(ViTConfig(**VISION, **SMALL), add_pooling_layer=False)
        return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    folder = save(tmp_path_factory.mktemp("clip"), make("clip"))
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {word: i + 4 for i, word in enumerate(toys.WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def features(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(6, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.randn(count, 6, generator=generator, dtype=torch.float64) @ mixing + shift


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_frechet_distance_is_the_formula(shift):
    """Heusel et al. 2017, equation 6, with scipy's matrix square root."""
    teacher, student = features(80, 1), features(80, 2, shift)
    means = [one.mean(0).numpy() for one in (teacher, student)]
    covariances = [np.cov(one.numpy(), rowvar=False) for one in (teacher, student)]
    root = np.real(sqrtm(covariances[0] @ covariances[1]))
    expected = np.sum((means[0] - means[1]) ** 2) + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert frechet_distance(teacher, student) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(teacher, teacher) == pytest.approx(0, abs=1e-6)


def plain_kernel_distances(teacher: np.ndarray, student: np.ndarray, subset_size: int, seed: int) -> list[float]:
    """Binkowski et al. 2018, equation 4, with (x.y / D + 1)^3, of 100 pairs of subsets; loops over pairs of samples."""
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(100):
            x, y = (one[torch.randperm(len(one))[:subset_size].numpy()] for one in (teacher, student))

            def kernel(a: np.ndarray, b: np.ndarray) -> float:
                return (float(a @ b) / len(a) + 1) ** 3

            pairs = [(i, j) for i in range(subset_size) for j in range(subset_size)]
            inside = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j)
            across = sum(kernel(x[i], y[j]) for i, j in pairs)
            found.append(inside / (subset_size * (subset_size - 1)) - 2 * across / subset_size**2)
    return found


def test_kernel_distance_is_the_estimate_over_subsets():
    teacher, student = features(14, 1), features(14, 2, 0.5)
    before = torch.random.get_rng_state()
    mean, std = kernel_distance(teacher, student, 5, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = plain_kernel_distances(teacher.numpy(), student.numpy(), 5, seed=4)
    assert (mean, std) == pytest.approx((np.mean(expected), np.std(expected)), rel=1e-9)


def test_distances_are_of_all_batches_with_subsets_of_half():
    judge = DigitJudge()
    shown = {"teacher": pictures(13, 1, 64), "student": pictures(13, 2, 64)}
    distances = Distances(JudgeFeatures(judge), seed=4)
    for part in (slice(0, 8), slice(8, 13)):
        distances.add({name: images[part] for name, images in shown.items()}, range(part.start, part.stop))
    cells = {
        name: images.astype(np.float64).mean(-1).reshape(-1, 8, 8, 8, 8).mean((2, 4)).reshape(-1, 64) / 255
        for name, images in shown.items()
    }
    assert JudgeFeatures(judge).num_features == 64
    teacher, student = (torch.from_numpy(one) for one in cells.values())
    found = distances.figures()
    assert found["fid"] == pytest.approx(frechet_distance(teacher, student), rel=1e-6)
    assert (found["kid"], found["kid_subset_std"]) == pytest.approx(kernel_distance(teacher, student, 6, 4), rel=1e-6)


@pytest.mark.parametrize(("count", "missing"), [(1, {"fid", "kid", "kid_subset_std"}), (3, {"kid", "kid_subset_std"})])
def test_too_few_drawings_have_no_distance(count, missing):
    distances = Distances(JudgeFeatures(DigitJudge()), seed=4)
    distances.add({"teacher": pictures(count, 1, 64), "student": pictures(count, 2, 64)}, range(count))
    assert {name for name, value in distances.figures().items() if value is None} == missing


@pytest.mark.parametrize("kind", ["clip", "clip vision", "vit", "resnet"])
def test_features_are_the_models_pooled_output(tmp_path, kind):
    model, images = make(kind).eval(), pictures(3, 1)
    folder = save(tmp_path / "model", model)
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(list(images), return_tensors="pt")
    with torch.no_grad():
        if kind == "clip":
            expected = model.visual_projection(model.vision_model(**pixels).pooler_output)
        elif kind == "vit":
            expected = model(**pixels).last_hidden_state.mean(1)
        elif kind == "resnet":
            expected = model(**pixels).last_hidden_state.mean((2, 3))
        else:
            expected = model(**pixels).pooler_output
    found = ModelFeatures(str(folder), CPU)
    assert found.num_features == expected.shape[1]
    assert found.compute(images).dtype == torch.float64
    torch.testing.assert_close(found.compute(images).float(), expected)


def test_a_model_that_lacks_weights_is_refused(tmp_path):
    folder = save(tmp_path / "model", make("vit"))
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "mlp" in name or "intermediate" in name)
    save_file(
        {name: value for name, value in weights.items() if name != lost}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match=r"lacks the weights .*; give a model that is whole"):
        ModelFeatures(str(folder), CPU)


def test_clip_score_is_the_mean_cosine_of_pictures_and_prompts(clip_folder):
    prompts = ["a red cat sits", "a blue dog", "a green bird flies a green bird flies a green bird"]
    shown = {"teacher": pictures(3, 1), "student": pictures(3, 2)}
    scores = ClipScores(Clip(str(clip_folder), CPU), prompts)
    for ids in (range(2), range(2, 3)):
        scores.add({name: images[list(ids)] for name, images in shown.items()}, ids)
    found = scores.figures()
    model, tokenizer = (
        CLIPModel.from_pretrained(clip_folder).eval(),
        PreTrainedTokenizerFast.from_pretrained(clip_folder),
    )
    processor = AutoImageProcessor.from_pretrained(clip_folder, backend="pil")
    for name, images in shown.items():
        cosines = []
        for image, prompt in zip(images, prompts, strict=True):
            texts = tokenizer([prompt], truncation=True, max_length=8, return_tensors="pt")
            pixels = processor([image], return_tensors="pt")
            with torch.no_grad():
                # The library's own similarity, without its temperature.
                outputs = model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"], **pixels)
            cosines.append(outputs.logits_per_image.double().item() / model.logit_scale.exp().item())
        assert found[f"{name}_clip_score"] == pytest.approx(100 * sum(cosines) / 3, rel=1e-4)


def test_recognised_is_a_share_of_the_drawings():
    class Brightness:
        """Sees the brightest channel."""

        def recognise(self, images: np.ndarray) -> np.ndarray:
            return images.mean((1, 2)).argmax(1)

    images = np.zeros((3, 4, 4, 3), dtype=np.uint8)
    images[[0, 1, 2], :, :, [0, 1, 1]] = 9
    judged: Any = Recognised(Brightness(), np.array([0, 1, 2]))  # type: ignore[arg-type]
    judged.add({"teacher": images[:2], "student": images[1:]}, range(2))
    judged.add({"teacher": images[2:], "student": images[:1]}, range(2, 3))
    assert judged.figures() == {"teacher_recognised": pytest.approx(2 / 3), "student_recognised": pytest.approx(1 / 3)}


def test_spread_has_means_and_deviations_of_every_depth():
    reports = [
        {"x": 1.0, "none": None, "flat": {"a": 1.0}, "deep": {"b": {"y": 4.0}}, "kid_subset_std": 1.0},
        {"x": 3.0, "none": None, "flat": {"a": 5.0}, "deep": {"b": {"y": 4.0}}, "kid_subset_std": 2.0},
    ]
    assert with_spread(reports[:1]) is reports[0]
    assert with_spread(reports) == {
        "x": 2.0, "x_std": pytest.approx(2**0.5), "none": None, "flat": {"a": 3.0},
        "flat_std": {"a": pytest.approx(8**0.5)}, "deep": {"b": {"y": 4.0, "y_std": 0.0}}, "kid_subset_std": 1.5,
    }  # fmt: skip


def test_a_student_is_measured_by_the_given_models(pipelines, tmp_path, clip_folder):
    given = {"num_samples": 5, "batch_size": 3, "seeds": 2, "features": str(clip_folder), "clip": str(clip_folder)}
    task: Any = open_task(parse(toys.recipe(tmp_path, pipelines[1], evaluation=given)))
    task.build_student().model.save_pretrained(tmp_path / "student")
    report = task.evaluate(tmp_path, torch.float32, CPU)
    figures = figures_of(report)
    assert set(figures) == set(task.figures())
    names = ("fid", "fid_std", "kid", "kid_std", "kid_subset_std", "student_clip_score_std", "teacher_clip_score")
    assert set(names) <= set(figures)
    assert figures["fid"] > 0
    assert -100 <= figures["student_clip_score"] <= 100
    # Another batch size is the same evaluation.
    whole = open_task(parse(toys.recipe(tmp_path, pipelines[1], evaluation=given | {"batch_size": 5})))
    again = figures_of(whole.evaluate(tmp_path, torch.float32, CPU))
    same = [name for name in figures if not name.endswith(("_ms", "_per_s", "speed_ratio"))]
    assert {name: again[name] for name in same} == pytest.approx({name: figures[name] for name in same}, rel=2e-3)


class TestChecks:
    @pytest.fixture
    def recipe_with(self, tmp_path):
        def make_recipe(**evaluation: Any) -> Any:
            return parse(toys.recipe(tmp_path, tmp_path / "pipeline", evaluation=evaluation))

        return make_recipe

    @pytest.mark.parametrize(
        ("removed", "words"),
        [
            ("config.json", "has no config.json; give a folder that transformers has saved a model into"),
            ("preprocessor_config.json", "has no preprocessor_config.json"),
            ("model.safetensors", "holds no weights in model.safetensors"),
        ],
    )
    def test_a_folder_without_a_whole_model_is_refused(self, recipe_with, tmp_path, clip_folder, removed, words):
        folder = Path(shutil.copytree(clip_folder, tmp_path / "model"))
        drawing_measures.check_measures(recipe_with(features=str(folder), clip=str(folder)))
        (folder / removed).unlink()
        for key in ("features", "clip"):
            with pytest.raises(UserError, match=f"evaluation.{key}: .*{words}"):
                drawing_measures.check_measures(recipe_with(**{key: str(folder)}))

    def test_clip_is_a_clip_model_with_a_tokenizer(self, recipe_with, tmp_path, clip_folder):
        folder = save(tmp_path / "vit", make("vit"))
        with pytest.raises(UserError, match=r"has no tokenizer_config\.json"):
            drawing_measures.check_measures(recipe_with(clip=str(folder)))
        shutil.copy(clip_folder / "tokenizer_config.json", folder)
        with pytest.raises(UserError, match="holds a model of type vit; give a folder of a CLIPModel"):
            drawing_measures.check_measures(recipe_with(clip=str(folder)))

    def test_without_the_library_distances_are_refused_or_left_out(self, recipe_with, clip_folder, monkeypatch, capsys):
        monkeypatch.setattr(drawing_measures, "has_library", lambda: False)
        with pytest.raises(UserError, match=r"features needs torchmetrics; pip install 'distiller\[evaluation\]'"):
            drawing_measures.check_measures(recipe_with(features=str(clip_folder)))
        judged = recipe_with(judge="digits")
        drawing_measures.check_measures(judged)
        assert drawing_measures.measured_names(judged) == ["teacher_recognised", "student_recognised"]
        drawing_measures.open_measures(judged, ["seven"], DigitJudge(), np.array([7]), CPU)
        assert capsys.readouterr().out.startswith("note: fid and kid of the drawings need torchmetrics; pip install")

    def test_too_few_drawings_are_said(self, recipe_with, capsys):
        made = drawing_measures.open_measures(
            recipe_with(judge="digits"), ["seven"] * 639, DigitJudge(), np.full(639, 7), CPU
        )
        assert (
            "fewer than about 640 drawings, ten for each of 64 features, and there are 639;" in capsys.readouterr().out
        )
        assert [type(one).__name__ for one in made(3)] == ["Recognised", "Distances"]
        drawing_measures.open_measures(recipe_with(judge="digits"), ["7"] * 640, DigitJudge(), np.full(640, 7), CPU)
        assert capsys.readouterr().out == ""
