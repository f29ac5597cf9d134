"""The operators: kernels where there are any, the plain form elsewhere, one function each.

Every ``x`` here has ``x_reference`` (its plain form) and, as ``torch.ops.normkit.x_backward``, its gradient.
"""

from normkit.ops.extension import LOADED as LOADED
from normkit.ops.extension import Report as Report
from normkit.ops.extension import report as report
from normkit.ops.extension import warn_once as warn_once

from normkit.ops import library as library  # isort: skip  (registers fakes and gradients)

from normkit.ops.bind import add_and_norm as add_and_norm
from normkit.ops.bind import bind as bind
from normkit.ops.bind import given as given
from normkit.ops.bind import measuring as measuring
from normkit.ops.bind import operator as operator
from normkit.ops.channels import batch_norm as batch_norm
from normkit.ops.channels import batch_norm_train as batch_norm_train
from normkit.ops.channels import channel_layer_norm as channel_layer_norm
from normkit.ops.channels import group_norm as group_norm
from normkit.ops.channels import instance_norm as instance_norm
from normkit.ops.channels import update_running as update_running
from normkit.ops.out import add_layer_norm_out as add_layer_norm_out
from normkit.ops.out import add_rms_norm_out as add_rms_norm_out
from normkit.ops.out import batch_norm_out as batch_norm_out
from normkit.ops.out import batch_norm_train_out as batch_norm_train_out
from normkit.ops.out import channel_layer_norm_out as channel_layer_norm_out
from normkit.ops.out import gated_rms_norm_out as gated_rms_norm_out
from normkit.ops.out import group_norm_out as group_norm_out
from normkit.ops.out import layer_norm_out as layer_norm_out
from normkit.ops.out import rms_norm_out as rms_norm_out
from normkit.ops.references import add_layer_norm_reference as add_layer_norm_reference
from normkit.ops.references import add_rms_norm_reference as add_rms_norm_reference
from normkit.ops.references import batch_norm_reference as batch_norm_reference
from normkit.ops.references import batch_norm_train_reference as batch_norm_train_reference
from normkit.ops.references import channel_layer_norm_reference as channel_layer_norm_reference
from normkit.ops.references import gated_rms_norm_reference as gated_rms_norm_reference
from normkit.ops.references import group_norm_reference as group_norm_reference
from normkit.ops.references import layer_norm_reference as layer_norm_reference
from normkit.ops.references import rms_norm_reference as rms_norm_reference
from normkit.ops.rows import add_layer_norm as add_layer_norm
from normkit.ops.rows import add_rms_norm as add_rms_norm
from normkit.ops.rows import gated_rms_norm as gated_rms_norm
from normkit.ops.rows import layer_norm as layer_norm
from normkit.ops.rows import rms_norm as rms_norm
from normkit.ops.watch import called as called
