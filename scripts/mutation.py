"""Mutation testing: changes one operator, constant or statement at a time, and lists changes that no test detects.

    python scripts/mutation.py --sample 300                       # every group, 300 of their mutations
    python scripts/mutation.py --group diffusion --survivors out.txt
    python scripts/mutation.py --only distiller/tasks/losses.py:14      # one line, with what its tests print

A mutation changes one operator, comparison, constant, condition, argument or statement of a module. A process that has
imported the libraries, but nothing of distiller, forks; the fork imports the changed module and runs first those tests
of the group that execute the changed line, then all of the group's, until one fails. With --all-tests, survivors are
run again with all unit tests. Messages, annotations, decorators, docstrings, progress bars, limits of memory, arguments
that change no value, and what only a GPU or several processes run are not changed. Exit code 1 if less than --at-least
percent were detected.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "distiller"
GROUPS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "diffusion": (
        (
            *("distiller/tasks/losses.py", "distiller/diffusion/task.py"),
            *(f"distiller/diffusion/{name}.py" for name in ("noise_process", "flow_matching", "variance_preserving")),
            *(f"distiller/diffusion/{name}.py" for name in ("noising", "objective", "rollout", "sources", "batch")),
            *(f"distiller/diffusion/{name}.py" for name in ("samples", "network", "text", "sampling", "vae", "kl_vae")),
            "distiller/diffusion/sampling_inputs.py",
        ),
        (
            *("losses", "reference_diffusion*", "guidance", "repeated_prompts", "long_texts", "short_text"),
            *("picture_families", "picture_training", "pipeline_defaults", "wan_*", "training", "interrupted_stages"),
            *("traced_update", "reference_keys"),
        ),
    ),
    "keys": (
        ("distiller/cache/*.py", "distiller/storage/stages.py", "distiller/data/*.py"),
        (
            *("order", "stages", "cache", "cache_folder", "prompts", "repeated_prompts", "pictures", "folders"),
            *("reference_keys", "reference_*_keys", "loader_processes", "latents", "data_sets", "bad_input"),
            *("file_modes", "interrupted_stages"),
        ),
    ),
    "language": (
        (
            *("distiller/language/[e-t]*.py", "distiller/language/data/*.py", "distiller/language/loss/*.py"),
            *("distiller/language/cache/*.py", "distiller/language/model/logits.py"),
            "distiller/language/model/vocabulary.py",
        ),
        (
            *(
                "divergences",
                "chunked_divergence",
                "sparse_forms",
                "reference_language*",
                "language_data_*",
                "unused_ids",
            ),
            *(
                "logit_families",
                "language_types",
                "student_tokenizers",
                "small_data",
                "tokens_beyond_the_models",
                "language_task",
                "language_student",
            ),
        ),
    ),
    "vision": (
        ("distiller/vision/*.py",),
        ("reference_classification*", "pictures", "classification", "data_sets"),
    ),
    "training": (
        (
            *(f"distiller/training/{name}.py" for name in ("optim", "nonfinite_guard", "buffer_rollback")),
            *(f"distiller/training/{name}.py" for name in ("teacher_queue", "timing", "memory_advice")),
            *("distiller/student_state/moving_average.py", "distiller/tasks/micro_batch.py"),
            *("distiller/data/order.py", "distiller/checkpoint/schedule.py"),
        ),
        (
            *("optim", "order", "reference_training", "trainer", "checkpoint", "cache*", "teacher_queue", "timing"),
            "out_of_memory",
        ),
    ),
}
"""Group -> (files, names of the unit tests that run first)."""

UNSEEN = (
    *("device", "non_blocking", "pin_memory", "use_safetensors", "local_files_only", "low_cpu_mem_usage", "strict"),
    *("memory_format", "indent", "digest_size", "ignore_errors"),
)
"""Keyword arguments without effect on values on a CPU, on files that are there and in safetensors, on lists of one
length, or on what is read from a file."""

UNSEEN_CALLS = (
    *("Error", "print", "Field", "warn", "TypeVar", "tqdm", "perf_counter", "unset_hf_deepspeed_config", "barrier"),
    "bar.update",
)
"""Endings of functions that say or measure something, or that matter in several processes alone."""

LIMITS = ("MAX_", "BATCH_", "SHARD_", "FORMAT", "READER_VERSION", "_THREADS")
"""Beginnings of constants that bound memory, threads or a message, or number a format: results do not depend on them.
"""

UNSEEN_CONDITIONS = ("TYPE_CHECKING", "device.type == 'cuda'")
"""Conditions of statements that only a type checker reads or that only a GPU runs; the tests run on a CPU."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.USub: ast.UAdd},
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "cos": "sin"}


@dataclass(frozen=True)
class Mutation:
    """Change number `index` of a file; `was` and `becomes` are its source before and after."""

    file: str
    index: int
    line: int
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.was}  ->  {self.becomes}"


class Mutator(ast.NodeTransformer):
    """Visits every node that can be changed, in order, and changes the one with index `target`; none for None."""

    def __init__(self, target: int | None = None) -> None:
        self.target, self.count = target, 0
        self.seen: list[tuple[int, str, str]] = []

    def _offer(self, node: Any, changed: Any) -> Any:
        number, self.count = self.count, self.count + 1
        if self.target is None:
            self.seen.append((getattr(node, "lineno", 0), ast.unparse(node), ast.unparse(changed)))
        return ast.copy_location(changed, node) if number == self.target else node

    def visit(self, node: ast.AST) -> Any:
        # Messages, types, docstrings and what does not run.
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return node
        if isinstance(node, ast.If) and not node.orelse and ast.unparse(node.test) in UNSEEN_CONDITIONS:
            return node
        return super().visit(node)

    def visit_arg(self, node: ast.arg) -> Any:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith(LIMITS):
            return node
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body = [self._statement(child) for child in node.body]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        return node

    def _statement(self, node: ast.stmt) -> Any:
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if called is not None and not ast.unparse(called).endswith(UNSEEN_CALLS):
            offered = self._offer(node, ast.Pass())
            return offered if offered is not node else self.visit(node)
        return self.visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name.endswith(UNSEEN_CALLS):
            return node
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            if keyword.arg not in UNSEEN:
                keyword.value = self.visit(keyword.value)
        node.func = self.visit(node.func)
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNSEEN:
                changed = copy.deepcopy(node)
                del changed.keywords[number]
                offered = self._offer(node, changed)
                if offered is not node:
                    return offered
        if isinstance(node.func, ast.Name | ast.Attribute):
            own = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if own in NAMES:
                changed = copy.deepcopy(node)
                setattr(changed.func, "id" if isinstance(node.func, ast.Name) else "attr", NAMES[own])
                return self._offer(node, changed)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if "perf_counter" in ast.unparse(node):
            return node
        self.generic_visit(node)
        if type(node.op) in SWAPS and not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            changed = ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)  # type: ignore[arg-type]
            return self._offer(node, changed)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        # On which side of a limit its own value lies changes no result either.
        if ast.unparse(node.comparators[0]).startswith("MAX_"):
            return node
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            changed = ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)  # type: ignore[list-item]
            return self._offer(node, changed)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        return self._offer(node, ast.BoolOp(SWAPS[type(node.op)](), node.values))  # type: ignore[arg-type]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return self._offer(node, node.operand) if isinstance(node.op, ast.Not | ast.USub) else node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return self._offer(node, ast.IfExp(node.test, node.orelse, node.body))

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        shown = ast.Expr(node.test), ast.Expr(changed.test)
        number, self.count = self.count, self.count + 1
        if self.target is None:
            self.seen.append((node.lineno, f"if {ast.unparse(shown[0])}", f"if {ast.unparse(shown[1])}"))
        return changed if number == self.target else node

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool):
            return self._offer(node, ast.Constant(not node.value))
        if isinstance(node.value, int | float):
            return self._offer(node, ast.Constant(node.value + 1))
        return node


def mutations_of(file: Path) -> Iterator[Mutation]:
    """Every mutation of a file, in order."""
    mutator = Mutator()
    mutator.visit(ast.parse(file.read_text()))
    for index, (line, was, becomes) in enumerate(mutator.seen):
        yield Mutation(str(file), index, line, " ".join(was.split())[:100], " ".join(becomes.split())[:100])


class MutatedLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module with one change."""

    def __init__(self, name: str, mutation: Mutation) -> None:
        super().__init__(name, str(Path(mutation.file).absolute()))
        self._mutation = mutation

    def get_code(self, fullname: str) -> Any:
        tree = Mutator(self._mutation.index).visit(ast.parse(Path(self._mutation.file).read_text()))
        return compile(ast.fix_missing_locations(tree), self._mutation.file, "exec")


class MutatedFinder(importlib.abc.MetaPathFinder):
    """Finds the changed module before Python's own finders."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation
        self._name = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        loader = MutatedLoader(fullname, self._mutation)
        is_package = [str(Path(self._mutation.file).parent)] if self._mutation.file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            fullname, self._mutation.file, loader=loader, submodule_search_locations=is_package
        )


def run_tests(mutation: Mutation | None, tests: Sequence[str], quiet: bool, channel: Any) -> None:
    """In a fork: runs the tests with the change and sends pytest's exit code."""
    if quiet:
        _say_nothing()
    if mutation is not None:
        sys.meta_path.insert(0, MutatedFinder(mutation))
    channel.send(_run_pytest(tests))
    channel.close()
    os._exit(0)


def run_tests_by_line(files: Sequence[Path], tests: Sequence[str], channel: Any) -> None:
    """In a fork: runs the tests without a change; sends the exit code and {(file, line): ids of tests that run it}."""
    import coverage

    _say_nothing()
    executed = coverage.Coverage(data_file=None, include=[str(file) for file in files])
    executed.start()
    code = _run_pytest(tests, [ContextOfTest(executed)])
    executed.stop()
    data, tests_of = executed.get_data(), {}
    for file in files:
        for line, names in data.contexts_by_lineno(str(file.absolute())).items():
            tests_of[str(file), line] = [name for name in names if name]
    channel.send((code, tests_of))
    channel.close()
    os._exit(0)


class ContextOfTest:
    """A pytest plugin: what is executed counts as the running test's."""

    def __init__(self, executed: Any) -> None:
        self._executed = executed

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._executed.switch_context(nodeid)


def _run_pytest(tests: Sequence[str], plugins: Sequence[object] = ()) -> int:
    import pytest

    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--assert=plain",
        "-m",
        "not slow and not thorough",
    ]
    return int(pytest.main([*options, *tests], list(plugins)))


def _say_nothing() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def forked(target: Any, *arguments: Any, limit_s: float) -> Any:
    """What `target(*arguments, channel)` sends from a fork; None when it took longer than that, or the process died."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def is_noticed(mutation: Mutation, tests: Sequence[str], limit_s: float, quiet: bool = True) -> bool:
    """Whether a test fails, or there is no end, with the change."""
    return forked(run_tests, mutation, tests, quiet, limit_s=limit_s) != 0


def main() -> None:
    """Runs the chosen mutations and prints the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", action="append", choices=GROUPS, help="default: all")
    parser.add_argument("--sample", type=int, help="so many mutations of each group, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="FILE or FILE:LINE: nothing else, with what pytest prints")
    parser.add_argument("--all-tests", action="store_true", help="survivors once more, with all unit tests")
    parser.add_argument("--survivors", type=Path, help="a file that they are written to")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    # Only libraries: forks import the package, changed.
    import accelerate  # noqa: F401
    import diffusers.models  # noqa: F401
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    torch.set_num_threads(1)
    assert PACKAGE not in sys.modules
    noticed, survivors = 0, []
    for group in options.group or GROUPS:
        patterns, names = GROUPS[group]
        files = sorted({file for pattern in patterns for file in Path().glob(pattern)})
        if unmatched := [pattern for pattern in patterns if not any(Path().glob(pattern))]:
            sys.exit(f"{group}: no file matches {', '.join(unmatched)}")
        tests = [str(file) for name in names for file in sorted(Path("tests/unit").glob(f"test_{name}.py"))]
        found = [mutation for file in files for mutation in mutations_of(file)]
        if options.only is not None:
            found = [m for m in found if f"{m.file}:{m.line}".startswith(options.only)]
        elif options.sample is not None:
            found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
        if not found:
            continue
        began = time.monotonic()
        code, tests_of = forked(run_tests_by_line, files, tests, limit_s=3600) or (None, {})
        if code != 0:
            sys.exit(f"{group}: its tests fail without any change")
        # Counting lines more than doubles the time.
        limit_s, quiet = 60 + time.monotonic() - began, options.only is None
        left = []
        for mutation in found:
            nearest = tests_of.get((mutation.file, mutation.line))
            if nearest and is_noticed(mutation, nearest, limit_s, quiet):
                continue
            if not is_noticed(mutation, tests, limit_s, quiet):
                left.append(mutation)
                print(f"survived: {mutation}", flush=True)
        if options.all_tests:
            left = [mutation for mutation in left if not is_noticed(mutation, ["tests/unit"], 3600)]
        noticed, survivors = noticed + len(found) - len(left), survivors + left
        share = 100 * (1 - len(left) / len(found))
        took = time.monotonic() - began
        print(f"{group}: {len(found) - len(left)} of {len(found)} noticed, {share:.1f}%, in {took:.0f} s", flush=True)
    share = 100 * noticed / max(noticed + len(survivors), 1)
    print(f"in all {noticed} of {noticed + len(survivors)} noticed, {share:.1f}%")
    if options.survivors is not None:
        options.survivors.write_text("".join(f"{mutation}\n" for mutation in survivors))
    sys.exit(share < options.at_least)


if __name__ == "__main__":
    main()
