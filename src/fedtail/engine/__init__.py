"""Who computes: clients that live in this process, or in processes forked from it, by one kernel or another."""

from fedtail.engine.engine import Engine
from fedtail.engine.kernel_choice import SlowKernelWarning, kernel_for
from fedtail.engine.kernels import Kernel, ModuleKernel
from fedtail.engine.linear import LinearKernel
from fedtail.engine.local_fleet import LocalFleet

__all__ = ["Engine", "Kernel", "LinearKernel", "LocalFleet", "ModuleKernel", "SlowKernelWarning", "kernel_for"]
