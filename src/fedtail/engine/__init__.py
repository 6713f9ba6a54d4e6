"""Who computes: clients that live in this process."""

from fedtail.engine.fleet import LocalFleet
from fedtail.engine.kernels import Kernel, ModuleKernel, kernel_for
from fedtail.engine.linear import LinearKernel

__all__ = ["Kernel", "LinearKernel", "LocalFleet", "ModuleKernel", "kernel_for"]
