"""The other ranks on this machine, as far as the operating system knows them: for when they no longer answer."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from distiller.distributed.process import is_main_process, world_size


def missing_ranks() -> list[int]:
    """Numbers of this machine's ranks that are no longer running; [] where that cannot be known."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_world_size == 1:
        return []
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    try:
        children = psutil.Process(os.getppid()).children()
    except psutil.Error:
        return []
    alive = {rank for child in children if (rank := _rank_of(child)) is not None}
    return [rank for rank in range(first, first + local_world_size) if rank not in alive]


def _rank_of(process: psutil.Process) -> int | None:
    """The rank of a living process; None of others, and of one that has ended and waits to be noticed."""
    try:
        rank = process.environ().get("RANK")
        return None if rank is None or process.status() == psutil.STATUS_ZOMBIE else int(rank)
    except psutil.Error:
        return None


def describe_lost_ranks(detail: str) -> str:
    """One sentence on ranks that do not answer; `detail` is what the library said."""
    missing = missing_ranks()
    if missing:
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {world_size()}"
        return f"{names} {'are' if len(missing) > 1 else 'is'} gone; continue with --resume"
    return f"the ranks lost each other ({detail}); look at what the other ranks said, then continue with --resume"


def is_lost_rank_error(error: BaseException) -> bool:
    """Whether a collective failed because of another rank: torch's own errors, and gloo's, which have no type."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def reports_first(reason: str) -> bool:
    """Whether this is the first of the machine's ranks that has something to say; True once, on one of them.

    When a rank fails the others follow, with errors that only repeat it. They share a mark beside the files that
    torch's agent gives to each rank, which holds the first one's reason; without an agent, rank 0 speaks.
    """
    mark = _mark()
    if mark is None:
        return is_main_process()
    own = mark.with_name(f"{mark.name}-{os.getpid()}")
    try:
        _written(own, reason)
        # Unlike a rename, this fails where the mark is there.
        os.link(own, mark)
    except FileExistsError:
        return False
    except OSError:
        return is_main_process()
    finally:
        own.unlink(missing_ok=True)
    return True


def write_error_file(reason: str, is_own: bool) -> None:
    """Writes why this rank ends into the file where torch's agent looks for it, and prints it, as its last lines.

    The agent shows the rank that ended first, by whole seconds: ranks that followed another one give its reason.

    Args:
        is_own: no other rank's reason is the cause of this one.
    """
    mark, timestamp = _mark(), int(time.time())
    if mark is None:
        return
    with suppress(OSError):
        if not is_own and mark.is_file():
            reason = mark.read_text(encoding="utf-8")
        # JSON would hand surrogates on, to whoever reads the file.
        reason = reason.encode("utf-8", errors="backslashreplace").decode("utf-8")
        extra = {"py_callstack": reason, "timestamp": str(timestamp)}
        content = json.dumps({"message": {"message": reason, "extraInfo": extra}})
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        # A whole file or none: the agent fails on half a one.
        _written(file.with_name(f".{file.name}.tmp"), content).replace(file)


def _mark() -> Path | None:
    """A file that the machine's ranks share; None where no agent gave them files."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent / "distiller-has-spoken" if error_file else None


def _written(file: Path, text: str) -> Path:
    # Paths that are not UTF-8 come as surrogates, which no encoder takes.
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
    return file
