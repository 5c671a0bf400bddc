"""`swap` in one process: what is on the device when, and what is refused. Its answers are under the contract."""

import pytest
import torch

from distiller.errors import UserError
from distiller.teachers import Request
from distiller.teachers.factory import open_teacher
from tests.toy_network import DIM, ToyNetwork, save_toy, setup


class WatchedNetwork(ToyNetwork):
    """Notes which modules have their weights while one runs, and fails when it is told to."""

    def __init__(self, folder):
        super().__init__(folder, 2)
        self.modules, self.seen, self.is_broken = {}, [], False

    def skeleton(self, name, dtype):
        self.modules[name] = super().skeleton(name, dtype)
        return self.modules[name]

    def present(self):
        """The modules of which any weight, or saved buffer, is not on the meta device."""
        return [n for n, m in self.modules.items() if not all(t.is_meta for t in m.state_dict().values())]

    def run(self, module, call):
        self.seen.append((call.module, self.present()))
        if self.is_broken:
            raise MemoryError("no room for the activations")
        return super().run(module, call)


REQUEST = Request((0, 1, 2), {"x": torch.randn(3, DIM)}, ("output", "again"), (1, 0, 1))


@pytest.fixture
def network(tmp_path):
    return WatchedNetwork(save_toy(tmp_path))


def test_one_module_at_a_time_is_on_the_device(network):
    teacher = open_teacher(network, setup(placement="swap"))
    assert network.present() == []
    teacher.predict([REQUEST])
    assert network.seen == [("first", ["first"])] * 2 + [("second", ["second"])] * 2
    assert network.present() == []
    teacher.close()
    assert teacher.memory().host_bytes == 0


def test_a_pass_that_fails_leaves_nothing_on_the_device(network):
    teacher = open_teacher(network, setup(placement="swap"))
    expected = teacher.predict([REQUEST])[0]["output"]
    network.is_broken = True
    with pytest.raises(MemoryError):
        teacher.predict([REQUEST])
    assert network.present() == []
    network.is_broken = False
    assert torch.equal(teacher.predict([REQUEST])[0]["output"], expected)


def test_copies_that_do_not_fit_are_refused(network, monkeypatch):
    monkeypatch.setattr("distiller.teachers.swap.free_host_bytes", lambda: 2**16)
    with pytest.raises(UserError, match=r"0.00 GiB of host memory for each of this node's 1 rank\(s\).*streamed"):
        open_teacher(network, setup(placement="swap"))
