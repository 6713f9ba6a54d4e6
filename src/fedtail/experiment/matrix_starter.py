"""The file that `fedtail matrix --example` writes."""

from __future__ import annotations

EXAMPLE = '''\
# A matrix for fedtail: every combination of the axes below. Run it:   fedtail matrix {name}
# The sections above [matrix] are an ordinary experiment; a value of an axis says only what it changes.

rounds = 30
seeds = [0]                 # every combination is trained with each seed

[data]
kind = "digits"
clients = 100
concentration = 0.1
split = {{ within = 0.3 }}    # drawn anew for every seed; seed = 0 in it is one split for all seeds
at_least = 4

[task.module]
part = "SoftmaxRegression"
features = 64
classes = 10

[sample]
part = "Poisson"
rate = 0.5

[local]
learning_rate = 0.2
batch_size = 10
epochs = 2

[evaluate]
every = 30                  # rounds between evaluations and checkpoints
train = false
tail = false

[engine]
workers = 1

# Each axis has values, the first of which is what the others are compared with. A value is written like the sections above.
[matrix.fairness]
mean = {{}}
"tail 0.5" = {{ risk = {{ part = "Superquantile", tail_fraction = 0.5 }} }}
"TERM 1" = {{ risk = {{ part = "Tilted", tilt = 1.0 }} }}
"q-FFL 1" = {{ risk = {{ part = "PowerFair", power = 1.0 }} }}

[matrix.robustness]
none = {{}}
median = {{ aggregate = "CoordinateMedian" }}
"multi-Krum" = {{ aggregate = {{ part = "MultiKrum", corrupted_fraction = 0.2 }} }}

# Long values are tables of their own. "previous" stands for what the axes above have set: here the risk, which is then fitted
# from a noisy histogram of the losses.
[matrix.privacy]
none = {{}}
[matrix.privacy."noisy updates"]
aggregate = {{ part = "PrivateMean", clip_norm = 0.5, total = 50.0, noise = {{ noise_multiplier = 1.0 }} }}
privacy = {{ epsilon = 20.0, delta = 1e-3 }}
[matrix.privacy."noisy updates and losses"]
risk.part = "Binned"
risk.risk = "previous"
risk.histogram = {{ loss_bound = 4.0, expected_clients = 50.0, noise = {{ noise_multiplier = 2.0 }} }}
aggregate = {{ part = "PrivateMean", clip_norm = 0.5, noise = {{ noise_multiplier = 1.0 }} }}
privacy = {{ epsilon = 20.0, delta = 1e-3 }}

[matrix.personal]
none = {{}}
Ditto = {{ personal = {{ part = "Ditto", strength = 1.0, local = {{ learning_rate = 0.2, batch_size = 10, epochs = 2 }} }} }}

[matrix.attack]
none = {{}}
mislabelled = {{ attack = {{ part = "LabelPoisoning", fraction = 0.2 }} }}
'''


def matrix_example(name: str) -> str:
    """The text of a commented matrix file of 144 combinations on generated clients; `name` is the file's, for its comments."""
    return EXAMPLE.format(name=name)
