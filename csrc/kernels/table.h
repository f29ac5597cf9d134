// One function pointer per kernel, one table per instruction set, chosen once at run time.
#pragma once

#include "args.h"

namespace normkit {

struct KernelTable {
  const char* name;
  bool (*has)(DType);  // kernels of tensors of this type; those of parameters are there for every type
  void (*convert_parameter)(const ParameterArgs&);
  void (*sum_blocks)(const SumBlocksArgs&, int64_t begin, int64_t end);
  void (*update_running)(const RunningArgs&);
  void (*rows_forward)(const RowsForward&, int64_t begin, int64_t end);
  void (*rows_backward)(const RowsBackward&, int64_t begin, int64_t end);
  void (*group_norm)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*group_norm_backward)(const ChannelsBackward&, int64_t begin, int64_t end);
  void (*batch_norm)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*batch_norm_normalize)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*batch_norm_backward)(const ChannelsBackward&, int64_t begin, int64_t end);
  void (*last_moments)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*last_merge)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*last_normalize)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*last_grad_sums)(const ChannelsBackward&, int64_t begin, int64_t end);
  void (*last_grad_merge)(const ChannelsBackward&, int64_t begin, int64_t end);
  void (*last_dx)(const ChannelsBackward&, int64_t begin, int64_t end);
  void (*channel_layer_norm)(const ChannelsForward&, int64_t begin, int64_t end);
  void (*channel_layer_norm_backward)(const ChannelsBackward&, int64_t begin, int64_t end);
  int64_t (*channel_layer_norm_tiles)(const Volume&);
};

extern const KernelTable kBaselineKernels;
#if defined(NORMKIT_HAS_X86_LEVELS)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
#endif

// The best table for a type that this processor runs, up to the one that the environment variable NORMKIT_ISA names
// (baseline, avx2, avx512, avx512_bf16).
const KernelTable& kernels(DType dtype);

// The name of the best table.
const char* instruction_set();

}  // namespace normkit
