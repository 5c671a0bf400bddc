"""Simulates two machines on one host: two launchers, in separate network namespaces where that is permitted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.launching import LAUNCHER, ROOT, Running, free_port


@dataclass(frozen=True)
class Network:
    """The command prefixes of the two launchers, and the address of the first."""

    prefixes: tuple[tuple[str, ...], ...]
    first_address: str


LOOPBACK = Network(((), ()), "127.0.0.1")


@contextmanager
def network() -> Iterator[Network]:
    """Two namespaces joined by a veth pair, or the loopback interface where namespaces are not permitted."""
    names = [f"distiller-{os.getpid()}-{number}" for number in range(2)]
    cards = [f"d{os.getpid()}-{number}" for number in range(2)]
    commands = [["netns", "add", name] for name in names]
    commands.append(["link", "add", cards[0], "netns", names[0], "type", "veth", "peer", cards[1], "netns", names[1]])
    for number, (name, card) in enumerate(zip(names, cards, strict=True), start=1):
        commands.append(["-n", name, "address", "add", f"10.213.0.{number}/24", "dev", card])
        commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", card)]
    try:
        is_made = all(_ip(*command) for command in commands)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Network(prefixes, "10.213.0.1") if is_made else LOOPBACK
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> bool:
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def begun_on_both(
    where: Network, config_file: Path, num_processes: int, run_dir: Path, *arguments: str, folders: Sequence[Path] = ()
) -> Iterator[list[Running]]:
    """The same `accelerate launch` on both machines; what still runs at the end is killed.

    Args:
        num_processes: of both together.
        folders: the working folder on each; the checkout by default.
    """
    shared = ["--num_machines", "2", "--num_processes", str(num_processes)]
    shared += ["--main_process_ip", where.first_address, "--main_process_port", str(free_port())]
    running: list[Running] = []
    try:
        for machine, prefix in enumerate(where.prefixes):
            launcher = [*LAUNCHER, "--config_file", str(config_file), *shared]
            command = [*prefix, *launcher, "--machine_rank", str(machine), "-m", "distiller", *arguments]
            folder = folders[machine] if folders else ROOT
            running.append(Running([*command, f"output_dir={run_dir}"], run_dir, folder))
        yield running
    except AssertionError:
        # The failure has the output of one of them.
        for machine, one in enumerate(running):
            print(f"machine {machine}:\n{one.last_words()}")
        raise
    finally:
        for one in running:
            one.kill_all()
