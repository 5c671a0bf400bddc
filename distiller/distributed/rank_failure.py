"""When ranks fail: which are gone, which reports first, and the file in which torch's agent looks for the reason."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from distiller.distributed.process import is_main_process, world_size


def missing_ranks() -> list[int]:
    """This machine's ranks that no longer run, by the operating system; [] where that cannot be known."""
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
    """The rank of a running process; None for processes without a rank and for zombies."""
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
    """Whether a collective failed because of another rank: torch's own errors, and gloo's plain RuntimeErrors."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def is_first_to_report(reason: str) -> bool:
    """Whether this is the first rank of the machine to report a failure; True once, on one rank.

    When a rank fails the others follow, with errors that only repeat it. The first one's reason is kept in a file that
    the ranks share, beside the files that torch's agent gives to each rank. Without an agent, rank 0 reports.
    """
    shared = _first_reason_file()
    if shared is None:
        return is_main_process()
    temporary = shared.with_name(f"{shared.name}-{os.getpid()}")
    try:
        _write(temporary, reason)
        # Unlike a rename, a link fails where the file exists.
        os.link(temporary, shared)
    except FileExistsError:
        return False
    except OSError:
        return is_main_process()
    finally:
        temporary.unlink(missing_ok=True)
    return True


def write_error_file(reason: str, is_own: bool) -> None:
    """Writes why this rank ends into the file that torch's agent prints as the last lines of a failed run.

    The agent shows the rank that ended first, to the second: so ranks that followed another one write its reason.

    Args:
        is_own: no other rank's reason is the cause of this one.
    """
    shared, timestamp = _first_reason_file(), int(time.time())
    if shared is None:
        return
    with suppress(OSError):
        if not is_own and shared.is_file():
            reason = shared.read_text(encoding="utf-8")
        # JSON would keep surrogates, which the agent cannot print.
        reason = reason.encode("utf-8", errors="backslashreplace").decode("utf-8")
        extra = {"py_callstack": reason, "timestamp": str(timestamp)}
        content = json.dumps({"message": {"message": reason, "extraInfo": extra}})
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        # Complete or absent: the agent fails on an incomplete file.
        temporary = file.with_name(f".{file.name}.tmp")
        _write(temporary, content)
        temporary.replace(file)


def _first_reason_file() -> Path | None:
    """The file that this machine's ranks share; None where no agent started them."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent / "distiller-first-failure" if error_file else None


def _write(file: Path, text: str) -> None:
    # Paths that are not UTF-8 come as surrogates, which no encoder takes.
    file.write_text(text, encoding="utf-8", errors="backslashreplace")
