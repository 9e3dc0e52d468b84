// DeepInfer's extension module with the parts that need no accelerator: sequences and the scheduler (its own
// csrc/pybind.cpp also binds the CUDA helpers and the graph timer). The scheduler's code is DeepInfer's, unchanged.
//
// What follows is what only its kernels' input preparation calls. Nothing that schedules, aborts or frees goes through
// here, and each of these refuses loudly, so that a mistake about that cannot pass unseen.
#include <torch/extension.h>

#include <vector>

#include "cuda_utils.hpp"
#include "engine/pybind.hpp"

namespace deepinfer::cuda::utils {
void cuda_copy_async(void *, void *, size_t, uint64_t) { TORCH_CHECK(false, "no accelerator: cuda_copy_async"); }
uint64_t get_current_stream() { TORCH_CHECK(false, "no accelerator: get_current_stream"); }
} // namespace deepinfer::cuda::utils

const std::vector<int> &get_engram_lookup_table() {
    static const std::vector<int> none;
    return none;
}
void fill_engram_row(int *, int, const std::vector<int> &, const std::vector<int> &, const std::vector<int> &, int, int, int) {
    TORCH_CHECK(false, "no accelerator: fill_engram_row");
}
c10::TensorOptions pinned(c10::ScalarType type) { return c10::TensorOptions().dtype(type); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    auto engine = module.def_submodule("engine");
    deepinfer::engine::pybind_engine_sequence(engine);
    deepinfer::engine::pybind_engine_scheduler(engine);
}
