# The instruction sets that kernels are compiled for, and their flags: the same source once for each.
# -O2 keeps the older ones small. No contraction to fused multiply-add: results then agree bit for bit between instruction
# sets, and with the operation order of the reference.
set(NORMKIT_KERNEL_FLAGS -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi
                         -Wno-uninitialized -Wno-maybe-uninitialized)
set(NORMKIT_LEVELS baseline)
set(NORMKIT_FLAGS_baseline -O2)
set(NORMKIT_TABLE_baseline kBaselineKernels)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND NORMKIT_LEVELS avx2 avx512 avx512_bf16)
  set(NORMKIT_FLAGS_avx2 -O2 -mavx2 -mf16c)
  set(NORMKIT_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c)
  set(NORMKIT_FLAGS_avx512_bf16 ${NORMKIT_FLAGS_avx512} -mavx512bf16)
  set(NORMKIT_TABLE_avx2 kAvx2Kernels)
  set(NORMKIT_TABLE_avx512 kAvx512Kernels)
  set(NORMKIT_TABLE_avx512_bf16 kAvx512Bf16Kernels)
endif()
