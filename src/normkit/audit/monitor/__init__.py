"""The audit's numbers live during training."""

from normkit.audit.monitor.callbacks import lightning_callback as lightning_callback
from normkit.audit.monitor.callbacks import trainer_callback as trainer_callback
from normkit.audit.monitor.monitor import Monitor as Monitor
from normkit.audit.monitor.sinks import scalars as scalars

__all__ = ["Monitor", "lightning_callback", "scalars", "trainer_callback"]
