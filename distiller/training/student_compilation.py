"""Compiles the student's blocks, after the engine has wrapped them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from distiller.launch.block_compilation import compile_blocks, loops_over_positions


def compile_student(
    student: nn.Module,
    classes: Collection[str],
    mode: str,
    *,
    is_automatic: bool,
    sizes_vary: bool,
    moves_weights: bool,
) -> bool:
    """Compiles the blocks of the prepared student, and says whether there are any that it compiles.

    Args:
        student: as `accelerator.prepare` returned it. FSDP2 has given the blocks classes that inherit from their own.
        classes: names of the blocks' classes.
        mode, sizes_vary, moves_weights: see `compile_blocks`.
        is_automatic: the mode is `auto`'s: models that loop over positions are left alone.
    """
    blocks = blocks_of(student, classes)
    if mode == "none" or not blocks or (is_automatic and any(map(loops_over_positions, blocks))):
        return False
    compile_blocks(blocks, mode, sizes_vary=sizes_vary, moves_weights=moves_weights)
    return True


def blocks_of(student: nn.Module, classes: Collection[str]) -> list[nn.Module]:
    """The submodules of these classes, or of classes that inherit from them."""
    return [module for module in student.modules() if any(base.__name__ in classes for base in type(module).__mro__)]
