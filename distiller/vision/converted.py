"""Weight files with the module's tensor names, converted where transformers renames or merges tensors while loading.

Classifiers on the hub have tensor names that today's classes no longer use (ViT's
`encoder.layer.0.attention.attention`), and `save_pretrained` writes those names again. Placements read tensors one by
one by the module's names, so transformers loads such a model once, and it is saved with the module's names.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import transformers

from distiller.errors import UserError
from distiller.storage.stage_folders import StageFolders
from distiller.storage.stages import Stage
from distiller.vision.files import ClassifierFiles
from distiller.vision.library import read_model
from distiller.vision.weight_files import stored_dtype, stored_files, stored_names


def converted_files(files: ClassifierFiles, names: set[str], stages_dir: Path | StageFolders) -> list[Path]:
    """The model's own files where they hold exactly these names, else converted copies in a keyed folder, made once.

    Does not communicate: of several processes, one converts and the others wait for its file lock.

    Raises:
        UserError: the library finds weights missing, or some that the model of config.json does not have.
    """
    stored = files.weight_files()
    if stored_names(stored) == names:
        return stored
    key = {"files": files.digest(), "dtype": "stored", "transformers": transformers.__version__}
    stage = Stage("weights", key, stages_dir)
    stage.make_once(is_maker=True, make=lambda: _convert(files, stage))
    return stored_files(stage.folder)


def _convert(files: ClassifierFiles, stage: Stage) -> None:
    # First on the meta device, where no weights are read.
    _, report = read_model(files.root, files.config, device_map="meta")
    for kind, what in (
        ("missing_keys", "lack"),
        ("unexpected_keys", "hold, unknown to the model,"),
        ("mismatched_keys", "have in another shape"),
    ):
        if report[kind]:
            name = str(sorted(report[kind], key=str)[0])
            raise UserError(
                f"{files.source}: its weights {what} {name}; give the weights that belong to its config.json"
            )
    # Not "auto", which is the config's dtype: weights that were saved in a wider dtype would be rounded.
    model, _ = read_model(files.root, files.config, dtype=stored_dtype(files.weight_files()))
    shutil.rmtree(stage.partial, ignore_errors=True)
    model.save_pretrained(stage.partial, save_original_format=False)
    stage.finish()
