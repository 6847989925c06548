"""Virtual devices whose gradients reach the host late, as a GPU's do: not a number until somebody has waited."""

import torch

from hydra_tune.devices.device import Arrival, Device

POISON = 0xFF


class LateArrival(Arrival):
    def __init__(self, tensors, hosts):
        super().__init__()
        self.tensors = tensors  # on the device
        self.late = []  # bytes in host memory, and what they are to be; the tensors themselves are autograd's alone
        for host in hosts:
            if host.layout is torch.strided:
                there = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
                self.late.append((there, there.clone()))
                there.fill_(POISON)

    def wait(self):
        for there, value in self.late:
            there.copy_(value)
        self.tensors, self.late = [], []


def come_late(monkeypatch):
    """From here on; how many arrivals nobody has waited for is told by the list that is returned."""
    arrivals = []

    at_once = Device.spill

    def spill(device, tensors, like):
        hosts, _ = at_once(device, tensors, like)
        arrivals.append(LateArrival(tensors, hosts))
        return hosts, arrivals[-1]

    monkeypatch.setattr(Device, "spills_behind", True)
    monkeypatch.setattr(Device, "spill", spill)
    return arrivals
