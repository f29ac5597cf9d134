// Compiled once per instruction set, with NORMKIT_ISA and NORMKIT_TABLE set by the build.
#include "channel_layer_norm.h"
#include "channels_last_norms.h"
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
    NORMKIT_ISA::has,
    NORMKIT_ISA::convert_parameter,
    NORMKIT_ISA::sum_blocks,
    NORMKIT_ISA::update_running,
    NORMKIT_ISA::rows_forward,
    NORMKIT_ISA::rows_backward,
    NORMKIT_ISA::group_norm,
    NORMKIT_ISA::group_norm_backward,
    NORMKIT_ISA::batch_norm,
    NORMKIT_ISA::batch_norm_normalize,
    NORMKIT_ISA::batch_norm_backward,
    NORMKIT_ISA::last_moments,
    NORMKIT_ISA::last_merge,
    NORMKIT_ISA::last_normalize,
    NORMKIT_ISA::last_grad_sums,
    NORMKIT_ISA::last_grad_merge,
    NORMKIT_ISA::last_dx,
    NORMKIT_ISA::channel_layer_norm,
    NORMKIT_ISA::channel_layer_norm_backward,
    NORMKIT_ISA::channel_layer_norm_tiles,
};

}  // namespace normkit
