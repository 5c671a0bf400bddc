"""Prompts for the ten digits, real pictures of digits, and a judge that recognises drawn digits.

The embedded Wan pipeline (``distiller/assets/digits-wan``) draws handwritten digits from prompts such as "a handwritten
seven". This module holds what its training, the quick start and the evaluation share:

- a grammar of wordings, nine tenths of which training may use (:func:`seen_wordings`) and one tenth of which neither
  the teacher nor a student ever sees (:func:`unseen_wordings`);
- the 1,797 handwritten digits that ship with scikit-learn (:func:`real_digits`);
- :class:`DigitJudge`, which says which digit a picture shows.

Everything here is deterministic and needs neither torch nor a download.
"""

# The libraries' stubs are narrower than what the libraries take and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import functools
import itertools
import random
import re
from collections.abc import Iterable
from typing import final

import numpy as np
from numpy.typing import NDArray

from distiller.diffusion.judges import Judge
from distiller.errors import UserError

IMAGE_SIZE = 64
"""Height and width of every picture, in pixels."""

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_OPENINGS = ("", "draw", "please draw", "write", "please write", "show me", "give me", "i want", "paint")
_SUBJECTS = (
    "{digit}",
    "digit {digit}",
    "number {digit}",
    "a {digit}",
    "a handwritten {digit}",
    "a hand written {digit}",
    "a hand drawn {digit}",
    "a neat {digit}",
    "a simple {digit}",
    "a plain {digit}",
    "a clear {digit}",
    "a white {digit}",
    "a bold {digit}",
    "the digit {digit}",
    "the number {digit}",
    "the numeral {digit}",
    "the figure {digit}",
    "the character {digit}",
    "the handwritten digit {digit}",
    "the handwritten number {digit}",
    "a picture of a {digit}",
    "an image of the digit {digit}",
    "a drawing of the number {digit}",
    "a sketch of the numeral {digit}",
    "a scan of a handwritten {digit}",
    "a photo of a {digit}",
)
_TAILS = (
    "",
    "by hand",
    "in white ink",
    "on black paper",
    "on a black background",
    "in white on black",
    "with a pen",
    "with a thick brush",
    "in chalk on a blackboard",
    "on a dark page",
    "as a child would",
    "with smooth strokes",
)
# Wordings that the documentation uses. Never held out, since users are likely to try them first.
_ALWAYS_SEEN = ("{digit}", "a {digit}", "a handwritten {digit}", "the digit {digit}")
_NUM_TRAINING_PROMPTS = 2000


@functools.cache
def _split_wordings() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All wordings in one fixed shuffled order, split into (seen, unseen)."""
    wordings = [" ".join(part for part in parts if part) for parts in itertools.product(_OPENINGS, _SUBJECTS, _TAILS)]
    random.Random("digits").shuffle(wordings)
    candidates = [wording for wording in wordings if wording not in _ALWAYS_SEEN]
    unseen = tuple(candidates[: len(wordings) // 10])
    held_out = set(unseen)
    return tuple(wording for wording in wordings if wording not in held_out), unseen


def seen_wordings() -> tuple[str, ...]:
    """The wordings that training may use, as templates with one ``{digit}``, in a fixed shuffled order."""
    return _split_wordings()[0]


def unseen_wordings() -> tuple[str, ...]:
    """The held-out tenth of the wordings, as templates with one ``{digit}``; training sees all their words."""
    return _split_wordings()[1]


def make_prompt(wording: str, digit: int, *, numeral: bool) -> str:
    """Puts ``digit`` (0 to 9) into a wording, as a numeral ("7") or as a word ("seven"): "an 8", but "a 7"."""
    name = str(digit) if numeral else DIGIT_WORDS[digit]
    return re.sub(r"\ba (?=8|eight\b)", "an ", wording.format(digit=name))


def all_prompts(wordings: Iterable[str]) -> frozenset[str]:
    """Every prompt that these wordings make: with each digit, as word and as numeral."""
    return frozenset(
        make_prompt(wording, digit, numeral=numeral)
        for wording in wordings
        for digit in range(10)
        for numeral in (False, True)
    )


def vocabulary() -> tuple[str, ...]:
    """Every word that a prompt of this module can contain, lower-case, sorted; numerals count as words."""
    prompts = all_prompts((*seen_wordings(), *unseen_wordings()))
    return tuple(sorted({word for prompt in prompts for word in prompt.split()}))


def training_prompts() -> list[str]:
    """The 2,000 prompts that a student is distilled from: 200 of each digit in turn, half of them in numerals.

    They use seen wordings only, each about once, always in the same order.
    """
    wordings = itertools.cycle(seen_wordings())
    return [
        make_prompt(next(wordings), index % 10, numeral=index // 10 % 2 == 1) for index in range(_NUM_TRAINING_PROMPTS)
    ]


def judge_prompts(num_per_digit: int, seed: int) -> tuple[list[str], NDArray[np.int64]]:
    """Draws prompts to judge a model with.

    Args:
        num_per_digit: Prompts of each digit; a tenth of them, rounded, use unseen wordings.
        seed: The same seed gives the same prompts.

    Returns:
        The prompts, ``10 * num_per_digit`` of them in order of their digit, and their digits, int64 of the same length.
    """
    rng = random.Random(f"judge {seed}")
    num_unseen = round(num_per_digit / 10)
    prompts, labels = [], []
    for digit in range(10):
        for index in range(num_per_digit):
            wording = rng.choice(unseen_wordings() if index < num_unseen else seen_wordings())
            prompts.append(make_prompt(wording, digit, numeral=rng.random() < 0.5))
            labels.append(digit)
    return prompts, np.array(labels, dtype=np.int64)


def real_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The handwritten digits of scikit-learn (from the UCI repository), enlarged smoothly from 8x8.

    Returns:
        Pictures, uint8 [1797, 64, 64], white strokes on black; their digits, int64 [1797].
    """
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    dataset = load_digits()
    # Cubic interpolation is linear and separable: one [64, 8] matrix on either side does it for all pictures at once.
    enlarge = zoom(np.eye(8), (IMAGE_SIZE // 8, 1), order=3, mode="grid-constant", grid_mode=True)
    enlarged = enlarge @ (dataset.images * (255 / 16)) @ enlarge.T
    return np.clip(np.rint(enlarged), 0, 255).astype(np.uint8), dataset.target.astype(np.int64)


@final
class DigitJudge(Judge):
    """Recognises digits with a support vector machine fitted on :func:`real_digits`, seen at 8x8.

    Its own accuracy on real digits that it was not fitted on is 99.0% (10-fold stratified cross-validation, mean of
    three shuffles). Fitting takes less than half a second on a CPU.
    """

    picture_size = (IMAGE_SIZE, IMAGE_SIZE)
    num_features = 64

    def __init__(self) -> None:
        """Fits the classifier. Raises UserError where scikit-learn is not installed."""
        try:
            from sklearn.svm import SVC

            images, labels = real_digits()
        except ImportError as error:
            raise UserError(
                "evaluation.judge=digits needs scikit-learn; pip install 'distiller[demo]', or set it to none"
            ) from error
        self._classifier = SVC(gamma=0.001, C=10.0).fit(_features(images), labels)

    @staticmethod
    def prompts(count: int, seed: int) -> tuple[list[str], NDArray[np.int64]]:
        """As `judge_prompts`, as many of each digit: `count` rounded up to a multiple of 10."""
        return judge_prompts(-(-count // 10), seed)

    def recognise(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Says which digit each picture shows.

        Args:
            images: uint8 [N, 64, 64, 3], white on black.

        Returns:
            int64 [N], each 0 to 9.

        Raises:
            ValueError: The images have another shape or type.
        """
        return self._classifier.predict(_features(_grey(images)))

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Mean brightness of 8x8 cells, 0 to 1: float64 [N, 64]. Takes and raises what `recognise` does."""
        return _features(_grey(images)) / 16


def _grey(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The mean over channels of pictures uint8 [N, 64, 64, 3]: [N, 64, 64]. Raises ValueError for others."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE, 3):
        raise ValueError(
            f"the judge got images of type {images.dtype} and shape {list(images.shape)}, "
            f"but it takes uint8 [N, {IMAGE_SIZE}, {IMAGE_SIZE}, 3]"
        )
    return images.mean(axis=-1)


def _features(images: NDArray) -> NDArray[np.float64]:
    """Mean-pools [N, 64, 64] pictures of 0 to 255 to 8x8 cells of 0 to 16, flattened: float64 [N, 64]."""
    block = IMAGE_SIZE // 8
    cells = images.reshape(len(images), 8, block, 8, block).mean(axis=(2, 4))
    return cells.reshape(len(images), 64) * (16 / 255)
