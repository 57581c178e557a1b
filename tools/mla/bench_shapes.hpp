#pragma once

#include <string>
#include <vector>

#include "cases/attention_case.hpp"

namespace mla::cli {

/// One shape of the benchmark. Its case is what is checked and what is timed.
struct BenchShape {
  std::string group;  ///< shapes that are read together
  cases::AttentionCase attention_case;

  double flops() const;  ///< 2 * heads * (rank + rope + rank) for each visible key of a query
  /// The same as matrix units count it, whose tiles have 64 rows: as if a request had 64 at least.
  double matrix_flops() const;
  double bytes() const;  ///< every cached row once, queries and outputs
};

/// What the library's speed on a CPU is judged by: decode at 128 and 16 heads over lengths,
/// several queries, other latent shapes, and batches of equal and of uneven requests as a server
/// sees them, small enough for a CPU. Caches are bf16 on scattered pages of 64; causal where a
/// request has several queries.
std::vector<BenchShape> bench_shapes();

/// What its speed on a GPU is judged by: decode at 16, 64 and 128 heads over batches and lengths up
/// to two million cached tokens, several queries, uneven lengths; then head counts, page sizes and
/// latent shapes beside them; then the kernel for every shape over the large ones.
std::vector<BenchShape> gpu_bench_shapes();

/// Takes out the shapes that name a kernel which does not serve them on the device. A line for each
/// group and reason of what was taken out.
std::vector<std::string> drop_unserved(std::vector<BenchShape>& shapes, Device device);

}  // namespace mla::cli
