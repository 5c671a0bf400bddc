"""What the documents say is so: their commands run, their links lead somewhere, their keys and files exist.

In README.md and docs/*.md a ```bash or ```python block is run (in library-failures.md each by itself), a ```yaml block
that begins with `# NAME.yaml` is written to that file, and a ```console block is shown only: NOT_RUN lists those.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from distiller.config.loading import RECIPES, load
from distiller.run_folder.output_dir import SECTIONS_THAT_MAY_CHANGE_ON_RESUME, may_change_on_resume
from distiller.storage.yaml_files import dump_yaml, parse_yaml
from tests import module_tree, recipe_keys
from tests.launch.launching import ROOT, run
from tests.unit.test_architecture import LAYERS

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAILURES = ROOT / "docs" / "library-failures.md"
LAUNCH_FILES = [*(ROOT / "accelerate_configs").glob("*.yaml"), *(ROOT / "ds_configs").glob("*.json")]
COMMAND_TIMEOUT_S = 240

# Console blocks by their first command: what needs GPUs, a hub, or an environment of its own.
NOT_RUN = {
    "README.md": [
        "scripts/test.sh",
        "accelerate launch --config_file accelerate_configs/ddp.yaml -m distiller train my-wan.yaml",
    ],
    "watching.md": ["python scripts/benchmarks/tracking.py --run outputs/watched --step-ms 155"],
    "planning.md": ["python scripts/benchmarks/planner_accuracy.py --results planner.jsonl"],
    "performance.md": [
        "torchrun --nproc_per_node=2 scripts/benchmarks/placements.py --model wan-14b",
        "torchrun --nproc_per_node=2 scripts/benchmarks/placements.py --model wan-14b --tokens 1560 6240 --rows "
        '"replicated, compiled|streamed, shared transfers|streamed, compiled|balanced, compiled|sharded"',
        "python scripts/benchmarks/quantization.py --tokens 1560 6240",
        "python scripts/benchmarks/step_time.py --model wan-14b --student-heads 12 --batch-size 1 --steps 40 "
        "--checkpointing false --prefetch-steps 0 --prefetch-steps 1 --option train.compile=default --option "
        "teacher.compile=default",
        "python scripts/benchmarks/step_time.py --model wan-1.3b --checkpointing false --launch ddp --launch fsdp2",
        "python scripts/benchmarks/step_time.py --model wan-1.3b",
        'python scripts/benchmarks/language_trainers.py --side trainer --side "trainer, fp8 teacher" --side '
        '"gkd, liger" --side "distillation, compiled"',
        "python scripts/benchmarks/divergences.py --ids 128000",
        "python scripts/benchmarks/hand_written.py --model digits --launch cpu --batch-size 32 --side 64 --steps 120",
    ],
    "engines.md": [
        "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 8 -m distiller train "
        "my-wan.yaml",
        "accelerate launch --config_file accelerate_configs/zero3_nvme.yaml --offload_param_nvme_path /local/nvme "
        "-m distiller train my-wan.yaml",
        "python scripts/benchmarks/pairs.py --launch ddp --launch fsdp2 --launch zero2 --launch zero3_offload "
        "--at-once 4",
    ],
    "caching.md": [
        "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/benchmarks/cached_step.py digits-wan "
        "teacher.cache=outputs/cache cache.draws=1",
    ],
    "resuming.md": [
        "accelerate launch --config_file accelerate_configs/ddp.yaml scripts/benchmarks/checkpoints.py --model "
        "wan-1.3b",
        "distiller export outputs/my-wan/checkpoints/step-400 --output my-student",
    ],
    "MODEL_LOADING_STRATEGIES.md": ["torchrun --nproc_per_node=2 scripts/benchmarks/placements.py --model wan-14b"],
    "MULTI_GPU.md": [
        "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 -m distiller train my-wan.yaml",
        "CUDA_VISIBLE_DEVICES=2,3 accelerate launch --config_file accelerate_configs/ddp.yaml -m distiller train "
        "my-wan.yaml",
        "accelerate launch --config_file accelerate_configs/ddp.yaml --num_machines 2 --num_processes 16 "
        "--machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500 -m distiller train my-wan.yaml",
        "NCCL_HOSTID=first accelerate launch --config_file accelerate_configs/ddp.yaml --num_machines 2 "
        "--num_processes 2 --main_process_ip 127.0.0.1 --main_process_port 29511 --machine_rank 0 -m distiller train "
        "RECIPE &",
    ],
    "language-models.md": ["pip install lm-eval"],
    "getting-started.md": ["source .venv/bin/activate"],
    # A teacher is trained first, which the shorter recipes below do not shorten.
    "classification.md": [
        "distiller train digits-resnet",
        "python scripts/benchmarks/digits_resnet.py --samples 1438,100",
    ],
}
# Long work is shortened here and nowhere else: these keys are set in the copy's packaged recipes and in those that a
# document writes, and these words are replaced in commands.
SHORTER_RECIPE: dict[str, Any] = {
    "train.max_steps": 4,
    "optim.warmup_steps": 1,
    "data.max_samples": 64,
    "sampling.num_inference_steps": 2,
    "evaluation.num_samples": 10,
    "evaluation.batch_size": 10,
    "tracking.trackers": [],
}
SHORTER_WORDS = {
    "train.max_steps=2400": "train.max_steps=6",
    "evaluation.num_samples=1000": "evaluation.num_samples=10",
}
# The documents' environment is the one that runs this test, not a new .venv.
SAME_ENVIRONMENT = "make_environment() { :; }\n"

# What a run writes, beside the files of the checkout, and files that documents make up.
RUN_FILES = {
    "progress.json",
    "run.json",
    "recipe.yaml",
    "inputs.json",
    "environment.json",
    "metrics.jsonl",
    "bad_batches.jsonl",
    "summary.json",
    "samples.png",
    "samples.txt",
    "samples-1.png",
    "evaluation-step-N.json",
    "prompts.txt",
    "metadata.jsonl",
}
LIBRARY_FILES = {"config.json", "model_index.json", "default_config.yaml", "scheduler_config.json"}
LIBRARY_FILES |= {"model.safetensors.index.json", "adapter_config.json"}
FILES = {name for folder, _, names in os.walk(ROOT) if "/." not in folder for name in names}
PLACEHOLDER = r"\bNAME\b|(?<=_)NAME\b"
"""In a path: whatever somebody calls it."""
SUFFIXES = r"(?:py|sh|ya?ml|jsonl?|md|toml|txt|png)"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line it begins on."""

    language: str
    text: str
    line: int


def blocks_of(document: Path) -> list[Block]:
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if opened is not None:
                found.append(Block(opened[0], "\n".join(lines) + "\n", opened[1]))
            opened, lines = (None if opened is not None else (line[3:].strip(), number)), []
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{document.name}: the block of line {opened} is not closed"
    return found


def prose_of(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def named_yaml(block: Block) -> str | None:
    match = re.match(r"# ([\w-]+\.yaml)$", block.text.splitlines()[0]) if block.language == "yaml" else None
    return match[1] if match else None


def shortened(recipe: str) -> str:
    data = parse_yaml(recipe)
    known = recipe_keys.keys_of(data.get("task", {}).get("kind", "diffusion"))
    for dotted, value in SHORTER_RECIPE.items():
        if dotted not in known:
            continue
        *sections, key = dotted.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return recipe.splitlines()[0] + "\n" + dump_yaml(data)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout whose recipes are shorter; the documents are read in it one after the other."""
    folder = tmp_path_factory.mktemp("documents") / "checkout"
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "outputs", "build", "dist", "wandb", "tests")
    shutil.copytree(ROOT, folder, ignore=kept_out)
    for recipe in (folder / "distiller" / "recipes").glob("*.yaml"):
        recipe.write_text(shortened(recipe.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "scripts" / "environment.sh").write_text(SAME_ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def already_run() -> set[str]:
    """What an earlier document has shown in the same words: the quick start is run once."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path != FAILURES], ids=lambda path: path.stem)
def test_the_commands_run(document, checkout, already_run):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(checkout)}
    for block in blocks_of(document):
        if name := named_yaml(block):
            (checkout / name).write_text(shortened(block.text), encoding="utf-8")
        if block.language not in ("bash", "python") or block.text in already_run:
            continue
        already_run.add(block.text)
        text = block.text
        for word, shorter in SHORTER_WORDS.items():
            text = text.replace(word, shorter)
        interpreter = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        result = run([*interpreter, text], COMMAND_TIMEOUT_S, checkout, environment)
        assert result.code == 0, f"{document.name}, line {block.line}:\n{text}\n{result.stdout}\n{result.stderr}"


def failures() -> Iterator[Any]:
    """Each reproduction under the name of its section."""
    headings = [
        (number, line) for number, line in enumerate(FAILURES.read_text(encoding="utf-8").splitlines(), start=1)
    ]
    for block in blocks_of(FAILURES):
        if block.language == "python":
            heading = [line for number, line in headings if number < block.line and line.startswith("### ")][-1]
            yield pytest.param(block, id=heading.removeprefix("### ").replace("`", ""))


@pytest.mark.slow
@pytest.mark.parametrize("block", list(failures()))
def test_a_library_still_fails(block, tmp_path):
    """If one has been mended, its section goes, and so may what distiller does about it."""
    result = run([sys.executable, "-c", block.text], COMMAND_TIMEOUT_S, tmp_path)
    assert result.code == 0, f"{FAILURES.name}, line {block.line}:\n{result.stdout}\n{result.stderr}"


def test_what_is_not_run_is_listed():
    shown = {
        document.name: [first_command(block) for block in blocks_of(document) if block.language == "console"]
        for document in DOCUMENTS
    }
    assert {name: commands for name, commands in shown.items() if commands} == NOT_RUN


def first_command(block: Block) -> str:
    return " ".join(block.text.replace("\\\n", " ").splitlines()[0].split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_recipes_are_valid(document, tmp_path):
    for block in blocks_of(document):
        if name := named_yaml(block):
            (tmp_path / name).write_text(block.text, encoding="utf-8")
            load(str(tmp_path / name))


def test_every_shortening_is_used():
    texts = [block.text for document in DOCUMENTS for block in blocks_of(document)]
    assert not [word for word in SHORTER_WORDS if not any(word in text for text in texts)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_block_says_what_it_is(document):
    known = {"bash", "python", "yaml", "json", "console", "text"}
    assert not [f"line {block.line}" for block in blocks_of(document) if block.language not in known]


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def _anchors(document: Path) -> set[str]:
    """The headings' anchors, as GitHub and most renderers make them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_that_are_named_exist(document):
    known = FILES | RUN_FILES | LIBRARY_FILES | {name for block in blocks_of(document) if (name := named_yaml(block))}
    missing = []
    for name in re.findall(rf"`([\w.*/-]+\.{SUFFIXES})`", prose_of(document)):
        if "/" not in name:
            found = name in known
        elif Path(name).name in RUN_FILES | LIBRARY_FILES:
            found = True
        else:
            found = any(next(root.glob(re.sub(PLACEHOLDER, "*", name)), None) for root in (ROOT, ROOT / "distiller"))
        if not found:
            missing.append(name)
    assert not missing


def test_the_architectures_paths_exist():
    """From the root of the checkout, or of a package that the same row names; NAME stands for any name."""
    named = re.findall(
        r"`((?:\.ci|accelerate_configs|distiller|docs|ds_configs|scripts|tests)/[^`]*)`", _architecture()
    )
    assert len(named) > 40
    assert not [path for path in named if not _files_at(path)]
    assert not re.findall(r"`(?!\w+/)([\w/]+\.py)`", _architecture()), "name files by their path from the root"


def test_where_to_add_names_what_the_files_hold():
    """In a row of its lists every class or registry stands in the file of that row."""
    _, _, lists = _architecture().partition("\n## Where to add\n")
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", lists, re.MULTILINE)
    assert rows
    missing = []
    for path, text in rows:
        files = [file.read_text(encoding="utf-8") for file in _files_at(path) if file.is_file()]
        names = re.findall(r"`([A-Z]\w+)`", text)
        missing += [(path, name) for name in names if not any(re.search(rf"\b{name}\b", file) for file in files)]
    assert not missing


def test_the_architectures_layers_are_the_tests():
    _, _, layers = _architecture().partition("\n| package |")
    table, _, _ = layers.partition("\n\n")
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [re.findall(r"`(\w+)`", row) for row in rows]
    assert named == [[name for name in names if name != "__init__"] for names in LAYERS]


def _architecture() -> str:
    """The page's own text, without the tables of modules, which are made from the code."""
    text, _, _ = module_tree.PAGE.read_text(encoding="utf-8").partition(module_tree.START)
    return text


def _files_at(path: str) -> list[Path]:
    return list(ROOT.glob(re.sub(PLACEHOLDER, "*", path)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_recipe_keys_that_are_named_exist(document):
    keys = recipe_keys.keys()
    tops = "|".join(sorted(key for key in keys if "." not in key))
    named = re.findall(rf"(?<![\w./-])((?:{tops})(?:\.[a-z_0-9]+)+)", document.read_text(encoding="utf-8"))
    named = [name for name in named if not re.search(rf"\.{SUFFIXES}$", name)]
    assert not sorted({name for name in named if name not in keys})


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_the_page_of_losses_has_every_key_of_a_task(kind):
    """In its tables: each key of `task.losses` with the recipe's default, and each value of a `kind`."""
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    section = page.split(f"\n## Task `{kind}`\n")[1].split("\n## ")[0]
    expected, kinds = {}, []
    for path, model in recipe_keys.sections(RECIPES[kind]):
        for name, field in model.model_fields.items():
            if path.startswith("task.losses") and not recipe_keys.is_section(field.annotation):
                expected[f"{path}.{name}"] = recipe_keys.yaml_value(field.default)
                kinds += get_args(field.annotation) if name == "kind" else []
    assert dict(re.findall(r"^\| `(task\.losses\.[\w.]+)` \| `([^`]*)` \|", section, re.MULTILINE)) == expected
    assert not [name for name in kinds if f"`{name}`" not in section]


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda path: path.stem)
def test_every_launch_setting_is_explained(file):
    explained = re.findall(r"`(\w+)`", (ROOT / "docs" / "engines.md").read_text(encoding="utf-8"))
    assert not sorted(set(_all_names(parse_yaml(file.read_text(encoding="utf-8")))) - set(explained))


def _all_names(settings: dict[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        yield name
        if isinstance(value, dict):
            yield from _all_names(value)


def test_quoted_messages_are_the_programs():
    """The tables of symptoms quote messages; numbers and names in them stand for what the code puts in."""
    files = (file.read_text(encoding="utf-8") for file in (ROOT / "distiller").rglob("*.py"))
    source = _without_values(re.sub(r'"\n\s*f?"', "", "\n".join(files)))
    for page in ("troubleshooting.md", "MULTI_GPU.md"):
        rows = re.findall(r'^\| "([^"]+)"', (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert rows
        assert not [row for row in rows if _without_values(row) not in source]


def _without_values(text: str) -> str:
    return re.sub(r"\{[^{}]*\}|\b\d+\b|\bN\b|(?<=the teacher's )prediction", "#", text)


def test_what_may_change_on_resume_is_listed():
    text = (ROOT / "docs" / "resuming.md").read_text(encoding="utf-8")
    listed = re.search(r"^### What may change\n(.*?)^Any other key", text, flags=re.MULTILINE | re.DOTALL)
    assert listed
    named = set(re.findall(r"`([a-z_.]+)`", listed[1])) - {"cached"}
    assert named == {*may_change_on_resume(), *SECTIONS_THAT_MAY_CHANGE_ON_RESUME}


def test_the_page_of_keys_is_the_recipes():
    assert recipe_keys.PAGE.read_text(encoding="utf-8") == recipe_keys.page(), "run python -m tests.recipe_keys"


def test_the_page_of_modules_is_the_packages():
    assert module_tree.PAGE.read_text(encoding="utf-8") == module_tree.page(), "run python -m tests.module_tree"
