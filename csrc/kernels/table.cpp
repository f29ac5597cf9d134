#include "table.h"

#include <cstdlib>
#include <cstring>

namespace normkit {
namespace {

const KernelTable& choose() {
#if defined(NORMKIT_HAS_X86_LEVELS)
  __builtin_cpu_init();
  // What -mavx2 -mfma -mf16c, and the AVX-512 flags of the build, let the compiler use.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  int level = bf16 ? 3 : avx512 ? 2 : avx2 ? 1 : 0;
  if (const char* forced = std::getenv("NORMKIT_ISA")) {
    const char* const names[] = {"baseline", "avx2", "avx512", "avx512_bf16"};
    for (int i = 0; i < level; ++i)
      if (std::strcmp(forced, names[i]) == 0) level = i;
  }
  const KernelTable* const tables[] = {&kBaselineKernels, &kAvx2Kernels, &kAvx512Kernels, &kAvx512Bf16Kernels};
  return *tables[level];
#else
  return kBaselineKernels;
#endif
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

}  // namespace normkit
