"""Which placements read which keys of the recipe's `teacher` section. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence, Set

from distiller.config.placements import AUTO, PLACEMENTS


def placement_names() -> tuple[str, ...]:
    """The values of `teacher.placement`."""
    return (AUTO, *PLACEMENTS)


def all_keys() -> list[str]:
    """Every key that belongs to placements, once."""
    return list(dict.fromkeys(key for spec in PLACEMENTS.values() for key in spec.keys))


def owners(key: str) -> list[str]:
    """Names of the placements to which a key belongs."""
    return [spec.name for spec in PLACEMENTS.values() if key in spec.keys]


def keys_read(placement: str) -> Set[str]:
    """The placements' keys that this one reads; `auto` reads those of all its candidates."""
    specs = [spec for spec in PLACEMENTS.values() if spec.name == placement]
    if placement == AUTO:
        specs = [spec for spec in PLACEMENTS.values() if spec.is_auto_candidate]
    shared = {key for spec in PLACEMENTS.values() for key in spec.shared_keys}
    return {key for spec in specs for key in spec.keys} | shared


def unread_keys(placement: str) -> list[str]:
    """The placements' keys that this one does not read."""
    read = keys_read(placement)
    return [key for key in all_keys() if key not in read]


def readers(key: str) -> list[str]:
    """The values of `teacher.placement` under which a key is read."""
    return [name for name in (*PLACEMENTS, AUTO) if key in keys_read(name)]


def in_words(names: Sequence[str], conjunction: str) -> str:
    """`a, b and c`."""
    return f" {conjunction} ".join([part for part in (", ".join(names[:-1]), names[-1]) if part])


def quantized_placements() -> list[str]:
    """The placements that can hold quantised weights."""
    return [spec.name for spec in PLACEMENTS.values() if not spec.why_not_quantized and spec.loads_teacher]


def path_keys() -> tuple[str, ...]:
    """Dotted keys of placements that name files or folders of this machine."""
    return tuple(f"teacher.{key}" for spec in PLACEMENTS.values() for key in spec.paths)


def keys_free_on_resume() -> tuple[str, ...]:
    """Dotted keys of placements that a resumed run may change."""
    fixed = {key for spec in PLACEMENTS.values() for key in spec.fixed_on_resume}
    return tuple(f"teacher.{key}" for key in all_keys() if key not in fixed)
