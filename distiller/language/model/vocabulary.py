"""Whether teacher and student read the same tokens, by their tokenizers and the sizes of their output layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from distiller.errors import UserError
from distiller.language.data.documents import Document
from distiller.language.data.tokenization import DocumentTokenizer, TokenisedDocument
from distiller.language.model.files import LanguageFiles
from distiller.language.model.logits import TokenIds

NUM_READ = 256
"""Documents that are tokenised with both tokenizers, at most."""


def check_same_tokens(teacher: LanguageFiles, student: LanguageFiles) -> None:
    """Raises UserError unless both tokenizers, over the ids that both have, give every id the same token.

    Ids that one of the models has no place for are not compared.

    A student without a tokenizer of its own reads the teacher's tokens.
    """
    if student.tokenizer is None or teacher.tokenizer is None:
        return
    shared = min(teacher.anatomy.vocabulary, student.anatomy.vocabulary)
    ours, theirs = _by_id(student.tokenizer, shared), _by_id(teacher.tokenizer, shared)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            raise UserError(
                f"{student.origin}: its tokenizer is not the teacher's: id {number} is {ours[number]!r} and the "
                f"teacher's {theirs[number]!r}; give a student that reads the same tokens"
            )
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        mine, teachers = getattr(student.tokenizer, name), getattr(teacher.tokenizer, name)
        if mine != teachers:
            raise UserError(
                f"{student.origin}: its tokenizer's {name} is {mine} and the teacher's {teachers}; make them equal"
            )


def other_reading(
    teacher: LanguageFiles, student: LanguageFiles, documents: Iterable[Document], trusts_code: bool
) -> str | None:
    """How the student's own tokenizer reads the first documents otherwise than the teacher's; None where it does not.

    Both give every id the same token (`check_same_tokens`). Training takes the teacher's reading.
    """
    shared = min(teacher.anatomy.vocabulary, student.anatomy.vocabulary)
    lacking = sorted(_by_id(teacher.tokenizer, shared).items() - _by_id(student.tokenizer, shared).items())
    if lacking:
        return f"it lacks {len(lacking)} of the teacher's tokens, the first {lacking[0][1]!r}"
    teachers = DocumentTokenizer(teacher.root, trusts_code)
    try:
        students = DocumentTokenizer(student.root, trusts_code)
    except UserError as error:
        return str(error)
    if students.digest == teachers.digest:
        return None
    # Outside of any `except`: what is wrong with the data is no difference between tokenizers.
    read = list(islice(documents, NUM_READ))
    theirs = list(teachers.tokenise(read))
    try:
        ours = list(students.tokenise(read))
    except UserError as error:
        return str(error)
    for document, one, other in zip(read, ours, theirs, strict=True):
        if difference := _difference(one, other, student.tokenizer):
            return f"of {document.origin} it makes {difference}"
    return None


def _difference(ours: TokenisedDocument, theirs: TokenisedDocument, tokenizer: Any) -> str | None:
    """Where two readings of one document part, in words."""
    if ours.tokens.tolist() == theirs.tokens.tolist():
        parts = ours.learnt.tolist() != theirs.learnt.tolist()
        return "the same tokens, and another part of them is the answer" if parts else None
    pairs = zip(ours.tokens.tolist(), theirs.tokens.tolist(), strict=False)
    shorter = min(len(ours.tokens), len(theirs.tokens))
    place = next((number for number, (one, other) in enumerate(pairs) if one != other), shorter)
    one, other = (_token(reading, place, tokenizer) for reading in (ours, theirs))
    return f"{one} at token {place + 1}, where the teacher's makes {other}"


def _token(reading: TokenisedDocument, place: int, tokenizer: Any) -> str:
    if place >= len(reading.tokens):
        return "its end"
    return repr(tokenizer.convert_ids_to_tokens(int(reading.tokens[place])))


def vocabulary_notices(tokenizer: Any, teacher_vocabulary: int, student_vocabulary: int, ids: TokenIds) -> list[str]:
    """A line where ids of an output layer stand for no token, and one where tokens have no place in one.

    Args:
        tokenizer: the teacher's.
        ids: those that are compared.
    """
    notices = (
        _unused_ids_notice(teacher_vocabulary, student_vocabulary, ids),
        _unreachable_tokens_notice(tokenizer, min(teacher_vocabulary, student_vocabulary)),
    )
    return [notice for notice in notices if notice is not None]


def _unused_ids_notice(teacher_vocabulary: int, student_vocabulary: int, ids: TokenIds) -> str | None:
    sizes = {"teacher": teacher_vocabulary, "student": student_vocabulary}
    unused = [
        f"{ids.num_unused(size)} of the {owner}'s {size} ids" for owner, size in sizes.items() if ids.num_unused(size)
    ]
    if not unused:
        return None
    kept_down = "; the student's others are kept down (loss/unused_ids)" * (ids.num_unused(student_vocabulary) > 0)
    return (
        f"{' and '.join(unused)} stand for no token of the tokenizer: both models are compared over the "
        f"{ids.num_tokens} that do{kept_down}"
    )


def _unreachable_tokens_notice(tokenizer: Any, shared: int) -> str | None:
    """`shared`: ids that both models have are below it."""
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= shared)
    if not beyond:
        return None
    return (
        f"{len(beyond)} of the tokenizer's tokens, the first {beyond[0][1]!r} with id {beyond[0][0]}, are left out: "
        f"teacher and student have {shared} ids in common, and the data needs no other"
    )


def _by_id(tokenizer: Any, vocabulary: int) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items() if number < vocabulary}
