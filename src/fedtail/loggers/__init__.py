"""Where the numbers of a run are written besides its result: TensorBoard, MLflow, Weights & Biases, each by its own client.

None of them is needed: a client is imported when a run that uses it begins.
"""

from fedtail.loggers.base import LoggedRun, Logger, RunLog, scalar_tag
from fedtail.loggers.mlflow import MLflow
from fedtail.loggers.tensorboard import TensorBoard
from fedtail.loggers.wandb import WandB

__all__ = ["LoggedRun", "Logger", "MLflow", "RunLog", "TensorBoard", "WandB", "scalar_tag"]
