// Compiled once per instruction set, with NORMKIT_ISA and NORMKIT_TABLE set by the build.
#include "parameters.h"
#include "rows_backward.h"
#include "rows_forward.h"
#include "table.h"

namespace normkit {

extern const KernelTable NORMKIT_TABLE;

#define NORMKIT_STRING_(x) #x
#define NORMKIT_STRING(x) NORMKIT_STRING_(x)

const KernelTable NORMKIT_TABLE = {
    NORMKIT_STRING(NORMKIT_ISA),
    NORMKIT_ISA::convert_parameter,
    NORMKIT_ISA::sum_blocks,
    NORMKIT_ISA::rows_forward,
    NORMKIT_ISA::rows_backward,
};

}  // namespace normkit
