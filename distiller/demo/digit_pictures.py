"""The packaged data set of task `classification` (`data.kind: digits`): scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
from typing import Any, final

import numpy as np

from distiller.demo.digits import DIGIT_WORDS, real_digits
from distiller.errors import UserError
from distiller.vision.files import Picture
from distiller.vision.sources import Pictures


@final
class DigitPictures(Pictures):
    """The 1,797 handwritten digits that ship with scikit-learn, enlarged from 8 x 8 to 64 x 64 pixels, uint8.

    The constructor raises UserError if scikit-learn is not installed.
    """

    class_names = DIGIT_WORDS

    def __init__(self) -> None:
        try:
            self._images, labels = real_digits()
        except ImportError as error:
            raise UserError("data.kind=digits needs scikit-learn; pip install 'distiller[demo]'") from error
        self.classes = labels.tolist()
        self.names = [f"digit/{index}" for index in range(len(self.classes))]

    def contents(self) -> Any:
        return [hashlib.sha256(self._images.tobytes()).hexdigest()]

    def read(self, index: int, num_channels: int) -> Picture:
        return np.repeat(self._images[index][:, :, None], num_channels, axis=2)
