"""Who computes: clients that live in this process, or in processes forked from it, by one kernel or another."""

from fedtail.engine.choice import kernel_for
from fedtail.engine.fleet import LocalFleet
from fedtail.engine.kernels import Kernel, ModuleKernel
from fedtail.engine.linear import LinearKernel

__all__ = ["Kernel", "LinearKernel", "LocalFleet", "ModuleKernel", "kernel_for"]
