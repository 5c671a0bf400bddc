"""Classifiers: structure, weights under the module's names, the loss, norms, data, and whole runs in one process."""

from __future__ import annotations

import copy
import json
import math
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPConfig,
    Dinov2Config,
    EfficientNetConfig,
    LevitConfig,
    MobileNetV2Config,
    PoolFormerConfig,
)

from distiller import commands
from distiller.checkpoint.reading import CheckpointReader
from distiller.commands.gates import figures_of
from distiller.config.classification import ClassificationData
from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.tasks import open_task
from distiller.tasks.cost_figures import SIZE_FIGURES
from distiller.teachers.base import Request
from distiller.teachers.factory import open_teacher
from distiller.vision import evaluation
from distiller.vision.batch_norm import BatchNorm, num_groups, replace_batch_norm
from distiller.vision.files import Processor, find_classifier
from distiller.vision.group_norm_export import save_group_norm
from distiller.vision.labels import class_numbers
from distiller.vision.library import new_model
from distiller.vision.objective import cross_entropy, tempered_divergence
from distiller.vision.prediction_grid import prediction_grid
from distiller.vision.samples import Augmentation, PictureBatch, split_held_out
from distiller.vision.sources import open_pictures
from distiller.vision.structure import first_tensor, inspect_model
from distiller.vision.student import check_features
from distiller.vision.task import _num_channels
from distiller.vision.weight_files import stored_dtype
from tests import classifiers, toys
from tests.toy_network import setup

CONFIGS = {"resnet": classifiers.resnet_config, "vit": classifiers.vit_config}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    return classifiers.save_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def teachers(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    return {name: classifiers.save_classifier(folder / name, make()) for name, make in CONFIGS.items()}


@pytest.fixture
def make_data(teachers, pictures, tmp_path):
    def make(kind: str = "resnet", student: dict | None = None, **sections):
        small = {"depths": [1, 1]} if kind == "resnet" else {"num_hidden_layers": 2}
        config = CONFIGS[kind](**(small | (student or {})))
        return classifiers.recipe(tmp_path, teachers[kind], pictures, config, **sections)

    return make


def run(data: dict) -> Path:
    recipe = parse(data)
    commands.train(recipe, resume=False)
    return Path(recipe.output_dir)


class TestStructure:
    def test_layers_of_stages_and_of_a_list_are_blocks_in_their_order(self):
        resnet = inspect_model(classifiers.resnet_config(), (3, 32, 32))
        assert resnet.block_names == tuple(
            f"resnet.encoder.stages.{stage}.layers.{layer}"
            for stage, count in ((0, 2), (1, 3))
            for layer in range(count)
        )
        assert resnet.block_classes == ("ResNetBasicLayer",)
        assert resnet.block_shapes[0] == (8, 8, 8)
        assert resnet.block_shapes[-1] == (16, 4, 4)
        vit = inspect_model(classifiers.vit_config(), (3, 32, 32))
        assert vit.block_names == tuple(f"vit.layers.{number}" for number in range(4))
        assert set(vit.block_shapes) == {(17, 16)}
        assert (vit.can_recompute, resnet.can_recompute) == (True, False)

    def test_feature_pairs_of_tokens_have_as_many(self):
        small, large = (inspect_model(classifiers.vit_config(image_size=side), (3, side, side)) for side in (32, 64))
        wider = inspect_model(classifiers.vit_config(hidden_size=24), (3, 32, 32))
        check_features(wider, small, [0], [3])
        with pytest.raises(UserError, match=r"block 1 of the student gives \[17, 16\] .* teacher \[65, 16\]"):
            check_features(small, large, [1], [0])
        maps = inspect_model(classifiers.resnet_config(), (3, 32, 32))
        with pytest.raises(UserError, match=r"block 0 of the student gives \[17, 16\] .* teacher \[8, 8, 8\]"):
            check_features(small, maps, [0], [0])

    def test_feature_pairs_have_the_same_height_and_width(self):
        wide = inspect_model(classifiers.resnet_config(), (3, 32, 64))
        square = inspect_model(classifiers.resnet_config(), (3, 64, 64))
        check_features(wide, wide, [0, 4], [1, 3])
        with pytest.raises(UserError, match=r"block 0 of the student gives \[8, 8, 16\] .* teacher \[8, 16, 16\]"):
            check_features(wide, square, [0], [0])

    def test_tokens_are_the_positions_of_the_first_block(self, make_data):
        for kind, positions in (("resnet", 64), ("vit", 17)):
            task = open_task(parse(make_data(kind)))
            batch = task.collate([task.load_data(setup().ranks, None)[0, index] for index in range(3)])
            assert task.tokens(batch) == 3 * positions

    def test_a_grid_holds_pictures_of_any_size(self):
        small, wide = np.zeros((8, 6, 3), np.uint8), np.zeros((10, 40, 3), np.uint8)
        both = prediction_grid([small, wide], ["cat", "dog"], [0, None], {"student": [1, 0]})
        one = prediction_grid([wide, wide], ["cat", "dog"], [0, None], {"student": [1, 0]})
        assert both.size == one.size

    def test_a_picture_of_one_pixel_fills_its_place_in_a_grid(self):
        one, many = (
            prediction_grid([np.zeros((side, side, 3), np.uint8)], ["cat"], [0], {"student": [0]}) for side in (1, 8)
        )
        assert np.array_equal(np.asarray(one), np.asarray(many))

    def test_pictures_have_the_config_s_channels_or_three_where_it_names_none(self):
        assert _num_channels(classifiers.resnet_config(num_channels=1)) == 1
        assert _num_channels(CLIPConfig()) == 3

    def test_the_first_of_a_block_s_outputs_is_its_hidden_state(self):
        hidden, attention = torch.ones(1, 2), torch.zeros(1, 2)
        assert first_tensor((hidden, attention)) is hidden
        assert first_tensor(hidden) is hidden

    def test_a_model_whose_layers_hide_is_one_unit(self):
        assert inspect_model(PoolFormerConfig(), (3, 224, 224)).block_names == ()


class TestTeacher:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_answers_are_the_library_s_also_where_it_renames_what_it_saves(self, make_data, teachers, kind, dtype):
        task = open_task(parse(make_data(kind)))
        teacher = open_teacher(task.network, setup(dtype))
        pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        answers = teacher.predict([Request(tuple(range(5)), {"pixels": pixels}, ("logits", "features/1"))])[0]
        plain = AutoModelForImageClassification.from_pretrained(teachers[kind], dtype=dtype)
        kept = []
        plain.get_submodule(task.network.block_names("classifier")[1]).register_forward_hook(
            lambda module, args, output: kept.append(output)
        )
        with torch.no_grad():
            torch.testing.assert_close(answers["logits"], plain(pixels.to(dtype)).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(answers["features/1"], kept[0], rtol=1e-5, atol=1e-5)
        assert task.network.num_parameters() == sum(p.numel() for p in plain.parameters())

    @pytest.mark.parametrize(("said", "stored"), [("bfloat16", torch.float32), ("float32", torch.bfloat16)])
    def test_renamed_weights_are_copied_as_they_are_stored_whatever_the_config_says(
        self, make_data, tmp_path, said, stored
    ):
        folder = classifiers.save_classifier(tmp_path / "said", classifiers.vit_config())
        weights = {name: value.to(stored) for name, value in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": said}))
        network = open_task(parse(make_data("vit", teacher={"path": str(folder)}))).network
        copied = load_file(network.weight_files("classifier")[0])
        assert {value.dtype for value in copied.values()} == {stored}
        name = "classifier.weight"
        assert torch.equal(copied[name], weights[name])

    @pytest.mark.parametrize(
        ("stored", "expected"),
        [
            ([torch.bfloat16], torch.bfloat16),
            ([torch.float16, torch.int64], torch.float16),
            ([torch.float16, torch.bfloat16], torch.float32),
            ([torch.float32, torch.bfloat16], torch.float32),
            ([torch.float16, torch.float64], torch.float32),
        ],
    )
    def test_weights_are_copied_in_the_only_half_dtype_or_in_float32(self, tmp_path, stored, expected):
        """Also where each file has only one of them."""
        tensors = {str(number): torch.zeros(2, dtype=dtype) for number, dtype in enumerate(stored)}
        save_file(tensors, tmp_path / "all.safetensors")
        for name, tensor in tensors.items():
            save_file({name: tensor}, tmp_path / f"{name}.safetensors")
        assert stored_dtype([tmp_path / "all.safetensors"]) == expected
        assert stored_dtype([tmp_path / f"{name}.safetensors" for name in tensors]) == expected

    def test_weights_of_another_config_are_refused(self, make_data, tmp_path):
        folder = classifiers.save_classifier(tmp_path / "mixed", classifiers.vit_config())
        classifiers.vit_config(num_hidden_layers=5).save_pretrained(folder)
        task = open_task(parse(make_data("vit", teacher={"path": str(folder)})))
        with pytest.raises(UserError, match=r"its weights lack vit\.layers\.4"):
            task.network.weight_files("classifier")


class TestLoss:
    @pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 4.0, 10.0])
    def test_values_and_gradients_are_those_of_float64(self, temperature):
        generator = torch.Generator().manual_seed(0)
        student, teacher = (8 * torch.randn(16, 10, generator=generator) for _ in range(2))

        def reference(ours):
            ours, theirs = (torch.log_softmax(x.double() / temperature, -1) for x in (ours, teacher))
            return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1)

        results = []
        for function in (lambda x: tempered_divergence(x, teacher, temperature), reference):
            logits = student.clone().requires_grad_()
            values = function(logits)
            values.sum().backward()
            results.append((values.detach().double(), logits.grad.double()))
        (ours, our_gradient), (theirs, their_gradient) = results
        assert torch.isfinite(our_gradient).all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * temperature**2)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=2e-6 * max(1.0, temperature))

    def test_a_teacher_that_is_the_student_costs_nothing(self):
        logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
        assert tempered_divergence(logits, logits, 4.0).abs().max() <= 1e-5
        assert tempered_divergence(logits, logits, 4.0).dtype == torch.float32
        expected = -torch.log_softmax(logits.double(), -1)[torch.arange(4), torch.tensor([0, 2, 1, 1])]
        torch.testing.assert_close(
            cross_entropy(logits, torch.tensor([0, 2, 1, 1])).double(), expected, rtol=1e-5, atol=1e-6
        )


class TestNorms:
    def test_frozen_answers_as_eval_mode_and_trains_scale_and_shift(self):
        plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        plain[1].running_mean.normal_()
        pixels = torch.randn(4, 3, 5, 5)
        expected, names = plain.eval()(pixels), list(plain.state_dict())
        replace_batch_norm(plain, "frozen")
        assert isinstance(plain[1], BatchNorm)
        ours = plain.train()(pixels)
        torch.testing.assert_close(ours, expected)
        ours.sum().backward()
        assert plain[1].bias.grad is not None
        assert list(plain.state_dict()) == names
        assert int(plain[1].num_batches_tracked) == 0

    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_batch_is_the_library_s_layer(self, momentum):
        plain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, momentum=momentum))
        ours = copy.deepcopy(plain)
        replace_batch_norm(ours, "batch")
        for _ in range(3):
            pixels = torch.randn(4, 3, 5, 5)
            expected, answer = plain(pixels), ours(pixels)
            assert torch.equal(answer, expected)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in ours.state_dict().items())
        assert torch.equal(ours.eval()(pixels), plain.eval()(pixels))

    @pytest.mark.parametrize("kind", ["batch", "frozen"])
    def test_weights_in_bfloat16_are_used_beside_statistics_in_float32(self, kind, monkeypatch):
        """As ZeRO and FSDP2 leave them; a GPU's kernels would refuse the two together."""
        layers = nn.Sequential(nn.BatchNorm2d(8))
        replace_batch_norm(layers, kind)
        norm = layers[0]
        with torch.no_grad():
            norm.weight.uniform_(0.5, 2)
            norm.weight.data, norm.bias.data = norm.weight.to(torch.bfloat16), norm.bias.to(torch.bfloat16)
        pixels = torch.randn(4, 8, 5, 5).to(torch.bfloat16)
        given, library_s = [], F.batch_norm
        monkeypatch.setattr(F, "batch_norm", lambda *values: (given.extend(values), library_s(*values))[1])
        answer = layers.train()(pixels)
        assert answer.dtype == torch.bfloat16
        answer.float().square().mean().backward()
        assert norm.weight.grad is not None
        assert {tensor.dtype for tensor in given[1:5]} == {torch.float32}
        assert norm.running_mean.dtype == torch.float32
        assert torch.any(norm.running_mean != 0) == (kind == "batch")

    def test_groups_divide_channels_and_hold_four_at_least(self):
        assert [num_groups(count) for count in (3, 4, 8, 24, 36, 64, 128, 1024)] == [1, 1, 2, 6, 9, 16, 32, 32]


class TestData:
    def test_the_processor_s_numbers_are_the_library_s(self, teachers):
        picture = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
        ours = Processor(teachers["vit"], 3, "teacher")(picture)
        plain = AutoImageProcessor.from_pretrained(teachers["vit"], backend="pil")
        assert np.array_equal(ours, plain(Image.fromarray(picture))["pixel_values"][0])

    @pytest.mark.parametrize("height", [1, 3])
    def test_few_rows_of_pixels_are_not_taken_for_channels(self, teachers, height):
        colour = np.array([10, 100, 200], np.uint8)
        process = Processor(teachers["vit"], 3, "teacher")
        flat, square = (process(np.broadcast_to(colour, (rows, 50, 3)).copy()) for rows in (height, 50))
        assert np.array_equal(flat, square)

    def test_augmentation_is_a_function_of_seed_epoch_and_sample(self):
        picture = np.arange(40 * 60 * 3, dtype=np.uint32).reshape(40, 60, 3)
        how = Augmentation("crop-flip", 0.5)
        keys = [(seed, epoch, sample) for seed in (0, 1) for epoch in (0, 1) for sample in range(20)]
        parts = {key: how.apply(picture, *key) for key in keys}
        assert all(np.array_equal(how.apply(picture, *key), part) for key, part in parts.items())
        # The whole picture may come twice.
        assert len({part.tobytes() for part in parts.values()}) >= len(keys) - 4
        areas = [part.shape[0] * part.shape[1] / (40 * 60) for part in parts.values()]
        assert min(areas) > 0.45
        assert max(areas) <= 1
        assert {bool(part[0, 0, 0] > part[0, -1, 0]) for part in parts.values()} == {True, False}
        flat = Augmentation("crop", 0.5)
        assert all(flat.apply(picture, *key)[0, 0, 0] < flat.apply(picture, *key)[0, -1, 0] for key in keys)

    def test_crops_of_the_smallest_pictures_have_a_row_and_a_column(self):
        picture, how = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3), Augmentation("crop", 0.05)
        shapes = {how.apply(picture, 0, 0, sample).shape[:2] for sample in range(50)}
        assert shapes == {(1, 1), (1, 2), (2, 1), (2, 2)}
        thin = {how.apply(picture[:1], 0, 0, sample).shape[:2] for sample in range(50)}
        assert thin == {(1, 1), (1, 2)}

    def test_crops_are_recorded(self):
        """Others would change every run's trajectory. Each is named by its size and the number of its first pixel."""
        picture = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60, 1)
        crops = [Augmentation("crop-flip", 0.2).apply(picture, 3, 1, sample) for sample in range(4)]
        assert [(*crop.shape[:2], int(crop[0, 0, 0])) for crop in crops] == RECORDED_CROPS

    def test_a_link_to_nothing_is_one_line(self, pictures, tmp_path):
        folder = shutil.copytree(pictures, tmp_path / "mine")
        (folder / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
        with pytest.raises(UserError, match=r"data.path: \S*gone.png cannot be read \(No such file"):
            open_pictures(ClassificationData(path=str(folder)))

    def test_the_held_out_share_of_each_class_is_always_the_same(self):
        classes = [0] * 10 + [1] * 20 + [2] * 5
        trained, held_out = split_held_out(classes, 0.2)
        assert [sum(classes[place] == number for place in held_out) for number in range(3)] == [2, 4, 1]
        assert sorted([*trained, *held_out]) == list(range(35))
        assert split_held_out(classes, 0.2) == (trained, held_out)
        # Which ones, as they have always been.
        assert sorted(held_out) == [3, 4, 19, 20, 21, 22, 33]
        assert (trained[:4], held_out[:4]) == ([28, 14, 34, 6], [4, 21, 3, 22])

    def test_the_first_so_many_are_of_all_classes(self, make_data):
        classes = [0] * 100 + [1] * 100 + [2] * 100
        for places in split_held_out(classes, 0.5):
            assert min(sum(classes[place] == number for place in places[:30]) for number in range(3)) >= 5
        task = parse_task(make_data(data={"max_samples": 12}))
        assert {task._source.training.label(number) for number in range(12)} == {0, 1, 2}

    def test_a_large_data_set_is_split_in_one_pass(self):
        started = time.perf_counter()
        split_held_out(list(range(4000)) * 10, 0.2)
        # One pass for each class took twenty seconds.
        assert time.perf_counter() - started < 10

    def test_classes_are_matched_by_name(self):
        assert class_numbers(["owl", "cat"], classifiers.LABELS, "data") == [2, 0]
        assert class_numbers(["a", "b"], ("LABEL_0", "LABEL_1"), "data") == [0, 1]
        # In the order of folders: LABEL_10 is the second.
        labels = tuple(f"LABEL_{number}" for number in range(11))
        assert class_numbers(sorted(labels), labels, "data") == [0, 1, 10, *range(2, 10)]
        assert class_numbers(["LABEL_2"], labels, "data") == [2]
        for names, labels, words in (
            (["cow"], classifiers.LABELS, "'cow' is none of the teacher's"),
            (["a"], ("LABEL_0", "LABEL_1"), "1 classes and the teacher 2"),
            (["crane"], ("crane", "crane"), "2 of the teacher's"),
            (["cow"], [f"kind {number}" for number in range(10)], r"'kind 8', 'kind 9'; rename"),
            (["cow"], [f"kind {number}" for number in range(11)], r"'kind 8', 'kind 9', \.\.\.; rename"),
        ):
            with pytest.raises(UserError, match=words):
                class_numbers(names, labels, "data")

    def test_pictures_stand_upright_and_keep_their_greys(self, tmp_path):
        (tmp_path / "cat").mkdir()
        ramp = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
        Image.fromarray(ramp).save(tmp_path / "cat" / "grey.png")
        lying = np.zeros((20, 40, 3), np.uint8)
        lying[:, :10] = 255
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        Image.fromarray(lying).save(tmp_path / "cat" / "lying.png", exif=exif)
        opened = open_pictures(ClassificationData(path=str(tmp_path)))
        assert np.array_equal(opened.read(0, 1)[..., 0], np.rint(ramp / 257))
        assert np.array_equal(opened.read(0, 3)[..., 2], np.rint(ramp / 257))
        upright = opened.read(1, 3)
        assert upright.shape == (40, 20, 3)
        assert (upright[:10].min(), upright[10:].max()) == (255, 0)

    def test_a_saved_data_set_holds_the_folder_s_pictures(self, pictures, tmp_path):
        import datasets

        loaded = datasets.load_dataset("imagefolder", data_dir=str(pictures), cache_dir=str(tmp_path / "cache"))
        loaded.save_to_disk(str(tmp_path / "saved"))
        ours = open_pictures(ClassificationData(kind="datasets", path=str(tmp_path / "saved")))
        theirs = open_pictures(ClassificationData(path=str(pictures)))
        assert ours.class_names == theirs.class_names
        assert list(ours.classes) == list(theirs.classes)
        assert all(np.array_equal(ours.read(i, 3), theirs.read(i, 3)) for i in range(len(ours.classes)))
        other = loaded["train"].map(lambda row: {"thumbnail": row["image"]})
        other.save_to_disk(str(tmp_path / "two"))
        of = lambda column: ClassificationData(kind="datasets", path=str(tmp_path / "two"), image_column=column)  # noqa: E731
        one, two = (open_pictures(of(column)) for column in ("image", "thumbnail"))
        assert one.contents() != two.contents()
        assert one.names != two.names
        for changes, words in (
            ({"split": "x"}, "there are train"),
            ({"image_column": "x"}, "there are image, label"),
            ({"label_column": "image"}, "is no ClassLabel"),
            ({"image_column": "label"}, "holds no images"),
            ({"path": str(pictures)}, "save_to_disk"),
        ):
            with pytest.raises(UserError, match=words):
                open_pictures(ClassificationData(**{"kind": "datasets", "path": str(tmp_path / "saved"), **changes}))


RECORDED_CROPS = [(34, 42, 289), (40, 44, 50), (37, 48, 234), (35, 31, 149)]


class TestRuns:
    def test_a_run_leaves_the_contract_s_files_and_is_evaluated(self, make_data, capsys):
        data = make_data(train={"ema_decay": 0.9}, data={"augmentation": "crop-flip"})
        folder = run(data)
        assert "student.batch_norm is batch" in capsys.readouterr().out
        assert {path.name for path in folder.iterdir()} == {
            "checkpoints", "environment.json", "inputs.json", "metrics.jsonl", "recipe.yaml", "report.html",
            "samples.png", "student", "summary.json",
        }  # fmt: skip
        line = toys.read_metrics(folder)[0]
        assert line["loss"] == pytest.approx(0.5 * line["loss/labels"] + 0.5 * line["loss/distillation"], rel=1e-6)
        student = AutoModelForImageClassification.from_pretrained(folder / "student")
        assert student.config.id2label == dict(enumerate(classifiers.LABELS))
        assert AutoImageProcessor.from_pretrained(folder / "student", backend="pil").size["height"] == 32
        shapes = CheckpointReader(folder / "checkpoints" / "step-6").progress.shapes
        name = "resnet.embedder.embedder.normalization"
        assert {f"model.{name}.running_mean", f"model.{name}.num_batches_tracked"} <= shapes.keys()
        state = load_file(folder / "student" / "model.safetensors")
        # Six updates; and running statistics that have moved, if as slowly as their average.
        assert int(state[f"{name}.num_batches_tracked"]) == 6
        assert state[f"{name}.running_mean"].abs().max() > 1e-4
        commands.evaluate(folder, [])
        report = json.loads((folder / "summary.json").read_text())["evaluation"]
        assert set(figures_of(report)) == set(parse_task(data).figures())
        assert report["student_parameters"] == sum(parameter.numel() for parameter in student.parameters())
        assert report["num_samples"] == 6
        assert report["size_ratio"] > 1
        assert 0 <= report["agreement"] <= 1
        picture = Path(data["data"]["path"]) / "cat" / "000.png"
        commands.sample(folder, [], [str(picture)], 0, folder / "mine.png")
        with pytest.raises(UserError, match="picture files"):
            commands.sample(folder, [], ["a cat"], 0, folder / "mine.png")

    def test_commands_end_the_threads_of_their_teacher(self, make_data):
        data, disk = make_data(train={"max_steps": 1}), ["teacher.placement=disk"]
        folder, before = run(data), set(threading.enumerate())
        commands.evaluate(folder, disk)
        assert set(threading.enumerate()) <= before
        commands.sample(folder, disk, [str(Path(data["data"]["path"]) / "cat" / "000.png")], 0, folder / "mine.png")
        assert set(threading.enumerate()) <= before

    @pytest.mark.parametrize("is_last", [False, True])
    def test_pixels_have_the_memory_format_that_is_asked_for(self, make_data, is_last):
        task: Any = parse_task(make_data(task={"channels_last": is_last}))
        batch, cpu = task.example(2), torch.device("cpu")
        for pixels in (task.to_device(batch, cpu).pixels, task._placing(cpu)(batch.pixels)):
            assert pixels.is_contiguous(memory_format=torch.channels_last) == is_last

    def test_a_student_with_group_norm_is_loaded_as_such_or_refused(self, make_data):
        data = make_data()
        data["student"]["batch_norm"] = "group"
        folder = run(data)
        with pytest.raises(ValueError, match="trust_remote_code"):
            AutoModelForImageClassification.from_pretrained(folder / "student", trust_remote_code=False)
        loaded = AutoModelForImageClassification.from_pretrained(folder / "student", trust_remote_code=True)
        assert not any(isinstance(layer, nn.BatchNorm2d) for layer in loaded.modules())
        pixels = torch.randn(2, 3, 32, 32)
        from distiller.vision.student import load_student

        ours = load_student(folder, open_task(parse(data))._plan, torch.device("cpu"))
        with torch.no_grad():
            assert torch.equal(loaded.eval()(pixels).logits, ours(pixel_values=pixels).logits)

    def test_with_group_norm_tensors_have_the_module_s_names_also_where_the_library_renames(self, tmp_path):
        """As it does for ViT: under the type of our own nothing would rename them back."""
        model = new_model(classifiers.vit_config()).eval()
        save_group_norm(model, tmp_path)
        assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path, trust_remote_code=True)
        pixels = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(loaded(pixels).logits, model(pixels).logits)

    def test_pictures_of_the_user_s_are_shown_with_the_classes_that_both_predict(
        self, make_data, teachers, pictures, tmp_path
    ):
        """More pictures than there are classes."""
        data = make_data("vit")
        student = classifiers.save_classifier(
            tmp_path / "finished" / "student", classifiers.vit_config(num_hidden_layers=2), seed=1
        )
        files = sorted(pictures.glob("*/00[01].png"))
        output = tmp_path / "mine.png"
        parse_task(data).sample(student.parent, [str(file) for file in files], 0, torch.device("cpu"), output)
        shown = [np.asarray(Image.open(file)) for file in files]
        pixels = AutoImageProcessor.from_pretrained(student, backend="pil")(shown, return_tensors="pt").pixel_values
        predictions = {}
        for name, folder in (("teacher", teachers["vit"]), ("student", student)):
            with torch.no_grad():
                logits = AutoModelForImageClassification.from_pretrained(folder)(pixels).logits
            predictions[name] = [int(row.argmax()) for row in logits]
        expected = prediction_grid(shown, classifiers.LABELS, [None] * len(shown), predictions)
        assert np.array_equal(np.asarray(Image.open(output)), np.asarray(expected))

    def test_a_student_with_dropout_answers_alike_in_training(self, make_data, capsys):
        # Attention's own rate is no nn.Dropout.
        student = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
        data = make_data("vit", student=student, train={"max_steps": 1})
        model = open_task(parse(data)).build_student().train()
        pixels = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(model(pixels)[0], model(pixels)[0])
        exported = json.loads((run(data) / "student" / "config.json").read_text())
        said = "trains without dropout (hidden_dropout_prob, attention_probs_dropout_prob)"
        assert said in capsys.readouterr().out
        assert exported["attention_probs_dropout_prob"] == exported["hidden_dropout_prob"] == 0

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_the_student_is_float32_whatever_its_config_says(self, make_data, kind):
        plain = open_task(parse(make_data(kind))).build_student().state_dict()
        task = open_task(parse(make_data(kind, student={"dtype": "bfloat16"})))
        ours = task.build_student().state_dict()
        assert all(torch.equal(ours[name], value) for name, value in plain.items())
        skeleton = task.student_skeleton().state_dict()
        assert {name: value.dtype for name, value in skeleton.items()} == {
            name: value.dtype for name, value in plain.items()
        }

    def test_a_teacher_without_weights_is_trained_once(self, make_data, tmp_path, fresh, capsys):
        bare = tmp_path / "bare"
        classifiers.resnet_config().save_pretrained(bare)
        (bare / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        data = make_data(teacher={"path": str(bare)})
        with pytest.raises(UserError, match=r"holds no model\.safetensors.*teacher_training\.max_steps"):
            parse_task(data)
        data["teacher_training"] = {"max_steps": 4, "batch_size": 8}
        run(data)
        assert "teacher trained for 4 updates" in capsys.readouterr().out
        fresh()
        run(data | {"output_dir": str(tmp_path / "again")})
        assert "reusing" in capsys.readouterr().out
        (folder,) = (tmp_path / "cache").glob("teacher-*/")
        # It is a whole model of the library, which others may use.
        assert AutoImageProcessor.from_pretrained(folder, backend="pil").size["height"] == 32

    def test_opening_the_task_reads_no_picture_and_writes_nothing(self, make_data, tmp_path, monkeypatch):
        bare = tmp_path / "bare"
        classifiers.resnet_config().save_pretrained(bare)
        (bare / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        monkeypatch.setattr("distiller.vision.sources.contents_digest", _refuse)
        data = make_data(teacher={"path": str(bare)}, teacher_training={"max_steps": 4})
        commands.check(parse(data), None)
        task = parse_task(data)
        assert not (tmp_path / "cache").exists()
        assert not Path(data["output_dir"]).exists()
        with pytest.raises(AssertionError, match="reads every picture"):
            task.missing_stage(torch.float32)

    def test_a_teacher_under_another_key_is_named(self, make_data, tmp_path, capsys, monkeypatch):
        bare = tmp_path / "bare"
        classifiers.resnet_config().save_pretrained(bare)
        (bare / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        trained = parse_task(make_data(teacher={"path": str(bare)}, teacher_training={"max_steps": 4}))._trained
        with pytest.raises(UserError, match="give the cache_dir"):
            trained.weight_files()
        old = tmp_path / "cache" / "teacher-0123456789abcdef"
        old.mkdir(parents=True)
        (old / "key.json").write_text("{}")
        with pytest.raises(UserError, match="teacher-0123456789abcdef was made by an older version, by another recipe"):
            trained.weight_files()
        monkeypatch.setattr(type(trained), "_train", lambda self, ranks: self.stage.partial.mkdir() or _finish(self))
        trained.train_once(toys.ALONE)
        said = capsys.readouterr().out.splitlines()
        assert "teacher-0123456789abcdef was made by an older version" in said[0]
        assert said[0].startswith("note: ")
        assert said[0].endswith("so the teacher is trained anew")
        assert said[1:] == ["trained"]

    def test_a_dry_run_trains_its_teacher_for_as_few_updates(self, make_data, tmp_path, capsys):
        bare = tmp_path / "bare"
        classifiers.resnet_config().save_pretrained(bare)
        (bare / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        data = make_data(teacher={"path": str(bare)}, teacher_training={"max_steps": 400, "batch_size": 8})
        commands.dry_run(parse(data))
        assert "teacher trained for 3 updates" in capsys.readouterr().out
        assert not list((tmp_path / "cache").glob("teacher-*"))

    def test_keys_know_the_pictures_and_not_who_wrote_the_config(self, make_data, pictures, tmp_path):
        bare, mine = tmp_path / "bare", shutil.copytree(pictures, tmp_path / "mine")
        classifiers.resnet_config().save_pretrained(bare)
        (bare / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        data = make_data(teacher={"path": str(bare)}, teacher_training={"max_steps": 4}, data={"path": str(mine)})

        def keys() -> tuple[Path, dict]:
            task = parse_task(data)
            return task._trained.missing_folder, task.cached_inputs(torch.float32)

        before = keys()
        config = json.loads((bare / "config.json").read_text())
        (bare / "config.json").write_text(
            json.dumps(config | {"transformers_version": "9.9", "dtype": "float16", "_name_or_path": "me"})
        )
        assert keys() == before
        Image.fromarray(np.zeros((36, 40, 3), np.uint8)).save(mine / "cat" / "000.png")
        after = keys()
        assert after[0] != before[0]
        assert after[1]["pictures"] != before[1]["pictures"]

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    def test_a_teacher_with_weights_is_not_trained_over(self, make_data, teachers, tmp_path, name):
        folder = tmp_path / "with"
        shutil.copytree(teachers["resnet"], folder)
        (folder / "model.safetensors").rename(folder / name)
        data = make_data(teacher={"path": str(folder)}, teacher_training={"max_steps": 4})
        with pytest.raises(UserError, match=rf"has weights already \({name}\).*remove teacher_training"):
            parse_task(data)

    def test_a_config_that_names_no_class_is_of_the_type_s_first(self):
        """LeViT has two, of which the library chooses by name."""
        config = LevitConfig(image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1])
        assert type(new_model(config)).__name__ == "LevitForImageClassification"

    def test_weights_are_found_on_the_hub_too(self, tmp_path, monkeypatch):
        classifiers.resnet_config().save_pretrained(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        local = find_classifier(str(tmp_path), None, None, Processor(tmp_path, 3, "teacher"))
        hub = replace(local, repository=("owner/name", None))
        below = replace(hub, subfolder="sub")
        names = ["README.md", "sub/model.safetensors"]
        monkeypatch.setattr("distiller.vision.files.listed_files", lambda *_: frozenset(names))
        assert [files.found_weights() for files in (local, hub, below)] == [None, None, "model.safetensors"]
        asked = []
        monkeypatch.setattr("distiller.vision.files.download", lambda *arguments: asked.append(arguments[-1]))
        monkeypatch.setattr("distiller.vision.files.check_weights", lambda *_: None)
        below.fetch()
        assert asked == [["sub/*.safetensors", "sub/*.json"]]

    def test_a_repository_of_a_config_alone_is_refused_unless_its_teacher_is_trained(
        self, make_data, tmp_path, monkeypatch
    ):
        classifiers.resnet_config().save_pretrained(tmp_path / "bare")
        (tmp_path / "bare" / "preprocessor_config.json").write_text(json.dumps(classifiers.PROCESSOR))
        monkeypatch.setattr("distiller.storage.hub.snapshot_download", lambda *_, **__: str(tmp_path / "bare"))
        monkeypatch.setattr("distiller.vision.files.listed_files", lambda *_: frozenset(["config.json"]))
        with pytest.raises(UserError, match=r"owner/name: holds no weights in model\.safetensors"):
            parse_task(make_data(teacher={"path": "owner/name"}))
        assert parse_task(make_data(teacher={"path": "owner/name"}, teacher_training={"max_steps": 4}))._trained

    def test_a_gate_is_missed_below_it_and_without_a_figure(self, make_data):
        task = parse_task(make_data(evaluation={"min_accuracy_ratio": 0.9}))
        assert task.missed_gate({"accuracy_ratio": 0.9}) is None
        assert "reaches 89.0% of the teacher's held-out accuracy" in task.missed_gate({"accuracy_ratio": 0.89})
        assert "evaluation.min_accuracy_ratio is 90.0% and" in task.missed_gate({"accuracy_ratio": None})
        assert parse_task(make_data()).missed_gate({"accuracy_ratio": 0.0}) is None

    def test_accuracies_and_agreement_are_shares_of_the_pictures(self, monkeypatch):
        """Five pictures in two batches; their two channels are the classes that the teacher and the student name."""
        monkeypatch.setattr(evaluation, "MIN_TIMED_S", 0.0)
        labels, pixels = torch.tensor([0, 1, 2, 2, 0]), torch.tensor([[0, 0], [1, 1], [2, 0], [0, 0], [0, 2]])

        def logits(pixels: torch.Tensor, channel: int) -> torch.Tensor:
            return F.one_hot(pixels[:, channel, 0, 0].long(), 3).float()

        def answer(requests: list[Request]) -> list[dict[str, torch.Tensor]]:
            return [{"logits": logits(request.inputs["pixels"], 0)} for request in requests]

        def student(pixel_values: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=logits(pixel_values, 1))

        teacher: Any = SimpleNamespace(predict=answer)
        pixels = pixels[..., None, None].float()
        parts = [PictureBatch(tuple(ids), pixels[list(ids)], labels[list(ids)]) for ids in (range(3), range(3, 5))]
        report = evaluation.compare(teacher, cast(Any, student), parts, lambda pixels: pixels)
        left_out = ("_per_s", "speed_ratio", "likelihood", "calibration")
        assert {name: figure for name, figure in report.items() if not any(word in name for word in left_out)} == {
            "num_samples": 5, "student_accuracy": 0.4, "teacher_accuracy": 0.8, "accuracy_ratio": 0.5,
            "agreement": 0.6, "batch_size": 3,
        }  # fmt: skip
        assert {*report, *SIZE_FIGURES} == set(evaluation.figure_names(3))

    def test_the_first_so_many_pictures_are_compared_in_batches(self, make_data):
        held_out = parse_task(make_data())._source.held_out
        batches = list(evaluation.open_held_out(held_out, 5, 2, 0, setup().ranks))
        assert [batch.sample_ids for batch in batches] == [(0, 1), (2, 3), (4,)]
        assert [label for batch in batches for label in batch.labels.tolist()] == [held_out.label(i) for i in range(5)]

    @pytest.mark.parametrize(("pass_s", "num_passes"), [(0.25, 5), (0.0625, 8)])
    def test_speed_is_of_five_passes_or_of_as_many_as_half_a_second_holds(self, monkeypatch, pass_s, num_passes):
        """The first pass, which is slower, is not counted. The clock goes on in passes alone."""
        passes_s: list[float] = []
        monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: sum(passes_s)))
        speed = evaluation._pictures_per_s(
            lambda: passes_s.append(pass_s if passes_s else 8.0), torch.zeros(4, 3, 1, 1)
        )
        assert len(passes_s) == 1 + num_passes
        assert speed == 4 / pass_s

    def test_labels_alone_need_no_teacher(self, make_data):
        losses = {"distillation": {"alpha": 0.0}}
        folder = run(make_data(task={"losses": losses, "channels_last": True}))
        assert toys.read_metrics(folder)[0]["perf/teacher_ms"] is None
        assert math.isfinite(toys.read_metrics(folder)[-1]["loss"])


def _finish(trained):
    trained.stage.finish()
    return "trained"


def _refuse(*_):
    raise AssertionError("reads every picture")


def parse_task(data: dict):
    return open_task(parse(data))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"student": {"num_labels": 4}}, "4 classes and the teacher 3"),
            ({"student": {"id2label": {0: "dog", 1: "cat", 2: "owl"}}}, "class 0 is 'dog' and the teacher's 'cat'"),
            (
                {"student": {"id2label": {0: "cat", 1: "LABEL_1", 2: "dog"}}},
                "class 1 is 'LABEL_1' and the teacher's 'dog'",
            ),
            ({"student": {"num_channels": 1}}, "does not run on pictures of 3 x 32 x 32"),
            ({"train": {"gradient_checkpointing": True}}, "does not offer it"),
            ({"data": {"held_out": 0.99}}, "leaves nothing to train on"),
            ({"data": {"path": "nowhere"}}, "is not a folder"),
        ],
    )
    def test_what_does_not_fit_is_said(self, make_data, changes, words):
        with pytest.raises(UserError, match=words):
            parse_task(make_data(**changes))

    def test_features_of_weight_0_are_asked_of_nobody(self, make_data):
        features = {"weight": 0.0, "student_blocks": [7], "teacher_blocks": [99]}
        assert parse_task(make_data(task={"losses": {"features": features}})).wanted == ("logits",)

    @pytest.mark.parametrize(
        ("features", "words"),
        [
            ({"student_blocks": [2], "teacher_blocks": [0]}, "student_blocks names block 2; there are 2"),
            ({"student_blocks": [0], "teacher_blocks": [4]}, "as many positions"),
        ],
    )
    def test_features_that_do_not_match(self, make_data, features, words):
        with pytest.raises(UserError, match=words):
            parse_task(make_data(task={"losses": {"features": {"weight": 1.0, **features}}}))

    @pytest.mark.parametrize(
        ("kind", "way", "words"),
        [
            ("resnet", {"num_layers": 2}, "give student.depths"),
            ("resnet", {"depths": [1]}, "1 numbers and the teacher 2 stages"),
            ("resnet", {"depths": [1, 4]}, "lower it"),
            ("vit", {"num_layers": 9}, "has only 4"),
            ("vit", {"depths": [1]}, "no stages"),
        ],
    )
    def test_layers_that_the_teacher_has_not(self, make_data, kind, way, words):
        data = make_data(kind)
        data["student"] = way
        with pytest.raises(UserError, match=words):
            parse_task(data)

    @pytest.mark.parametrize(("kind", "way"), [("resnet", {"depths": [2, 3]}), ("vit", {"num_layers": 4})])
    def test_a_student_may_have_all_of_the_teacher_s_layers(self, make_data, kind, way):
        data = make_data(kind)
        data["student"] = way
        task = parse_task(data)
        assert task._plan.structure.block_names == task._files.structure.block_names

    def test_a_student_without_names_has_the_teacher_s(self, make_data):
        names = {f"LABEL_{number}": number for number in range(3)}
        task = parse_task(make_data(student={"id2label": {i: name for name, i in names.items()}, "label2id": names}))
        assert task._plan.config.id2label == dict(enumerate(classifiers.LABELS))
        assert task._plan.config.label2id == {name: number for number, name in enumerate(classifiers.LABELS)}

    def test_a_teacher_whose_names_are_not_of_its_classes_is_refused(self, make_data, teachers, tmp_path):
        folder = shutil.copytree(teachers["resnet"], tmp_path / "named")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "cat", "1": "dog", "3": "owl"}}))
        with pytest.raises(UserError, match=r"id2label names 3 classes and the model has 3; correct config\.json"):
            parse_task(make_data(teacher={"path": str(folder)}))

    @pytest.mark.parametrize("way", [{"num_layers": 2}, {"depths": [1]}])
    def test_a_config_without_a_number_of_layers_is_not_cut(self, make_data, tmp_path, way):
        config = MobileNetV2Config(image_size=32, depth_multiplier=0.25, **classifiers.NAMES)
        data = make_data(teacher={"path": str(classifiers.save_classifier(tmp_path / "mobilenet", config))})
        data["student"] = way
        with pytest.raises(UserError, match=r"has neither depths nor num_hidden_layers; give student\.config"):
            parse_task(data)

    def test_a_config_that_computes_its_number_of_layers_is_not_cut(self, make_data, tmp_path):
        """EfficientNet's takes any number, and goes on with its own."""
        sizes = {"width_coefficient": 0.1, "depth_coefficient": 0.5, "hidden_dim": 128, "image_size": 32}
        teacher = classifiers.save_classifier(tmp_path / "teacher", EfficientNetConfig(**sizes, **classifiers.NAMES))
        data = make_data(teacher={"path": str(teacher)})
        data["student"] = {"num_layers": 4}
        with pytest.raises(UserError, match=r"does not take other num_hidden_layers; give student\.config"):
            parse_task(data)

    def test_a_config_that_lists_its_stages_is_cut(self, make_data, tmp_path):
        """DINOv2's is one of a backbone too."""
        values = {
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        }
        teacher = classifiers.save_classifier(tmp_path / "dinov2", Dinov2Config(**values, **classifiers.NAMES))
        data = make_data("vit", teacher={"path": str(teacher)})
        data["student"] = {"num_layers": 2}
        assert parse_task(data)._plan.config.num_hidden_layers == 2

    def test_a_processor_whose_inputs_differ_in_size(self, tmp_path):
        """It makes the shorter side 64 of pictures of 64 x 64, 48 x 96 and 300 x 200."""
        settings = classifiers.PROCESSOR | {"image_processor_type": "CLIPImageProcessor", "do_center_crop": False}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"size": {"shortest_edge": 64}}))
        with pytest.raises(UserError) as caught:
            Processor(tmp_path, 3, "teacher")
        assert "several sizes ([(3, 64, 64), (3, 64, 128), (3, 96, 64)]), which no batch" in str(caught.value)

    def test_a_folder_without_a_processor_or_of_another_kind(self, make_data, tmp_path):
        for content, words in (
            ({"model_type": "resnet"}, "no preprocessor_config"),
            ({"model_type": "nonsense"}, "transformers cannot read"),
            ({"a": 1}, "no model_type"),
            ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "describes BertForMaskedLM"),
        ):
            (tmp_path / "odd").mkdir(exist_ok=True)
            (tmp_path / "odd" / "config.json").write_text(json.dumps(content))
            with pytest.raises(UserError, match=words):
                parse_task(make_data(teacher={"path": str(tmp_path / "odd")}))


@pytest.mark.parametrize("size", [0, 60, -1])
def test_a_teacher_whose_file_is_cut_short_is_refused(tmp_path, pictures, size):
    folder = classifiers.save_classifier(tmp_path / "teacher", classifiers.resnet_config())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    recipe = parse(classifiers.recipe(tmp_path, folder, pictures, classifiers.resnet_config(depths=[1, 1])))
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete safetensors file .*; copy it again"):
        commands.check(recipe, None)
