"""What [PLMH23] prints for the linear model on EMNIST: tables 2, 3 and 6; and table 4, which is about the ConvNet."""

from __future__ import annotations

from fedtail.reproduce.tables import Printed

# Table 6: mean, 10th percentile, median, 90th percentile of the test error, %, with deviations over five seeds. Its column of
# "standard deviations" is left out: it cannot be one for most rows. Tables 2 and 3 print the last and the first of these
# columns; the FedAvg-Sub there is theta = 0.5, although theta = 0.8 has the smaller 90th percentile here.
_COLUMNS = ("mean", "p10", "p50", "p90")
_TABLE6 = {
    "FedAvg": ((34.38, 0.38), (21.54, 0.35), (32.61, 0.39), (49.65, 0.67)),
    "FedAvg-Sub 0.8": ((34.20, 0.45), (21.37, 0.26), (32.10, 0.34), (49.92, 1.16)),
    "FedAvg-Sub 0.5": ((34.51, 0.47), (21.40, 0.36), (32.36, 0.59), (50.28, 0.77)),
    "FedAvg-Sub 0.1": ((34.60, 0.46), (21.71, 0.37), (32.54, 0.37), (50.33, 1.28)),
    "FedProx": ((33.82, 0.30), (21.37, 0.35), (31.75, 0.20), (49.15, 0.74)),
    "q-FFL": ((34.71, 0.27), (22.33, 0.41), (32.80, 0.23), (49.90, 0.58)),
    "Tilted-ERM": ((34.15, 0.25), (22.43, 0.29), (32.36, 0.23), (48.59, 0.62)),
    "AFL": ((39.32, 0.27), (28.64, 0.43), (38.16, 0.34), (51.62, 0.28)),
    "Delta-FL 0.8": ((34.48, 0.26), (22.24, 0.32), (32.85, 0.31), (49.10, 0.24)),
    "Delta-FL 0.5": ((35.01, 0.20), (23.64, 0.22), (33.83, 0.34), (48.44, 0.38)),
    "Delta-FL 0.1": ((38.32, 0.48), (27.27, 0.64), (37.52, 0.67), (50.34, 0.95)),
}
TABLE6 = {method: {column: Printed(*numbers) for column, numbers in zip(_COLUMNS, row, strict=True)}
          for method, row in _TABLE6.items()}

# Table 4, ConvNet: mean and 90th percentile, before and after ten epochs on the client's own data.
_PERSONAL = {
    "FedAvg": ((16.68, 0.50), (5.43, 0.12), (28.44, 1.15), (8.71, 0.19)),
    "Delta-FL 0.8": ((16.00, 0.44), (5.44, 0.08), (26.26, 1.28), (8.69, 0.12)),
    "Delta-FL 0.5": ((15.50, 0.31), (5.58, 0.07), (23.61, 1.02), (8.76, 0.15)),
    "Delta-FL 0.1": ((16.05, 0.78), (6.17, 0.11), (24.58, 1.96), (9.38, 0.06)),
}
TABLE4 = {method: dict(zip(("before.mean", "after.mean", "before.p90", "after.p90"), (Printed(*n) for n in row), strict=True))
          for method, row in _PERSONAL.items()}


def less(method: str, baseline: str, column: str) -> Printed:
    return TABLE6[method][column].less(TABLE6[baseline][column])
