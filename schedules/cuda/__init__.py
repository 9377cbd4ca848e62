"""CUDA schedules: a rule returns a function whose every loop nest is one launch, or None for "not mine"."""

from hybridc.schedules.cuda.attention.attention import attention
from hybridc.schedules.cuda.attention.few_queries import few_query_attention
from hybridc.schedules.cuda.attention.tensor_core import tensor_core_attention
from hybridc.schedules.cuda.conv2d.conv2d import conv2d
from hybridc.schedules.cuda.elementwise.appended_integer_rows import appended_integer_rows
from hybridc.schedules.cuda.elementwise.appended_rows import appended_rows
from hybridc.schedules.cuda.elementwise.elementwise import elementwise
from hybridc.schedules.cuda.elementwise.transpose import transpose
from hybridc.schedules.cuda.elementwise.vectors import vector_elementwise
from hybridc.schedules.cuda.fallback import fallback
from hybridc.schedules.cuda.math import intrinsics
from hybridc.schedules.cuda.matmul.matmul import matmul
from hybridc.schedules.cuda.packed.few_rows import packed_gemv
from hybridc.schedules.cuda.reduction.columns import columns, few_rows
from hybridc.schedules.cuda.reduction.long_reductions import long_reductions
from hybridc.schedules.cuda.reduction.reduction import reduction
from hybridc.schedules.cuda.reduction.rows import rows
from hybridc.schedules.cuda.reduction.split_rows import split_rows
from hybridc.schedules.cuda.tensor_core.tensor_core import tensor_core_conv, tensor_core_matmul
from hybridc.schedules.cuda.tensor_core_winograd.tensor_core_winograd import tensor_core_winograd
from hybridc.schedules.cuda.winograd.winograd import winograd
from hybridc.schedules.rule import Rule

intrinsics.register()

RULES: tuple[Rule, ...] = (
    appended_rows,
    appended_integer_rows,
    vector_elementwise,
    transpose,
    elementwise,
    few_query_attention,
    tensor_core_attention,
    attention,
    tensor_core_matmul,
    tensor_core_winograd,
    tensor_core_conv,
    few_rows,
    packed_gemv,
    matmul,
    winograd,
    conv2d,
    rows,
    columns,
    split_rows,
    reduction,
    long_reductions,
    fallback,
)

INTEGER_ROW_RULES: tuple[Rule, ...] = (few_query_attention, attention)
"""Of functions that read rows of integers with a scale (`schedules/quantized_rows.py`)."""

__all__ = ["INTEGER_ROW_RULES", "RULES"]
