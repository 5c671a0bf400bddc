"""What of the data is left out is said by `--check` already."""

import json

from PIL import Image

from distiller import commands
from distiller.config.loading import parse
from tests import classifiers, toy_causal_lm


def test_files_that_are_no_pictures(make_recipe, tmp_path, capsys):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red cat sits")
    (folder / "8.heic").touch()
    commands.check(make_recipe(data={"kind": "images", "path": str(folder)}), None)
    assert "note: data.path: files that are not read as pictures: 1 .heic; convert them" in capsys.readouterr().out


def test_pictures_outside_of_classes(tmp_path, capsys):
    config = classifiers.resnet_config()
    teacher = classifiers.save_classifier(tmp_path / "teacher", config)
    pictures = classifiers.save_pictures(tmp_path / "pictures")
    Image.new("RGB", (8, 8)).save(pictures / "1.png")
    commands.check(parse(classifiers.recipe(tmp_path, teacher, pictures, config)), None)
    assert "note: data.path: pictures that lie in no class's folder and are left out: 1" in capsys.readouterr().out


def test_nothing_is_held_out(tmp_path, capsys):
    teacher = toy_causal_lm.save_model(tmp_path / "teacher")
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "the red cat runs ."}))
    data = {"path": str(tmp_path / "one.jsonl")}
    commands.check(parse(toy_causal_lm.recipe(tmp_path, teacher, data=data, train={"batch_size": 1})), None)
    said = capsys.readouterr().out
    assert "note: data.held_out is 0.05 and nothing is held out (a single document of one row)" in said


def test_a_teacher_of_its_own_processes_that_is_not_asked_ahead(make_recipe, capsys):
    teacher = make_recipe().teacher.model_copy(update={"placement": "dedicated"})
    commands.check(make_recipe().model_copy(update={"teacher": teacher}), None)
    assert "note: teacher.placement dedicated and teacher.prefetch_steps 0: student and" in capsys.readouterr().out
    ahead = teacher.model_copy(update={"prefetch_steps": 1})
    commands.check(make_recipe().model_copy(update={"teacher": ahead}), None)
    assert "note: teacher.placement" not in capsys.readouterr().out
