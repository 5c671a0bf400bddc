"""The older trainer's flags: what they become, what is said about them, and what is refused in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from diffusers import WanTransformer3DModel

from distiller.config.loading import parse
from distiller.errors import UserError
from distiller.older.flags import make_parser, read_flags
from distiller.older.launch import Launch, LocalRankError, check_launcher
from distiller.older.recipe import translate
from distiller.older.run import main
from distiller.older.student import is_older, translate_student
from distiller.run_folder.inputs import with_absolute_paths
from distiller.storage.yaml_files import parse_yaml
from tests import toys

ROOT = Path(__file__).parents[2]
NEEDED = ["--teacher_path", "T", "--student_config", "S", "--data_path", "D"]
OLDER = {
    "model_type": "WanLiteStudent",
    "hidden_size": 24,
    "depth": 2,
    "num_heads": 2,
    "num_channels": 4,
    "image_size": 32,
    "patch_size": 16,
    "text_max_length": 77,
    "text_encoder_output_dim": toys.TEXT_DIM,
    "projection_factor": 1.0,
}


def launched(world_size: int = 1, **changes: Any) -> Launch:
    known = {"is_launched": world_size > 1, "local_rank": 0, "precision": "no", "num_gpus": 0}
    return Launch(**{**known, **changes}, world_size=world_size)


def translated(*flags: str, launch: Launch | None = None) -> tuple[dict[str, Any], list[str]]:
    """The valid recipe, as plain data with every default, and the notices."""
    data, notices = translate(read_flags([*NEEDED, *flags]), launch or launched())
    return parse(data).model_dump(), notices


def value(recipe: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part]
    return recipe


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "keys"),
        [
            (
                "",
                {
                    "output_dir": "./outputs",
                    "teacher.path": "T",
                    "teacher.placement": "replicated",
                    "teacher.dtype": "float32",
                    "student.config": "S",
                    "data.path": "D",
                    "data.kind": "prompts",
                    "train.batch_size": 2,
                    "train.num_epochs": 10,
                    "train.max_steps": None,
                    "train.mixed_precision": "no",
                    "train.gradient_checkpointing": False,
                    "train.num_workers": 0,
                    "train.samples_per_update": None,
                    "optim.lr": 1e-5,
                    "optim.schedule": "constant",
                    "rollout.enabled": True,
                    "rollout.batch_size": 8,
                    "sampling.num_inference_steps": 20,
                },
            ),
            ("--output_dir ./outputs/wan_t2i", {"output_dir": "./outputs/wan_t2i"}),
            ("--batch_size 1", {"train.batch_size": 1, "rollout.batch_size": 4}),
            ("--num_epochs 100", {"train.num_epochs": 100}),
            ("--num_steps 7", {"train.max_steps": 7, "train.num_epochs": None}),
            ("--num_steps 7 --num_epochs 2", {"train.max_steps": 7, "train.num_epochs": None}),
            ("--lr 3e-4", {"optim.lr": 3e-4}),
            ("--learning_rate 3e-4", {"optim.lr": 3e-4}),
            ("--lr 3e-4 --learning_rate 0.0003", {"optim.lr": 3e-4}),
            ("--num_workers 3", {"train.num_workers": 3}),
            ("--gradient_checkpointing", {"train.gradient_checkpointing": True}),
            ("--mixed_precision no", {"train.mixed_precision": "no"}),
            ("--mixed_precision bf16", {"train.mixed_precision": "bf16"}),
            ("--mixed_precision fp16", {"train.mixed_precision": "fp16"}),
            ("--teacher_dtype float16", {"teacher.dtype": "float16"}),
            ("--teacher_dtype torch.float16", {"teacher.dtype": "float16"}),
            ("--teacher_dtype fp16", {"teacher.dtype": "float16"}),
            ("--teacher_dtype bfloat16", {"teacher.dtype": "bfloat16"}),
            ("--teacher_dtype torch.bfloat16", {"teacher.dtype": "bfloat16"}),
            ("--teacher_dtype bf16", {"teacher.dtype": "bfloat16"}),
            ("--teacher_dtype fp32", {"teacher.dtype": "float32"}),
            ("--teacher_dtype auto", {"teacher.dtype": "auto"}),
            ("--teacher_device_strategy cpu", {"teacher.placement": "cpu"}),
            ("--teacher_device_strategy balanced", {"teacher.placement": "balanced"}),
            ("--teacher_device_strategy gpu0", {"teacher.placement": "rank0", "teacher.rank": 0}),
            ("--teacher_device_strategy auto", {"teacher.placement": "auto"}),
            ("--teacher_on_cpu", {"teacher.placement": "cpu"}),
            ("--share_teacher", {"teacher.placement": "cpu"}),
            ("--teacher_on_cpu --share_teacher --teacher_device_strategy cpu", {"teacher.placement": "cpu"}),
            ("--balance_teacher", {"teacher.placement": "balanced"}),
            ("--balanced_teacher", {"teacher.placement": "balanced"}),
            ("--teacher_rank 0", {"teacher.placement": "rank0", "teacher.rank": 0}),
            ("--teacher_rank 0 --teacher_device_strategy gpu0", {"teacher.placement": "rank0", "teacher.rank": 0}),
            ("--image_size 96", {"task.height": 96, "task.width": 96}),
            ("--save_samples", {"evaluation.sample_prompts": ()}),
            ("--save_samples --sample_prompts red blue", {"evaluation.sample_prompts": ("red", "blue")}),
        ],
    )
    def test_they_become_keys(self, flags, keys):
        recipe, _ = translated(*flags.split())
        assert {key: value(recipe, key) for key in keys} == keys

    def test_several_processes_without_a_place_get_auto(self):
        recipe, notices = translated(launch=launched(4))
        assert recipe["teacher"]["placement"] == "auto"
        assert any("would have taken cpu" in notice for notice in notices)

    def test_auto_says_what_the_older_rule_would_have_chosen(self):
        _, notices = translated("--teacher_device_strategy", "auto", launch=launched(2, num_gpus=2))
        assert any("would have taken balanced (two GPUs or more)" in notice for notice in notices)

    def test_the_teachers_rank(self):
        recipe, _ = translated("--teacher_rank", "3", launch=launched(4))
        assert (recipe["teacher"]["placement"], recipe["teacher"]["rank"]) == ("rank0", 3)

    def test_mixed_precision_alone_was_fp16(self):
        recipe, _ = translated("--mixed_precision", launch=launched(num_gpus=1))
        assert recipe["train"]["mixed_precision"] == "fp16"
        recipe, notices = translated("--mixed_precision", "--lr", "1e-4")
        assert recipe["train"]["mixed_precision"] == "no"
        assert any("needs a GPU" in notice for notice in notices)

    def test_the_launch_files_precision_is_not_contradicted(self):
        assert translated(launch=launched(precision="bf16"))[0]["train"]["mixed_precision"] == "auto"

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ("--lr 1e-4 --learning_rate 1e-5", ["--lr 0.0001", "--learning_rate 1e-05", "remove one"]),
            ("--teacher_on_cpu --balanced_teacher", ["--teacher_on_cpu (placement cpu)", "--balanced_teacher", "one"]),
            ("--teacher_device_strategy gpu0 --teacher_on_cpu", ["gpu0 (on rank 0)", "--teacher_on_cpu", "remove"]),
            ("--teacher_device_strategy auto --share_teacher", ["auto", "--share_teacher", "remove"]),
            ("--teacher_device_strategy gpu0 --teacher_rank 1", ["gpu0 (on rank 0)", "--teacher_rank 1 (on rank 1)"]),
            ("--balance_teacher --teacher_rank 1", ["--balanced_teacher", "--teacher_rank 1", "remove all but one"]),
            ("--teacher_rank 2", ["--teacher_rank is 2", "ranks go to 1", "name a rank"]),
            ("--teacher_device_strategy gpu1", ["gpu1", "balanced", "--help"]),
            ("--teacher_dtype int8", ["--teacher_dtype", "'int8'", "bfloat16"]),
            ("--mixed_precision fp8", ["--mixed_precision", "'fp8'", "bf16"]),
            ("--batch_size 0", ["--batch_size", "'0'", "above 0"]),
            ("--batch_size two", ["--batch_size", "'two'", "whole number"]),
            ("--num_workers -1", ["--num_workers", "'-1'", "from 0 up"]),
            ("--lr nan", ["--lr", "'nan'", "above 0"]),
            ("--lr 0", ["--lr", "'0'", "above 0"]),
            ("--output_dir=", ["--output_dir", "a path"]),
            ("--zzqq=3", ["unknown argument '--zzqq=3'", "--help"]),
            ("--teacher_on_cpus", ["'--teacher_on_cpus'", "did you mean --teacher_on_cpu?"]),
            ("stray", ["'stray'"]),
        ],
    )
    def test_refused(self, flags, words):
        with pytest.raises(UserError) as refusal:
            translated(*flags.split(), launch=launched(2))
        assert [word for word in words if word not in str(refusal.value)] == []

    def test_what_is_needed(self):
        with pytest.raises(UserError, match="--teacher_path, --student_config, --data_path"):
            read_flags([])


class TestNotices:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ("", ["20 steps", "random latents", "rollout.enabled: false"]),
            ("--num_steps 7 --num_epochs 2", ["--num_steps 7 wins over --num_epochs 2"]),
            ("--sample_interval 5", ["--sample_interval 5", "once, at the end"]),
            ("--sample_dir there", ["--sample_dir there gets a copy"]),
            (f"--sample_prompts {' '.join('abcdefghijkl')}", ["of 12 --sample_prompts the first 10"]),
        ],
    )
    def test_said_once(self, flags, words):
        _, notices = translated(*flags.split())
        assert len([notice for notice in notices if all(word in notice for word in words)]) == 1

    def test_nothing_is_said_of_nothing(self):
        assert len(translated("--num_steps", "7", "--save_samples")[1]) == 1

    @pytest.mark.parametrize(
        ("flags", "launch", "words"),
        [
            (["--distributed"], launched(), ["--distributed is given", "one process", "torchrun"]),
            ([], launched(2), ["--distributed is not given", "2 processes"]),
            (["--distributed", "--multi_gpu"], launched(2), None),
            (["--distributed", "--local_rank", "1"], launched(2, local_rank=1), None),
            (["--distributed", "--local-rank=1"], launched(2, local_rank=1), None),
            (["--local_rank", "-1"], launched(), None),
            (["--local_rank", "0"], launched(), None),
            ([], launched(), None),
        ],
    )
    def test_the_launcher(self, flags, launch, words):
        notices = check_launcher(read_flags([*NEEDED, *flags]), launch, ["x.py"])
        assert len(notices) == (words is not None)
        assert all(word in notices[0] for word in words or [])

    @pytest.mark.parametrize(("num_gpus", "processes"), [(0, 2), (1, 1), (4, 4)])
    def test_multi_gpu_says_the_command(self, num_gpus, processes):
        arguments = [*NEEDED, "--multi_gpu", "--sample_prompts", "a red fox"]
        with pytest.raises(UserError) as refusal:
            check_launcher(read_flags(arguments), launched(num_gpus=num_gpus), ["x.py", *arguments])
        assert f"torchrun --nproc_per_node={processes} x.py --teacher_path T" in str(refusal.value)
        assert str(refusal.value).endswith("'a red fox' --distributed")

    @pytest.mark.parametrize(("given", "launch"), [("1", launched()), ("0", launched(2, local_rank=1))])
    def test_another_local_rank(self, given, launch):
        with pytest.raises(LocalRankError, match=f"--local_rank is {given} and "):
            check_launcher(read_flags([*NEEDED, "--local_rank", given]), launch, ["x.py"])


@pytest.fixture(scope="module")
def teacher() -> dict[str, Any]:
    hidden = ("_class_name", "_diffusers_version")
    return {key: setting for key, setting in toys.transformer().config.items() if key not in hidden}


class TestStudent:
    def test_it_is_a_wan_config(self, teacher):
        student = translate_student(OLDER, teacher, 8, "S")
        expected = teacher | {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 96}
        assert student.config == expected | {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2]}
        assert (student.image_size, student.max_sequence_length) == (32, 77)
        WanTransformer3DModel.from_config(student.config)

    def test_only_three_keys_are_needed(self, teacher):
        student = translate_student({"hidden_size": 24, "depth": 2, "num_heads": 2}, teacher, 8, "S")
        assert student.config["patch_size"] == teacher["patch_size"]
        assert (student.image_size, student.max_sequence_length, student.notices) == (None, None, ())

    @pytest.mark.parametrize(("patch_size", "patch"), [(8, 1), (16, 2), (32, 4), (1, 1), (2, 2), (4, 4)])
    def test_patches(self, teacher, patch_size, patch):
        student = translate_student(OLDER | {"patch_size": patch_size}, teacher, 8, "S")
        assert student.config["patch_size"] == [1, patch, patch]
        assert any("read in latents" in notice for notice in student.notices) == (patch_size < 8)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"num_channels": 3}, ["num_channels 3", "in_channels 4 and out_channels 4", "projection"]),
            ({"text_encoder_output_dim": 4096}, ["4096", "text_dim 16"]),
            ({"text_max_length": 77}, ["77 tokens", "max_sequence_length=77", "512"]),
            ({"projection_factor": 0.5}, ["projection_factor 0.5", "not used"]),
        ],
    )
    def test_what_is_said(self, teacher, changes, words):
        notices = translate_student(OLDER | changes, teacher, 8, "S").notices
        assert len([notice for notice in notices if all(word in notice for word in words)]) == 1

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"hidden_size": 100, "num_heads": 16}, ["heads of 6.25", "hidden_size 96 or 128", "num_heads 5 or 10"]),
            ({"hidden_size": 33, "num_heads": 3}, ["heads of 11", "even", "hidden_size 30 or 36:"]),
            ({"hidden_size": 8, "num_heads": 4}, ["heads of 2", "from 6 up", "hidden_size 24, or num_heads 1"]),
            ({"patch_size": 12}, ["patch_size 12", "multiple of 8", "8 or 16"]),
            ({"depth": 0}, ["depth is 0", "above 0"]),
            ({"depth": "4"}, ["depth is '4'"]),
            ({"hidden_size": True}, ["hidden_size is True"]),
            ({"num_layers": 4, "eps": 1}, ["num_layers, eps", "remove them"]),
        ],
    )
    def test_refused(self, teacher, changes, words):
        with pytest.raises(UserError) as refusal:
            translate_student(OLDER | changes, teacher, 8, "--student_config S")
        message = str(refusal.value)
        assert [word.rstrip(":") for word in words if word.rstrip(":") not in message] == []
        assert message.startswith("--student_config S")

    def test_what_is_missing(self, teacher):
        with pytest.raises(UserError, match="lacks depth, num_heads"):
            translate_student({"hidden_size": 24}, teacher, 8, "S")

    def test_the_librarys_own_config_is_not_older(self, teacher):
        assert is_older(OLDER)
        assert not is_older(teacher)
        assert not is_older([])


class TestCommand:
    """The whole way in one process, without a launcher."""

    @pytest.fixture
    def command(self, tmp_path, pipelines, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("student.json").write_text(json.dumps(OLDER))
        toys.write_prompts(Path("prompts.txt"))
        needed = ["--teacher_path", str(pipelines[1]), "--student_config", "student.json", "--data_path", "prompts.txt"]
        return lambda *flags: main(["train_distillation.py", *needed, "--num_steps", "2", *flags])

    def test_it_trains_and_stores_what_it_prints(self, command, capfd):
        assert command("--save_samples", "--sample_prompts", "a red cat", "--sample_dir", "pictures/mine") == 0
        out, _ = capfd.readouterr()
        printed = parse_yaml(out.split("recipe.yaml:\n")[1].split("\n\n")[0])
        stored = parse_yaml(Path("outputs/recipe.yaml").read_text())
        printed = json.loads(with_absolute_paths(parse(printed)).model_dump_json())
        # What the size of a sample decides is known in the run.
        printed["evaluation"]["batch_size"] = 50
        assert printed == stored
        config = os.path.abspath("outputs/student_config.json")
        assert stored["student"] == {**dict.fromkeys(stored["student"]), "config": config}
        assert stored["task"]["height"] == stored["task"]["width"] == 32
        assert stored["task"]["max_sequence_length"] == 77
        assert json.loads(Path("outputs/summary.json").read_text())["steps"] == 2
        assert WanTransformer3DModel.from_pretrained("outputs/student").config.num_layers == 2
        assert Path("pictures/mine/samples.png").read_bytes() == Path("outputs/samples.png").read_bytes()
        assert "num_channels 4 became the teacher's" in out

        # Again, as older users did: the first run stays, and can be continued.
        assert command() == 0
        assert "outputs holds a run, which is kept" in capfd.readouterr().out
        assert Path("outputs-2/summary.json").is_file()
        assert command("--resume", "--sample_prompts", "a red cat", "--num_steps", "3") == 0
        assert json.loads(Path("outputs/summary.json").read_text())["steps"] == 3
        Path("student.json").write_text(json.dumps(OLDER | {"depth": 1}))
        assert command("--resume", "--num_steps", "4") == 2
        assert "--resume: the student config is another one" in capfd.readouterr().err

    def test_the_librarys_own_config_passes_through(self, command, capfd):
        toys.write_student_config(Path("student.json"))
        assert command("--image_size", "32") == 0
        held = parse_yaml(Path("outputs/recipe.yaml").read_text())
        assert held["student"]["config"] == os.path.abspath("student.json")
        assert not Path("outputs/student_config.json").exists()

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--multi_gpu"], ["--multi_gpu", "torchrun --nproc_per_node=", "train_distillation.py"]),
            (["--student_config", "nosuch.json"], ["--student_config nosuch.json does not exist"]),
            (["--student_config", "prompts.txt"], ["--student_config prompts.txt", "not readable JSON"]),
            (["--student_config", "odd.json"], ["image_size is 40", "multiple of 16"]),
            (["--student_config", "coarse.json"], ["patch_size [1, 8, 8]", "4 latents"]),
            (["--data_path", "nosuch.txt"], ["data.path: nosuch.txt does not exist"]),
            (["--teacher_path", "nosuch"], ["teacher.path: nosuch"]),
            (["--sample_dir", "prompts.txt"], ["--sample_dir prompts.txt is a file"]),
            (["--mixed_precision", "fp16"], ["fp16", "needs a GPU"]),
            (["--batch_size", "100"], ["100", "lower batch_size"]),
        ],
    )
    def test_refusals_are_one_line_and_leave_nothing(self, command, capfd, flags, words):
        Path("odd.json").write_text(json.dumps(OLDER | {"image_size": 40}))
        Path("coarse.json").write_text(json.dumps(OLDER | {"patch_size": 64}))
        before = {path.name for path in Path().iterdir()}
        assert command(*flags) == 2
        _, err = capfd.readouterr()
        assert err.startswith("distiller: ")
        assert err.count("\n") == 1
        assert [word for word in words if word not in err] == []
        assert {path.name for path in Path().iterdir()} == before

    def test_an_older_config_describes_no_other_network(self, command, capfd, pictures):
        assert command("--teacher_path", str(pictures["sd"])) == 2
        error = capfd.readouterr().err
        assert "describes a Wan transformer" in error
        assert "has a UNet2DConditionModel" in error

    def test_another_runs_folder_is_left_alone(self, command, capfd):
        Path("outputs/student").mkdir(parents=True)
        assert command() == 2
        assert "holds a 'student' that is not a run's" in capfd.readouterr().err
        assert [path.name for path in Path("outputs").iterdir()] == ["student"]

    def test_a_wrong_local_rank_is_said_by_its_own_rank(self, command, capfd, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert command("--local_rank", "0") == 2
        assert capfd.readouterr().err.startswith("distiller, rank 1: --local_rank is 0")


class TestDocuments:
    def test_every_flag_is_in_the_table(self):
        table = (ROOT / "docs" / "MIGRATING.md").read_text(encoding="utf-8")
        documented = set(re.findall(r"`(--\w+)", "\n".join(re.findall(r"^\|.*$", table, re.MULTILINE))))
        options = {option for action in make_parser()._actions for option in action.option_strings}
        assert documented == options - {"-h", "--help", "--local-rank"}

    def test_the_scripts_own_files(self, teacher):
        assert is_older(json.loads((ROOT / "scripts/config/student_config.json").read_text()))
        prompts = (ROOT / "scripts/data/static_prompts.txt").read_text().splitlines()
        assert len(set(prompts)) == 60

    def test_flags_are_answered_without_torch(self):
        program = (
            "import sys\nimport distiller.older.recipe, distiller.older.student, distiller.older.run\n"
            "sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
