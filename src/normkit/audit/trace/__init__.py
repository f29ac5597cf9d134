"""Run a model once and keep its dataflow: values, operators, module calls."""

from normkit.audit.trace.graph import ModuleCall as ModuleCall
from normkit.audit.trace.graph import Node as Node
from normkit.audit.trace.graph import ReplayError as ReplayError
from normkit.audit.trace.graph import Trace as Trace
from normkit.audit.trace.recorder import trace as trace
from normkit.audit.trace.standin import trace_past_failures as trace_past_failures

__all__ = ["ModuleCall", "Node", "ReplayError", "Trace", "trace", "trace_past_failures"]
