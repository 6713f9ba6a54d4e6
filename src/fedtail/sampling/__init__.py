"""Who takes part in a round."""

from fedtail.sampling.availability import Availability, Available, Diurnal
from fedtail.sampling.base import Cohort, Sampler
from fedtail.sampling.by_mass import ByMass
from fedtail.sampling.by_size import BySize
from fedtail.sampling.cyclic import CyclicCohorts
from fedtail.sampling.equal_clients import EqualClients
from fedtail.sampling.first_arrivals import FirstArrivals
from fedtail.sampling.poisson import Poisson
from fedtail.sampling.trace import Trace, TraceFile, read_trace
from fedtail.sampling.uniform import Everyone, Uniform

__all__ = ["Availability", "Available", "ByMass", "BySize", "Cohort", "CyclicCohorts", "Diurnal", "EqualClients", "Everyone",
           "FirstArrivals", "Poisson", "Sampler", "Trace", "TraceFile", "Uniform", "read_trace"]
