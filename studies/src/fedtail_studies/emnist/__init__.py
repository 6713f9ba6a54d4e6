"""FEMNIST's writers, whom the papers call EMNIST: the linear model and the ConvNet."""
