"""Teacher outputs on disk: written once by `distiller cache`, read by loader processes instead of asking a teacher."""
