"""Who takes part in a round."""

from fedtail.sampling.base import Cohort, Sampler
from fedtail.sampling.by_mass import ByMass, BySize
from fedtail.sampling.poisson import Poisson
from fedtail.sampling.uniform import EqualClients, Everyone, Uniform

__all__ = ["ByMass", "BySize", "Cohort", "EqualClients", "Everyone", "Poisson", "Sampler", "Uniform"]
