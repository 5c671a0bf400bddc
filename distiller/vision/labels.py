"""The classes of the data against those that the teacher knows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distiller.errors import UserError, shown


def class_numbers(names: Sequence[str], labels: Sequence[str], origin: str) -> list[int]:
    """The teacher's number for each class of the data.

    By name. A teacher that was saved without names (LABEL_0, LABEL_1, ...) has the data's classes in their order,
    unless they are called so too.

    Raises:
        UserError: a class of the data is none of the teacher's, or stands for two of them.
    """
    known = set(names) <= set(labels)
    if not known and all(re.fullmatch(r"LABEL_\d+", label) for label in labels):
        if len(names) != len(labels):
            raise UserError(
                f"{origin} has {len(names)} classes and the teacher {len(labels)}, without names (id2label: LABEL_0, "
                "...); give the data that it was trained on, or name the classes in its config.json"
            )
        return list(range(len(names)))
    for name in names:
        if (count := list(labels).count(name)) != 1:
            what = "is none of the teacher's" if not count else f"is the name of {count} of the teacher's"
            raise UserError(
                f"{origin}: class {shown(name)} {what}; its id2label has {', '.join(map(shown, labels[:10]))}"
                f"{', ...' if len(labels) > 10 else ''}; rename the class, or correct the teacher's config.json"
            )
    return [list(labels).index(name) for name in names]
