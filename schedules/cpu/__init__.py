"""Schedule rules for AVX2 and AVX-512, most special first."""

from hybridc.schedules.cpu.attention.attention import attention
from hybridc.schedules.cpu.attention.few_queries import few_queries
from hybridc.schedules.cpu.conv1d.conv1d import conv1d
from hybridc.schedules.cpu.conv1d.fourier.fft_conv1d import fft_conv1d
from hybridc.schedules.cpu.conv1d.winograd.winograd_conv1d import winograd_conv1d
from hybridc.schedules.cpu.conv2d.conv2d import conv2d
from hybridc.schedules.cpu.conv2d.depthwise import depthwise
from hybridc.schedules.cpu.conv2d_blocked.conv2d_blocked import conv2d_blocked
from hybridc.schedules.cpu.conv2d_blocked.depthwise import depthwise_blocked
from hybridc.schedules.cpu.conv2d_blocked.separable import separable
from hybridc.schedules.cpu.conv2d_converted.conv2d_converted import conv2d_converted
from hybridc.schedules.cpu.conv2d_converted.depthwise_converted import depthwise_converted
from hybridc.schedules.cpu.conv2d_converted.winograd_converted import winograd_converted
from hybridc.schedules.cpu.elementwise.appended_integer_rows import appended_integer_rows
from hybridc.schedules.cpu.elementwise.appended_rows import appended_rows
from hybridc.schedules.cpu.elementwise.elementwise import elementwise
from hybridc.schedules.cpu.elementwise.kept_rows import kept_rows
from hybridc.schedules.cpu.fallback import fallback
from hybridc.schedules.cpu.low_precision.bf16_conv1d import bf16_conv1d
from hybridc.schedules.cpu.low_precision.bf16_conv2d import bf16_conv2d
from hybridc.schedules.cpu.low_precision.bf16_matmul import bf16_matmul
from hybridc.schedules.cpu.low_precision.bf16_wgrad1d import bf16_conv1d_wgrad
from hybridc.schedules.cpu.low_precision.bf16_wgrad2d import bf16_conv2d_wgrad
from hybridc.schedules.cpu.low_precision.int8_conv2d import int8_conv2d
from hybridc.schedules.cpu.low_precision.int8_matmul import int8_matmul
from hybridc.schedules.cpu.matmul.matmul import matmul
from hybridc.schedules.cpu.matmul.skinny import skinny_gemm
from hybridc.schedules.cpu.packed.packed import packed_gemm
from hybridc.schedules.cpu.pooling.max_indices import max_pool_indices
from hybridc.schedules.cpu.pooling.pooling import pooling
from hybridc.schedules.cpu.recurrent.recurrent import recurrent
from hybridc.schedules.cpu.reduction.arg_extremum import arg_extremum
from hybridc.schedules.cpu.reduction.cumulative_sum import cumulative_sum
from hybridc.schedules.cpu.reduction.reduction import reduction
from hybridc.schedules.cpu.reduction.softmax import softmax
from hybridc.schedules.cpu.reduction.top_k import top_k
from hybridc.schedules.cpu.wgrad.conv import conv_wgrad
from hybridc.schedules.cpu.wgrad.conv1d import conv1d_wgrad
from hybridc.schedules.cpu.wgrad.fourier import fft_conv1d_wgrad
from hybridc.schedules.cpu.winograd.winograd import winograd
from hybridc.schedules.rule import Rule

INTEGER_RULES: tuple[Rule, ...] = (int8_conv2d, int8_matmul)
"""For products of 8-bit integers, before those are made of float32 for `RULES`."""

RULES: tuple[Rule, ...] = (
    recurrent,
    bf16_conv1d,
    bf16_conv1d_wgrad,
    bf16_conv2d,
    bf16_conv2d_wgrad,
    bf16_matmul,
    few_queries,
    attention,
    depthwise_blocked,
    separable,
    fft_conv1d_wgrad,
    conv1d_wgrad,
    conv_wgrad,
    winograd,
    conv2d_blocked,
    fft_conv1d,
    winograd_conv1d,
    conv1d,
    winograd_converted,
    conv2d_converted,
    conv2d,
    depthwise_converted,
    depthwise,
    packed_gemm,
    skinny_gemm,
    matmul,
    appended_integer_rows,
    appended_rows,
    kept_rows,
    elementwise,
    pooling,
    max_pool_indices,
    softmax,
    arg_extremum,
    top_k,
    cumulative_sum,
    reduction,
    fallback,
)

__all__ = ["INTEGER_RULES", "RULES"]
