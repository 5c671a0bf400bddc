"""Students from a config, a folder, or the teacher's own blocks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from distiller.config.diffusion import DiffusionStudent
from distiller.config.teacher import Teacher
from distiller.diffusion.families import find_pipeline
from distiller.diffusion.student import DistilledStudent, build_student, student_config
from distiller.diffusion.wan.architecture import WanArchitecture
from distiller.errors import UserError
from distiller.tasks.layer_selection import evenly_spaced
from tests import toys


def build(student: DiffusionStudent, pipeline, seed: int = 0) -> WanTransformer3DModel:
    files = find_pipeline(Teacher(path=str(pipeline)))
    return build_student(student, student_config(student, files), files, seed)


def weights_of(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def forward(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 1, 4, 4, generator=generator)
    text = torch.randn(2, 512, toys.TEXT_DIM, generator=generator)
    with torch.no_grad():
        return model(latents, torch.tensor([10.0, 900.0]), text, return_dict=False)[0]


def test_new_weights_depend_on_the_seed_alone(pipelines, tmp_path):
    student = DiffusionStudent(config=str(toys.write_student_config(tmp_path / "student.json")))
    torch.manual_seed(1)
    first = weights_of(build(student, pipelines[1]))
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(weights_of(build(student, pipelines[1])), first)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(weights_of(build(student, pipelines[1], seed=1)), first)


def test_all_of_the_teacher_is_the_teacher(pipelines):
    student = build(DiffusionStudent(num_layers=3, num_attention_heads=2, ffn_dim=32), pipelines[1])
    teacher = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    assert torch.equal(forward(student), forward(teacher))


def test_depth_keeps_evenly_spaced_blocks(pipelines):
    assert evenly_spaced(2, 3) == [0, 2]
    assert evenly_spaced(4, 40) == [0, 13, 26, 39]
    assert evenly_spaced(1, 40) == [0]
    student = build(DiffusionStudent(num_layers=2), pipelines[1])
    teacher = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    teacher.blocks = torch.nn.ModuleList([teacher.blocks[0], teacher.blocks[2]])
    assert torch.equal(forward(student), forward(teacher))


def test_width_keeps_leading_heads_and_channels(pipelines):
    student = build(DiffusionStudent(num_attention_heads=1, ffn_dim=20), pipelines[1])
    teacher = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    ours, theirs = student.blocks[1], teacher.blocks[1]
    assert torch.equal(ours.attn1.to_q.weight, theirs.attn1.to_q.weight[:12, :12])
    assert torch.equal(ours.ffn.net[2].weight, theirs.ffn.net[2].weight[:12, :20])
    # Six stacked vectors of the model's width: each is cut, not the stack.
    time_ours, time_theirs = student.condition_embedder.time_proj.bias, teacher.condition_embedder.time_proj.bias
    assert torch.equal(time_ours.view(6, 12), time_theirs.view(6, 24)[:, :12])
    assert torch.isfinite(forward(student)).all()


def test_a_saved_student_is_read_from_a_model_or_a_pipeline_folder(pipelines):
    teacher = WanTransformer3DModel.from_pretrained(pipelines[1], subfolder="transformer")
    for path in (pipelines[1], pipelines[1] / "transformer"):
        assert torch.equal(forward(build(DiffusionStudent(path=str(path)), pipelines[1])), forward(teacher))


def test_features_are_projected_into_the_teachers_width(pipelines, tmp_path):
    config = toys.write_student_config(tmp_path / "student.json")
    model = build(DiffusionStudent(config=str(config)), pipelines[1])
    trained = DistilledStudent(WanArchitecture(), model, ("blocks.0", "blocks.1"), ((12, 24), (12, 24)), seed=0)
    model.enable_gradient_checkpointing()
    latents, text = torch.randn(2, 4, 1, 4, 4), torch.randn(2, 512, toys.TEXT_DIM)
    prediction, features = trained(latents=latents, timesteps=torch.tensor([10.0, 900.0]), text=text)
    assert [tuple(feature.shape) for feature in features] == [(2, 4, 24)] * 2
    (prediction.sum() + features[0].sum()).backward()
    assert trained.projections[0].weight.grad is not None
    assert model.blocks[0].attn1.to_q.weight.grad is not None


def test_a_config_may_leave_defaults_out(pipelines, tmp_path):
    file = toys.write_student_config(tmp_path / "student.json")
    config = json.loads(file.read_text())
    del config["eps"]
    file.write_text(json.dumps(config))
    assert build(DiffusionStudent(config=str(file)), pipelines[1]).config.eps == pytest.approx(1e-6)


@pytest.mark.parametrize(("num_layers", "words"), [(2, "hold blocks.2."), (4, "lack blocks.3.")])
def test_weights_of_another_depth_than_the_config_s_are_refused(pipelines, tmp_path, num_layers, words):
    """diffusers drops the one, and leaves the other without memory."""
    folder = Path(shutil.copytree(pipelines[1] / "transformer", tmp_path / "student"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_layers": num_layers}))
    family = find_pipeline(Teacher(path=str(pipelines[1])))
    with pytest.raises(UserError, match=rf"^student.path: {folder}: its weights {words}.*; copy it again"):
        student_config(DiffusionStudent(path=str(folder)), family)


def test_a_patch_that_the_teacher_s_pipeline_cannot_draw_is_refused(pipelines, tmp_path):
    """Wan 2.2 TI2V's, whose call assumes patches of 1 x 2 x 2."""
    folder = Path(shutil.copytree(pipelines[1], tmp_path / "teacher"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    family = find_pipeline(Teacher(path=str(folder)))
    file = toys.write_student_config(tmp_path / "student.json")
    student = DiffusionStudent(config=str(file))
    student_config(student, family)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"patch_size": [1, 4, 4]}))
    with pytest.raises(UserError, match=r"patch_size is \[1, 4, 4\], and a WanPipeline with expand_timesteps"):
        student_config(student, family)
