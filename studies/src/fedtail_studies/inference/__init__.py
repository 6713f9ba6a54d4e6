"""How sure a result is: whether the intervals, variance components and promises of `fedtail.inference` hold what they say."""
