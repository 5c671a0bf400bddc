"""Checks that teacher and student use the same tokens, by their tokenizers and the sizes of their output layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from distiller.config.causal_lm import LanguageRecipe
from distiller.errors import UserError
from distiller.language.data.corpus import documents_of, open_corpus
from distiller.language.data.documents import Document
from distiller.language.data.tokenization import DocumentTokenizer, TokenisedDocument
from distiller.language.model.files import LanguageFiles
from distiller.language.model.logits import TokenIds

NUM_READ = 256
"""Largest number of documents that are tokenised with both tokenizers."""


def check_same_tokens(teacher: LanguageFiles, student: LanguageFiles) -> None:
    """Raises UserError unless both tokenizers have the same token for every id that both have.

    The ids of the tokens bos, eos and unk must be equal too. Ids that one of the models' output layers lacks are not
    compared. Nothing is compared where a model has no tokenizer of its own; such a student uses the teacher's.
    """
    if student.tokenizer is None or teacher.tokenizer is None:
        return
    shared = min(teacher.spec.vocabulary, student.spec.vocabulary)
    student_tokens, teacher_tokens = _by_id(student.tokenizer, shared), _by_id(teacher.tokenizer, shared)
    for token_id in sorted(student_tokens.keys() & teacher_tokens.keys()):
        if student_tokens[token_id] != teacher_tokens[token_id]:
            raise UserError(
                f"{student.origin}: its tokenizer is not the teacher's: id {token_id} is "
                f"{student_tokens[token_id]!r} and the teacher's {teacher_tokens[token_id]!r}; give a student that "
                "reads the same tokens"
            )
    for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
        own_id, teacher_id = getattr(student.tokenizer, name), getattr(teacher.tokenizer, name)
        if own_id != teacher_id:
            raise UserError(
                f"{student.origin}: its tokenizer's {name} is {own_id} and the teacher's {teacher_id}; make them equal"
            )


def own_tokenizer(
    recipe: LanguageRecipe, teacher: LanguageFiles, student: LanguageFiles | None
) -> tuple[LanguageFiles | None, str | None]:
    """(student, None) where the student's own tokenizer reads the data as the teacher's does, else (None, difference).

    Reads at most `NUM_READ` documents. (None, None) for a student without a tokenizer.
    """
    if student is None or student.tokenizer is None:
        return None, None
    documents = documents_of(open_corpus(recipe.data), recipe.data.max_samples)
    difference = tokenizer_difference(teacher, student, documents, recipe.task.trust_remote_code)
    return (student if difference is None else None), difference


def tokenizer_difference(
    teacher: LanguageFiles, student: LanguageFiles, documents: Iterable[Document], trusts_code: bool
) -> str | None:
    """How the student's own tokenizer differs from the teacher's on the first documents; None where it does not.

    Expects that both have the same token for every id (`check_same_tokens`). Training uses the teacher's tokenizer.
    Raises UserError where the documents cannot be read, or the teacher's tokenizer cannot.
    """
    shared = min(teacher.spec.vocabulary, student.spec.vocabulary)
    lacking = sorted(_by_id(teacher.tokenizer, shared).items() - _by_id(student.tokenizer, shared).items())
    if lacking:
        return f"it lacks {len(lacking)} of the teacher's tokens, the first {lacking[0][1]!r}"
    teacher_tokenizer = DocumentTokenizer(teacher.root, trusts_code)
    try:
        student_tokenizer = DocumentTokenizer(student.root, trusts_code)
    except UserError as error:
        return str(error)
    if student_tokenizer.digest == teacher_tokenizer.digest:
        return None
    # Outside of `try`: an error in the data is no difference between the tokenizers.
    first_documents = list(islice(documents, NUM_READ))
    teacher_readings = list(teacher_tokenizer.tokenise(first_documents))
    try:
        student_readings = list(student_tokenizer.tokenise(first_documents))
    except UserError as error:
        return str(error)
    for document, student_reading, teacher_reading in zip(
        first_documents, student_readings, teacher_readings, strict=True
    ):
        if difference := _difference(student_reading, teacher_reading, student.tokenizer):
            return f"of {document.origin} it makes {difference}"
    return None


def _difference(student: TokenisedDocument, teacher: TokenisedDocument, tokenizer: Any) -> str | None:
    """The first difference between the student's and the teacher's tokens of one document, in words; None = equal."""
    if student.tokens.tolist() == teacher.tokens.tolist():
        differs = student.learnt.tolist() != teacher.learnt.tolist()
        return "the same tokens, and another part of them is the answer" if differs else None
    pairs = zip(student.tokens.tolist(), teacher.tokens.tolist(), strict=False)
    shorter = min(len(student.tokens), len(teacher.tokens))
    index_of_first = next(
        (index for index, (student_token, teacher_token) in enumerate(pairs) if student_token != teacher_token), shorter
    )
    student_token, teacher_token = (_token(reading, index_of_first, tokenizer) for reading in (student, teacher))
    return f"{student_token} at token {index_of_first + 1}, where the teacher's makes {teacher_token}"


def _token(reading: TokenisedDocument, index: int, tokenizer: Any) -> str:
    """The token at `index`, in quotes."""
    if index >= len(reading.tokens):
        return "its end"
    return repr(tokenizer.convert_ids_to_tokens(int(reading.tokens[index])))


def vocabulary_notices(tokenizer: Any, teacher_vocabulary: int, student_vocabulary: int, ids: TokenIds) -> list[str]:
    """A line where ids of an output layer stand for no token, and one where an output layer lacks ids of tokens.

    Args:
        tokenizer: the teacher's.
        teacher_vocabulary, student_vocabulary: number of ids of each output layer.
        ids: the ids that are compared.
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
    """`shared`: the ids that both models have are below this number."""
    beyond = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items() if token_id >= shared)
    if not beyond:
        return None
    return (
        f"{len(beyond)} of the tokenizer's tokens, the first {beyond[0][1]!r} with id {beyond[0][0]}, are left out: "
        f"teacher and student have {shared} ids in common, and the data needs no other"
    )


def _by_id(tokenizer: Any, vocabulary: int) -> dict[int, str]:
    """Id -> token, for the ids below `vocabulary`."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id < vocabulary}
