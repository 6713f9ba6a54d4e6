"""Who computes: clients that live in this process."""

from fedtail.engine.fleet import LocalFleet
from fedtail.engine.kernels import Kernel, LinearKernel, ModuleKernel, kernel_for

__all__ = ["Kernel", "LinearKernel", "LocalFleet", "ModuleKernel", "kernel_for"]
