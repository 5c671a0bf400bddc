"""Files in the package (recipes, assets, launch files), and how names in a recipe are resolved to files."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shutil
from pathlib import Path

from distiller.errors import UserError
from distiller.storage.yaml_files import quoted

PACKAGE_DIR = Path(__file__).resolve().parents[1]
RECIPES_DIR = PACKAGE_DIR / "recipes"
ASSETS_DIR = PACKAGE_DIR / "assets"
ASSET_PREFIX = "asset:"
PACKAGE_PREFIX = "package:"


def launch_files_dir() -> Path:
    """The folder that holds `accelerate_configs/` and `ds_configs/`: the package in a wheel, else the checkout."""
    return PACKAGE_DIR if (PACKAGE_DIR / "accelerate_configs").is_dir() else PACKAGE_DIR.parent


def recipe_names() -> list[str]:
    """The names of the packaged recipes, sorted."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def find_recipe(recipe: str) -> Path:
    """The file of a packaged recipe's name or of a path; UserError with the nearest name when there is none."""
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if os.path.isfile(path):
            return path
        raise UserError(f"{recipe}: no such recipe file; `distiller recipes` lists the packaged ones")
    if recipe in recipe_names():
        return RECIPES_DIR / f"{recipe}.yaml"
    near = difflib.get_close_matches(recipe, recipe_names(), n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"packaged recipes: {', '.join(recipe_names())}"
    raise UserError(f"'{recipe}' is neither a packaged recipe nor a path that ends in .yaml; {hint}")


def local_path(name: str) -> Path:
    """Turns `asset:NAME` into the packaged file or folder, and leaves every other path alone."""
    if not name.startswith(ASSET_PREFIX):
        return Path(os.path.expanduser(name))
    path = (ASSETS_DIR / name.removeprefix(ASSET_PREFIX)).resolve()
    if ASSETS_DIR not in path.parents or not os.path.exists(path):
        packaged = ", ".join(sorted(path.name for path in ASSETS_DIR.glob("*")))
        raise UserError(f"{name}: no such packaged asset; there are: {packaged}")
    return path


def search_note(path: Path) -> str:
    """For messages: the absolute form of a relative path that does not exist, in brackets; '' for an absolute path."""
    return "" if path.is_absolute() else f" (looked for {path.absolute()})"


def find_model_file(name: str) -> Path:
    """As `local_path`; and turns `package:NAME/FILE` into a file that an installed Python package carries.

    The package is looked up and not imported, so what it needs to run need not be there. Raises UserError.
    """
    if not name.startswith(PACKAGE_PREFIX):
        return local_path(name)
    package, _, inside = name.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside:
        raise UserError(f"{name}: write {PACKAGE_PREFIX}NAME/FILE, the name that Python imports and a file within")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise UserError(f"{name}: the package {package} is not installed; pip install --no-deps {distribution}")
    root = Path(next(iter(found.submodule_search_locations))).resolve()
    path = (root / inside).resolve()
    if root not in path.parents or not path.exists():
        others = ", ".join(sorted(file.name for file in root.iterdir() if file.suffix != ".py" and file.is_file()))
        raise UserError(f"{name}: the package {package} has no such file; it has: {others or 'none but code'}")
    return path


def first_line(file: Path) -> str:
    """The comment in the first line of a packaged YAML file, which says what it is for."""
    return file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def copy_launch_files(folder: Path) -> list[Path]:
    """Copies `accelerate_configs/` and `ds_configs/` into a folder; DeepSpeed paths are made absolute.

    Accelerate reads `deepspeed_config_file` relative to the working directory, so a copied file must not depend on it.

    Raises:
        UserError: a file of the same name is already there.
    """
    source, root, written = launch_files_dir(), folder.resolve(), []
    there = [file for part in ("accelerate_configs", "ds_configs") for file in sorted((source / part).iterdir())]
    files = [file for file in there if file.suffix in (".yaml", ".json") and not file.name.startswith(".")]
    targets = [folder / file.parent.name / file.name for file in files]
    taken = [target for target in targets if os.path.lexists(target)]
    if taken:
        raise UserError(f"{taken[0]} already exists; give another folder")
    for file, target in zip(files, targets, strict=True):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        except OSError as error:
            raise UserError(f"{target} cannot be written ({error.strerror}); give another folder") from error
        if target.suffix == ".yaml":
            text = target.read_text(encoding="utf-8")
            text = re.sub(r"(?<=deepspeed_config_file: )(ds_configs/.*)", lambda found: quoted(root / found[1]), text)
            target.write_text(text, encoding="utf-8")
        written.append(target)
    return written
