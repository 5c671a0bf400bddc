"""The size of a picture's latents, for families that generate no videos."""

from __future__ import annotations

from distiller.errors import UserError


def latent_size(pipeline: str, num_frames: int, height: int, width: int, step: int, per_latent: int) -> tuple[int, int]:
    """The (height, width) in latents of a picture whose size is given in pixels.

    Args:
        pipeline: its name, for messages.
        step: what height and width in pixels must be multiples of.
        per_latent: pixels per latent along each axis.

    Raises:
        UserError: more than one frame, or a height or width that is not a multiple of `step`.
    """
    if num_frames != 1:
        raise UserError(f"task.num_frames is {num_frames} and a {pipeline} draws pictures; set it to 1")
    for name, pixels in (("height", height), ("width", width)):
        if pixels % step:
            raise UserError(f"task.{name} {pixels} is not a multiple of {step}, as this pipeline needs")
    return height // per_latent, width // per_latent
