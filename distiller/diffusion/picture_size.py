"""The size of a picture, for families that draw no videos."""

from __future__ import annotations

from distiller.errors import UserError


def latent_size(pipeline: str, num_frames: int, height: int, width: int, step: int, per_latent: int) -> tuple[int, int]:
    """(height, width) in latents. Raises UserError for videos, and for pixels that are no multiple of `step`."""
    if num_frames != 1:
        raise UserError(f"task.num_frames is {num_frames} and a {pipeline} draws pictures; set it to 1")
    for name, pixels in (("height", height), ("width", width)):
        if pixels % step:
            raise UserError(f"task.{name} {pixels} is not a multiple of {step}, as this pipeline needs")
    return height // per_latent, width // per_latent
