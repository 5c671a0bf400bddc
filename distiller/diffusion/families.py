"""The pipeline families that the task distils, chosen by the pipeline class that model_index.json names."""

from __future__ import annotations

from distiller.config.teacher import Teacher
from distiller.diffusion.family import Family
from distiller.diffusion.pipeline import check_parts, locate, read_files, read_index
from distiller.distributed.importing import import_object
from distiller.errors import UserError

FAMILIES = {
    "WanPipeline": "distiller.diffusion.wan.family:WanFamily",
    "StableDiffusion3Pipeline": "distiller.diffusion.stable_diffusion_3.family:SD3Family",
    "StableDiffusionPipeline": "distiller.diffusion.stable_diffusion.family:StableDiffusionFamily",
}
"""Pipeline class -> module and class of its family. Imported on demand, since each import loads much of diffusers."""


def find_pipeline(teacher: Teacher) -> Family:
    """Finds and checks the teacher's pipeline. Reads JSON files and safetensors headers only. Raises UserError."""
    location = locate(teacher)
    index = read_index(location)
    kind = index.get("_class_name")
    # model_index.json of a custom pipeline has a list here.
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"teacher.path: {location.given} is a {kind}; task diffusion distils {', '.join(FAMILIES)}")
    family: type[Family] = import_object(FAMILIES[kind])
    found = family(read_files(location, index, family.architecture, family.network_parts))
    check_parts(found.files, found.text_parts)
    return found
