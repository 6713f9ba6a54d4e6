"""How sure a result is: intervals for new clients, the noise floor of a tail, and promises about clients that nobody has seen.

Everything here takes values of clients, such as their test errors, and needs numpy and scipy only. `new_client_interval` is an
interval for the mean, a percentile or the worst share of one method, or for the difference between two, over clients and training
seeds; `verdict` makes one sentence of two of them. `noise_floor` and `real_spread` say how much of a spread over clients is the
noise of their few examples. `promise` is an upper bound for future clients of a finished model that holds for every
distribution. What is assumed and how well each holds is measured: `experiments/interval_coverage`.
"""

from fedtail.inference.intervals import Interval, new_client_interval
from fedtail.inference.noise_floor import NoiseFloor, noise_floor
from fedtail.inference.promises import Promise, promise
from fedtail.inference.real_spread import RealSpread, real_spread
from fedtail.inference.verdicts import Verdict, verdict

__all__ = ["Interval", "NoiseFloor", "Promise", "RealSpread", "Verdict", "new_client_interval", "noise_floor", "promise",
           "real_spread", "verdict"]
