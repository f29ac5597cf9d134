#include "table.h"

#include <cstdlib>
#include <cstring>

namespace normkit {
namespace {

#if defined(NORMKIT_HAS_X86_LEVELS)
const KernelTable* const kTables[] = {&kBaselineKernels, &kAvx2Kernels, &kAvx512Kernels, &kAvx512Bf16Kernels};

int choose() {
  __builtin_cpu_init();
  // What -mavx2 -mf16c, and the AVX-512 flags of the build, let the compiler use.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  int level = bf16 ? 3 : avx512 ? 2 : avx2 ? 1 : 0;
  if (const char* forced = std::getenv("NORMKIT_ISA")) {
    for (int i = 0; i < level; ++i)
      if (std::strcmp(forced, kTables[i]->name) == 0) level = i;
  }
  return level;
}
#else
const KernelTable* const kTables[] = {&kBaselineKernels};

int choose() { return 0; }
#endif

int best() {
  static const int level = choose();
  return level;
}

}  // namespace

const KernelTable& kernels(DType dtype) {
  int level = best();
  while (!kTables[level]->has(dtype)) --level;  // the lowest has every type
  return *kTables[level];
}

const char* instruction_set() { return kTables[best()]->name; }

}  // namespace normkit
