"""Maps the classes of the data to the teacher's classes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distiller.errors import UserError, shown


def class_numbers(names: Sequence[str], labels: Sequence[str], origin: str) -> list[int]:
    """For each class of the data, the index of the teacher's logit.

    Classes are matched by name. A teacher that was saved without names (LABEL_0, LABEL_1, ...) is taken to have the
    data's classes in the data's order, unless the data's classes have such names too.

    Args:
        names: names of the data's classes.
        labels: names of the teacher's classes, in the order of its logits.
        origin: what messages begin with.

    Raises:
        UserError: a class of the data is none of the teacher's, or the name of several, or the number of classes is not
            that of a teacher without names.
    """
    if are_unnamed(names, labels):
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


def are_unnamed(names: Sequence[str], labels: Sequence[str]) -> bool:
    """Whether the teacher's classes have the library's numbers for names, and the data's have not."""
    return not set(names) <= set(labels) and all(re.fullmatch(r"LABEL_\d+", label) for label in labels)
